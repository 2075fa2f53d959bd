"""Adds to a batch the columns that a loss reads: KL in the reward, advantages, off-policy correction, loss weights.

The controller computes these columns for whole batches, mini-batches or, when streaming, parts of a batch, before it
splits the sequences over ranks.

All of them run along trajectories: the steps of an episode count as one sequence here, whether or not they were merged
into one. A policy gives a sampled token the same log-prob in both forms, so the form must not change what is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import attrs
import torch
from torch import Tensor

from rl_core import plugins
from rl_core.algorithms.advantages import TokenAdvantages, whiten
from rl_core.algorithms.corrections import off_policy_correction
from rl_core.algorithms.groups import group_sum, sequence_sum
from rl_core.algorithms.kl import estimate_kl
from rl_core.algorithms.objective import Objective
from rl_core.algorithms.reductions import REDUCTIONS
from rl_core.algorithms.trajectories import (
    require_complete_trajectories,
    spread_to_steps,
    trajectory_lengths,
    trajectory_order,
    trajectory_scores,
)
from rl_core.batch import Batch
from rl_core.errors import NonFiniteError, PluginError
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
    is copied to every sampled token of all steps of the trajectory. A token estimator gets the tokens of each
    trajectory's steps one step after another, and returns values per token.

    Raises:
        ShapeError: a trajectory is incomplete.
        PluginError: the estimator returned neither one value per trajectory nor one per token.
    """
    stream = _Stream.of(batch)
    columns = _estimator_columns(batch, stream)
    result = estimator(*(columns[name] for name in positional_parameters(estimator)), **params)
    if isinstance(result, TokenAdvantages):
        return batch.with_columns(
            advantages=stream.restored(result.advantages_T.float()), returns=stream.restored(result.returns_T.float())
        )
    num_trajectories = columns["scores_N"].shape[0]
    if result.shape == (num_trajectories,):
        advantages_N = spread_to_steps(result.float(), batch["trajectory_id"])
        advantages_T = torch.where(batch["sampled"], advantages_N[batch.sequence_index], 0.0)
        return batch.with_columns(advantages=advantages_T)
    if result.shape != (batch.num_tokens,):
        raise PluginError(
            f"returned values of shape {tuple(result.shape)}; expected one per trajectory, [{num_trajectories}], or "
            f"one per token, [{batch.num_tokens}]",
            key="trainer.algorithm.advantage_estimator",
        )
    return batch.with_columns(advantages=stream.restored(result.float()))


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
    stream = _Stream.of(batch)
    return batch.with_columns(rewards=stream.restored(_rewards_of_chosen(batch, stream)))


def with_off_policy_correction(batch: Batch, params: Mapping[str, Any]) -> tuple[Batch, Metrics]:
    """Corrects for the mismatch between trainer and engine: adds `correction_weights`, and clears `loss_mask` at the
    tokens that the correction masks. The loss decides how it uses the weights (`Objective.prepare`)."""
    stream = _Stream.of(batch)
    result = off_policy_correction(
        stream.of_column(batch["old_logprobs"]),
        stream.of_column(batch["rollout_logprobs"]),
        stream.of_column(batch["loss_mask"]),
        stream.trajectory_T,
        **params,
    )
    corrected = batch.with_columns(
        correction_weights=stream.restored(result.weights_T), loss_mask=stream.restored(result.loss_mask_T)
    )
    return corrected, {f"correction/{name}": value for name, value in result.metrics.items()}


def with_loss_weights(batch: Batch, reduction: str, params: Mapping[str, Any]) -> Batch:
    """Adds `loss_weights`: each token's weight in the chosen reduction of the whole mini-batch; 0 for tokens that are
    not trained on. All steps of a trajectory together are one sequence of the reduction."""
    stream = _Stream.of(batch)
    weights_T = REDUCTIONS[reduction](*_reduction_columns(batch, reduction, stream), **params)
    return batch.with_columns(loss_weights=stream.restored(weights_T))


def with_summed_loss_weights(batch: Batch, reduction: str, params: Mapping[str, Any]) -> tuple[Batch, float]:
    """Adds `loss_weights` to a part of a mini-batch, without dividing them by the reduction's divisor. The part
    consists of whole groups. Also returns the part's divisor: later, the weights of all parts must be divided by the
    sum of the parts' divisors."""
    stream = _Stream.of(batch)
    weights_T, divisor = REDUCTIONS[reduction].summed(*_reduction_columns(batch, reduction, stream), **params)
    return batch.with_columns(loss_weights=stream.restored(weights_T.float())), float(divisor)


