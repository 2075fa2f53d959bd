"""The settings of one optimizer step, taken from the configuration, the schedule, or the caller's update."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from rl_core.errors import ConfigError
from rl_core.interfaces import OptimizerConfig, OptimizerUpdate

STEPS_WITH_ADAM = ("adamw", "muon")
"""Optimizers that read `adam_betas` and `eps`."""


@attrs.frozen(kw_only=True)
class StepSettings:
    """All settings of one optimizer step: the fields of `OptimizerUpdate`, none of them None."""

    learning_rate: float
    adam_betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    gradient_scale: float
    has_adam: bool = True
    """Whether `adam_betas` and `eps` apply to the optimizer."""

    def put_into(self, param_groups: Iterable[dict[str, Any]]) -> None:
        """Writes the settings into an optimizer's param groups; those of AdamW only into AdamW's. The caller does
        scaling and clipping."""
        for group in param_groups:
            group["lr"] = self.learning_rate
            if "weight_decay" in group:
                group["weight_decay"] = self.weight_decay
            if self.has_adam and "betas" in group:
                group["betas"], group["eps"] = self.adam_betas, self.eps


def step_settings(config: OptimizerConfig, update: OptimizerUpdate | None, *, scheduled_rate: float) -> StepSettings:
    """Returns the settings of one step. Settings in `update` override those of `config` and the schedule.

    Args:
        config: settings of all steps.
        update: settings of this step that differ from `config`; None: no setting differs.
        scheduled_rate: the schedule's learning rate for this step (`learning_rates.learning_rate`).

    Raises:
        ConfigError: `update` has settings of AdamW for an optimizer without AdamW.
    """
    update, has_adam = update or OptimizerUpdate(), config.name in STEPS_WITH_ADAM
    if not has_adam and (update.adam_betas, update.eps) != (None, None):
        raise ConfigError(f"OptimizerUpdate: got adam_betas or eps, but {config.name} reads neither; leave them out")

    def chosen(value: Any, otherwise: Any) -> Any:
        return otherwise if value is None else value

    return StepSettings(
        learning_rate=chosen(update.learning_rate, scheduled_rate),
        adam_betas=chosen(update.adam_betas, config.adam_betas),
        eps=chosen(update.eps, config.eps),
        weight_decay=chosen(update.weight_decay, config.weight_decay),
        max_grad_norm=chosen(update.max_grad_norm, config.max_grad_norm),
        gradient_scale=update.gradient_scale,
        has_adam=has_adam,
    )
