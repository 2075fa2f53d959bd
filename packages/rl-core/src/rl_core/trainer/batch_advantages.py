"""From rewards to the columns that a loss reads: KL in the reward, advantages, off-policy correction, loss weights.

Everything here is made by the controller for whole batches or mini-batches, before anything is split over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rl_core import plugins
from rl_core.algorithms.advantages import TokenAdvantages, whiten
from rl_core.algorithms.corrections import off_policy_correction
from rl_core.algorithms.groups import group_sum, sequence_sum
from rl_core.algorithms.kl import estimate_kl
from rl_core.algorithms.reductions import REDUCTIONS
from rl_core.algorithms.trajectories import (
    require_complete_trajectories,
    spread_to_steps,
    trajectory_lengths,
    trajectory_scores,
)
from rl_core.batch import Batch
from rl_core.errors import ConfigError
from rl_core.function_settings import positional_parameters
from rl_core.interfaces import Metrics

Estimator = Callable[..., Any]


def load_estimator(name: str, params: Mapping[str, Any]) -> Estimator:
    """The advantage estimator of that name. Raises ConfigError when it needs what this run does not make."""
    key = "trainer.algorithm.advantage_estimator"
    estimator = plugins.load_function("rl_core.advantage_estimators", name, params, key=key)
    reason = why_not_in_a_run(estimator)
    if reason is not None:
        raise ConfigError(f"{key}: {name!r} {reason}")
    return estimator


def why_not_in_a_run(estimator: Estimator) -> str | None:
    """What it needs that a training run does not make, and what to choose instead; None where nothing is missing."""
    if "greedy_scores_N" in positional_parameters(estimator):
        return (
            "compares with greedy answers, which this version's loop does not play yet; rloo takes the other samples "
            "of the prompt as its baseline"
        )
    return None


def with_advantages(batch: Batch, estimator: Estimator, params: Mapping[str, Any]) -> Batch:
    """Adds `advantages` (and `returns`, from an estimator that makes them).

    An outcome estimator sees one row per trajectory, with the sum of its rewards; its value is given to every sampled
    token of every step. A token estimator sees the stream.
    """
    columns = _estimator_columns(batch)
    result = estimator(*(columns[name] for name in positional_parameters(estimator)), **params)
    if isinstance(result, TokenAdvantages):
        advantages_T, returns_T = result.advantages_T.float(), result.returns_T.float()
        return batch.with_columns(advantages=advantages_T, returns=returns_T)
    if result.shape[0] != columns["scores_N"].shape[0]:
        return batch.with_columns(advantages=result.float())
    advantages_N = spread_to_steps(result.float(), batch["trajectory_id"])
    advantages_T = torch.where(batch["sampled"], advantages_N[batch.sequence_index], 0.0)
    return batch.with_columns(advantages=advantages_T)


def with_kl_in_reward(batch: Batch, *, coef: float, estimator: str) -> tuple[Batch, Metrics]:
    """Takes coef · KL(policy ‖ reference) of each trained token off its reward (Ziegler et al. 2019, arXiv
    1909.08593)."""
    mask_T = batch["loss_mask"]
    kl_T = estimate_kl(batch["old_logprobs"], batch["ref_logprobs"], mask_T, estimator=estimator)
    metrics = {"policy/kl": (float(kl_T.sum()), float(mask_T.sum()))}
    return batch.with_columns(rewards=batch["rewards"] - coef * kl_T), metrics


def with_normalized_advantages(batch: Batch) -> Batch:
    """Shifts and scales the advantages of all trained tokens to mean 0 and standard deviation 1."""
    return batch.with_columns(advantages=whiten(batch["advantages"], batch["loss_mask"]))


def with_off_policy_correction(batch: Batch, params: Mapping[str, Any]) -> tuple[Batch, Metrics]:
    """Applies the correction for the difference between trainer and engine: weights scale the advantage, masks clear
    the loss.

    Every loss that uses advantages is linear in them for non-negative factors, so scaling them scales the token's loss.
    One that also chooses tokens by them gets no weights (`rl_core.config.correction_params`).
    """
    result = off_policy_correction(
        batch["old_logprobs"], batch["rollout_logprobs"], batch["loss_mask"], batch.sequence_index, **params
    )
    corrected = batch.with_columns(advantages=batch["advantages"] * result.weights_T, loss_mask=result.loss_mask_T)
    return corrected, {f"correction/{name}": value for name, value in result.metrics.items()}


def with_loss_weights(batch: Batch, reduction: str, params: Mapping[str, Any]) -> Batch:
    """Adds `loss_weights`: the chosen reduction over the whole mini-batch, 0 where nothing is trained."""
    function = REDUCTIONS[reduction]
    made = {
        "loss_mask_T": lambda: batch["loss_mask"],
        "sequence_T": lambda: batch.sequence_index,
        "group_N": lambda: batch["group_id"],
    }
    columns = (made[name]() for name in positional_parameters(function))
    return batch.with_columns(loss_weights=function(*columns, **params))


def _estimator_columns(batch: Batch) -> dict[str, Tensor]:
    trajectory_N, last_N, sequence_T = batch["trajectory_id"], batch["is_last_step"], batch.sequence_index
    require_complete_trajectories(trajectory_N, last_N, batch["step_index"])
    columns = {
        "scores_N": group_sum(sequence_sum(batch["rewards"], sequence_T), trajectory_N).float(),
        "lengths_N": trajectory_lengths(sequence_sum(batch["sampled"], sequence_T).long(), trajectory_N),
        "group_N": trajectory_scores(batch["group_id"], trajectory_N, last_N),
        "rewards_T": batch["rewards"],
        "mask_T": batch["sampled"],
        "sequence_T": sequence_T,
    }
    if "values" in batch:
        columns["values_T"] = batch["values"]
    return columns
