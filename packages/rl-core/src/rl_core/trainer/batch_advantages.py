"""Adds to a batch the columns that a loss reads: KL in the reward, advantages, off-policy correction, loss weights.

The controller computes these columns for whole batches, mini-batches or, when streaming, parts of a batch, before it
splits the sequences over ranks.
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
from rl_core.errors import NonFiniteError, ShapeError
from rl_core.function_settings import positional_parameters
from rl_core.interfaces import Metrics

Estimator = Callable[..., Any]


def load_estimator(name: str, params: Mapping[str, Any]) -> Estimator:
    """Loads the advantage estimator `name`, and checks that it accepts the keyword arguments `params`."""
    return plugins.load_function(
        "rl_core.advantage_estimators", name, params, key="trainer.algorithm.advantage_estimator"
    )


def with_advantages(batch: Batch, estimator: Estimator, params: Mapping[str, Any]) -> Batch:
    """Adds `advantages`, and `returns` if the estimator computes them.

    An outcome estimator gets one row per trajectory, with the sum of the trajectory's rewards. The estimator's result
    is copied to every sampled token of all steps of the trajectory. A token estimator gets and returns values per
    token.
    """
    columns, names = _estimator_columns(batch), positional_parameters(estimator)
    if "trajectory_T" in names:
        _require_steps_in_order(batch)
    result = estimator(*(columns[name] for name in names), **params)
    if isinstance(result, TokenAdvantages):
        advantages_T, returns_T = result.advantages_T.float(), result.returns_T.float()
        return batch.with_columns(advantages=advantages_T, returns=returns_T)
    if result.shape[0] != columns["scores_N"].shape[0]:
        return batch.with_columns(advantages=result.float())
    advantages_N = spread_to_steps(result.float(), batch["trajectory_id"])
    advantages_T = torch.where(batch["sampled"], advantages_N[batch.sequence_index], 0.0)
    return batch.with_columns(advantages=advantages_T)


def with_kl_in_reward(batch: Batch, *, coef: float, estimator: str) -> tuple[Batch, Metrics]:
    """Subtracts coef · KL(policy ‖ reference) of each trained token from its reward (Ziegler et al. 2019, arXiv
    1909.08593). The environment's rewards are kept as `environment_rewards`.

    Raises:
        NonFiniteError: the KL of a token is NaN or infinite.
    """
    mask_T = batch["loss_mask"]
    kl_T = estimate_kl(batch["old_logprobs"], batch["ref_logprobs"], mask_T, estimator=estimator)
    if not bool(kl_T.isfinite().all()):
        raise NonFiniteError(
            "the KL to the reference, which is subtracted from the rewards (trainer.algorithm.use_kl_in_reward), is "
            "not finite: log-probs of the policy or of the reference are NaN or infinite. Resume with a lower learning "
            "rate, or from an earlier checkpoint"
        )
    metrics = {"policy/kl": (float(kl_T.sum()), float(mask_T.sum()))}
    rewards_T = batch["rewards"]
    return batch.with_columns(rewards=rewards_T - coef * kl_T, environment_rewards=rewards_T), metrics


def with_normalized_advantages(batch: Batch) -> Batch:
    """Shifts and scales the advantages of all trained tokens to mean 0 and standard deviation 1."""
    return batch.with_columns(advantages=whiten(batch["advantages"], batch["loss_mask"]))


def with_rewards_of_chosen(batch: Batch) -> Batch:
    """Moves the rewards of forced tokens (`_rewards_of_chosen`), because a loss ignores rewards outside `loss_mask`. A
    batch without rewards is returned unchanged."""
    if "rewards" not in batch:
        return batch
    return batch.with_columns(rewards=_rewards_of_chosen(batch, chosen_tokens(batch)))


def with_off_policy_correction(batch: Batch, params: Mapping[str, Any]) -> tuple[Batch, Metrics]:
    """Corrects for the mismatch between trainer and engine: adds `correction_weights`, and clears `loss_mask` at the
    tokens that the correction masks. The loss decides how it uses the weights (`Objective.prepare`)."""
    result = off_policy_correction(
        batch["old_logprobs"], batch["rollout_logprobs"], batch["loss_mask"], batch.sequence_index, **params
    )
    corrected = batch.with_columns(correction_weights=result.weights_T, loss_mask=result.loss_mask_T)
    return corrected, {f"correction/{name}": value for name, value in result.metrics.items()}


def with_loss_weights(batch: Batch, reduction: str, params: Mapping[str, Any]) -> Batch:
    """Adds `loss_weights`: each token's weight in the chosen reduction of the whole mini-batch; 0 for tokens that are
    not trained on."""
    return batch.with_columns(loss_weights=REDUCTIONS[reduction](*_reduction_columns(batch, reduction), **params))


def with_summed_loss_weights(batch: Batch, reduction: str, params: Mapping[str, Any]) -> tuple[Batch, float]:
    """Adds `loss_weights` to a part of a mini-batch, without dividing them by the reduction's divisor. The part
    consists of whole groups. Also returns the part's divisor: later, the weights of all parts must be divided by the
    sum of the parts' divisors."""
    weights_T, divisor = REDUCTIONS[reduction].summed(*_reduction_columns(batch, reduction), **params)
    return batch.with_columns(loss_weights=weights_T.float()), float(divisor)