def with_prepared(batch: Batch, objective: Objective, seed: int) -> Batch:
    """Adds the columns that the loss prepares from a whole mini-batch (`Objective.prepare`)."""
    stream = _Stream.of(batch)
    names = {*objective.required_columns, "correction_weights"} & set(batch)
    columns = {name: stream.of_column(batch[name]) for name in names}
    columns["group_id"] = trajectory_scores(batch["group_id"], batch["trajectory_id"], batch["is_last_step"])
    made = objective.prepare(columns, stream.trajectory_T, seed)
    return batch.with_columns(**{name: stream.restored(values_T) for name, values_T in made.items()})


def _reduction_columns(batch: Batch, reduction: str, stream: _Stream) -> list[Tensor]:
    made = {
        "loss_mask_T": lambda: stream.of_column(batch["loss_mask"]),
        "sequence_T": lambda: stream.trajectory_T,
        "group_N": lambda: trajectory_scores(batch["group_id"], batch["trajectory_id"], batch["is_last_step"]),
    }
    return [made[name]() for name in positional_parameters(REDUCTIONS[reduction])]


@attrs.frozen(kw_only=True)
class _Stream:
    """The tokens of a batch in the order of trajectory ids, and within a trajectory in the order of its steps."""

    index_T: Tensor | None
    """int64 [T]: position in the batch of each token of this stream; None: the batch already has this order."""
    trajectory_T: Tensor
    """int64 [T], non-decreasing: for each token of this stream, the row of its trajectory in columns that have one
    entry per trajectory, in ascending order of the trajectories' ids."""

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Raises ShapeError if two steps of a trajectory have the same index."""
        trajectory_N = batch["trajectory_id"]
        order_N = trajectory_order(trajectory_N, batch["step_index"])
        row_N = trajectory_N.unique(return_inverse=True)[1]
        trajectory_T = torch.repeat_interleave(row_N[order_N], batch.lengths[order_N])
        is_ordered = torch.equal(order_N, torch.arange(batch.num_sequences))
        return cls(index_T=None if is_ordered else batch.token_index(order_N), trajectory_T=trajectory_T)

    def of_column(self, values_T: Tensor) -> Tensor:
        """A column of the batch in the order of this stream."""
        return values_T if self.index_T is None else values_T[self.index_T]

    def restored(self, values_T: Tensor) -> Tensor:
        """Values of this stream's tokens in the order of the batch."""
        if self.index_T is None:
            return values_T
        return torch.empty_like(values_T).index_copy_(0, self.index_T, values_T)


def chosen_tokens(batch: Batch) -> Tensor:
    """bool [T]: the sampled tokens without the tokens of forced responses, which have no rollout
    log-prob and are not trained on. A trained token is included even if its log-prob is NaN, so that an engine's fault
    is not hidden."""
    if "rollout_logprobs" not in batch:
        return batch["sampled"]
    return batch["sampled"] & (batch["loss_mask"] | ~batch["rollout_logprobs"].isnan())


def _rewards_of_chosen(batch: Batch, stream: _Stream) -> Tensor:
    """Token rewards in the order of the stream, float [T]. The reward of a forced token is moved to the last chosen
    token before it in its trajectory, or dropped if there is none."""
    rewards_T, trajectory_T = stream.of_column(batch["rewards"]), stream.trajectory_T
    chosen_T = stream.of_column(chosen_tokens(batch))
    forced_T = stream.of_column(batch["sampled"]) & ~chosen_T
    place_T = torch.arange(len(rewards_T))
    before_T = torch.where(chosen_T, place_T, -1).cummax(0).values.clamp(min=0)
    is_moved_T = forced_T & chosen_T[before_T] & (trajectory_T[before_T] == trajectory_T)
    kept_T = torch.where(forced_T, 0.0, rewards_T)
    return kept_T.index_add(0, before_T[is_moved_T], rewards_T[is_moved_T])


def _estimator_columns(batch: Batch, stream: _Stream) -> dict[str, Tensor]:
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
        "rewards_T": _rewards_of_chosen(batch, stream),
        "mask_T": stream.of_column(chosen_T),
        **dict.fromkeys(("sequence_T", "trajectory_T"), stream.trajectory_T),
    }
    if "greedy_score" in batch:
        columns["greedy_scores_N"] = trajectory_scores(batch["greedy_score"], trajectory_N, last_N)
    for name in ("values", "old_logprobs", "ref_logprobs"):
        if name in batch:
            columns[f"{name}_T"] = stream.of_column(batch[name])
    return columns
