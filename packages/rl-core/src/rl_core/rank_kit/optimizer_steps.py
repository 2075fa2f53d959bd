"""The settings of one optimizer step, taken from the configuration, the schedule, or the caller's update."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from rl_core.interfaces import OptimizerConfig, OptimizerUpdate


@attrs.frozen(kw_only=True)
class StepSettings:
    """All settings of one optimizer step: the fields of `OptimizerUpdate`, none of them None."""

    learning_rate: float
    adam_betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    gradient_scale: float

    def put_into(self, param_groups: Iterable[dict[str, Any]]) -> None:
        """Writes the settings into the param groups of torch's AdamW, or of an optimizer with the same keys. The caller
        does scaling and clipping."""
        for group in param_groups:
            group["lr"] = self.learning_rate
            group["betas"] = self.adam_betas
            group["eps"] = self.eps
            group["weight_decay"] = self.weight_decay


def step_settings(config: OptimizerConfig, update: OptimizerUpdate | None, *, scheduled_rate: float) -> StepSettings:
    """Returns the settings of one step. Settings in `update` override those of `config` and the schedule.

    Args:
        config: settings of all steps.
        update: settings of this step that differ from `config`; None: no setting differs.
        scheduled_rate: the schedule's learning rate for this step (`learning_rates.learning_rate`).
    """
    update = update or OptimizerUpdate()

    def chosen(value: Any, otherwise: Any) -> Any:
        return otherwise if value is None else value

    return StepSettings(
        learning_rate=chosen(update.learning_rate, scheduled_rate),
        adam_betas=chosen(update.adam_betas, config.adam_betas),
        eps=chosen(update.eps, config.eps),
        weight_decay=chosen(update.weight_decay, config.weight_decay),
        max_grad_norm=chosen(update.max_grad_norm, config.max_grad_norm),
        gradient_scale=update.gradient_scale,
    )