def _reduction_columns(batch: Batch, reduction: str) -> list[Tensor]:
    made = {
        "loss_mask_T": lambda: batch["loss_mask"],
        "sequence_T": lambda: batch.sequence_index,
        "group_N": lambda: batch["group_id"],
    }
    return [made[name]() for name in positional_parameters(REDUCTIONS[reduction])]


def _require_steps_in_order(batch: Batch) -> None:
    """Requires that trajectories are in ascending order, and that each trajectory's steps are together and in order.
    Estimators that accumulate over steps need this."""
    trajectory, step = batch["trajectory_id"], batch["step_index"]
    wrong = (trajectory.diff() < 0) | ((trajectory.diff() == 0) & (step.diff() <= 0))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0]) + 1
        raise ShapeError(
            f"row {row} (trajectory {int(trajectory[row])}, step {int(step[row])}) follows trajectory "
            f"{int(trajectory[row - 1])}, step {int(step[row - 1])}; expected each trajectory's steps together and in "
            "order, and trajectories in ascending order"
        )


def chosen_tokens(batch: Batch) -> Tensor:
    """bool [T]: the sampled tokens without the tokens of forced responses (`Constraining`), which have no rollout
    log-prob and are not trained on. A trained token is included even if its log-prob is NaN, so that an engine's fault
    is not hidden."""
    if "rollout_logprobs" not in batch:
        return batch["sampled"]
    return batch["sampled"] & (batch["loss_mask"] | ~batch["rollout_logprobs"].isnan())


def _rewards_of_chosen(batch: Batch, chosen_T: Tensor) -> Tensor:
    """Token rewards, float [T]. The reward of a forced token is moved to the last chosen token before it in its
    sequence, or dropped if there is none."""
    rewards_T, sequence_T = batch["rewards"], batch.sequence_index
    forced_T = batch["sampled"] & ~chosen_T
    place_T = torch.arange(len(rewards_T))
    before_T = torch.where(chosen_T, place_T, -1).cummax(0).values.clamp(min=0)
    is_moved_T = forced_T & chosen_T[before_T] & (sequence_T[before_T] == sequence_T)
    kept_T = torch.where(forced_T, 0.0, rewards_T)
    return kept_T.index_add(0, before_T[is_moved_T], rewards_T[is_moved_T])


def _estimator_columns(batch: Batch) -> dict[str, Tensor]:
    trajectory_N, last_N, sequence_T = batch["trajectory_id"], batch["is_last_step"], batch.sequence_index
    require_complete_trajectories(trajectory_N, last_N, batch["step_index"])
    chosen_T = chosen_tokens(batch)

    def scores_of(rewards_T: Tensor) -> Tensor:
        return group_sum(sequence_sum(rewards_T, sequence_T), trajectory_N).float()

    columns = {
        "scores_N": scores_of(batch["rewards"]),
        "environment_scores_N": scores_of(
            batch["environment_rewards" if "environment_rewards" in batch else "rewards"]
        ),
        "lengths_N": trajectory_lengths(sequence_sum(chosen_T, sequence_T).long(), trajectory_N),
        "group_N": trajectory_scores(batch["group_id"], trajectory_N, last_N),
        "rewards_T": _rewards_of_chosen(batch, chosen_T),
        "mask_T": chosen_T,
        "sequence_T": sequence_T,
    }
    # For each token, the row of its trajectory in the columns that end in _N (ascending order of trajectory ids).
    columns["trajectory_T"] = trajectory_N.unique(return_inverse=True)[1][sequence_T]
    if "greedy_score" in batch:
        columns["greedy_scores_N"] = trajectory_scores(batch["greedy_score"], trajectory_N, last_N)
    for name in ("values", "old_logprobs", "ref_logprobs"):
        if name in batch:
            columns[f"{name}_T"] = batch[name]
    return columns
