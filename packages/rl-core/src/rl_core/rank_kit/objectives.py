"""Loads a loss by name and computes it on micro-batches. All training backends share this code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_core.algorithms.objective import Objective, sum_metrics
from rl_core.batch import Batch
from rl_core.errors import ConfigError
from rl_core.interfaces import LossSpec, Metrics
from rl_core.plugins import load_function
from rl_core.rank_kit.device_copies import on_device

_CURRENT = {"logprobs": "logprobs_T", "entropies": "entropies_T", "values": "predicted_values_T"}
"""Score of the current model → the loss parameter that receives it."""


def objective_from_spec(spec: LossSpec, *, key: str | None = None) -> Objective:
    """Loads a loss by entry point or `package.module:function`, checks its parameters, and tries it on a few tokens.

    Args:
        spec: the loss and its settings.
        key: the configuration key that chose the loss, for messages.

    Raises:
        PluginError: the function does not exist, or it does not have the parameters or the result of a loss.
        ConfigError: a setting is unknown, missing or out of range.
    """
    function = load_function("rl_core.policy_losses", spec.name, spec.params, key=key)
    objective = Objective(
        function,
        spec.params,
        kl_coef=spec.kl_coef,
        kl_estimator=spec.kl_estimator,
        entropy_coef=spec.entropy_coef,
        off_policy_sequence_mask=spec.off_policy_sequence_mask,
        old_is_current=spec.old_is_current,
    )
    objective.try_out()
    return objective


def batch_loss(
    objective: Objective, batch: Batch, scores: Mapping[str, Tensor], device: torch.device
) -> tuple[Tensor, Any]:
    """The weighted loss sum of one micro-batch, to be minimised, and its metrics.

    Args:
        objective: the loss.
        batch: has the columns that the objective reads, on any device.
        scores: scores of the current model with gradient, each [T]: `logprobs`, and `entropies` if `needs_entropies`;
            or a critic's `values`.
        device: the device of the scores.
    """
    return objective(
        {name: on_device(batch[name], device) for name in objective.call_columns},
        sequence_T=on_device(batch.sequence_index, device),
        **{_CURRENT[name]: values_T for name, values_T in scores.items()},
    )


def needs_entropies(objective: Objective, spec: LossSpec, returns: Sequence[str]) -> bool:
    """Whether a training pass must compute entropies: the loss reads them, or they are reported or returned."""
    return "entropies" in objective.reads or spec.measures_entropy or "entropies" in returns


def total_metrics(parts: Iterable[Any]) -> Metrics:
    """Combines the metrics of several micro-batches into the metrics of one call, in which `loss` is a sum with
    weight 1. Empty without micro-batches."""
    totals = sum_metrics(list(parts))
    return {**totals, "loss": (totals["loss"][0], 1.0)} if totals else {}


def require_scores(returns: Sequence[str], score_names: Sequence[str], role: str) -> None:
    """Raises ConfigError if `returns` of a worker's call names a score that the model does not have."""
    for name in returns:
        if name not in score_names:
            raise ConfigError(f"{role}: returns: got {name!r}; this model has only {', '.join(score_names)}")
