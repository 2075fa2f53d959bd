"""Functions for trajectories that consist of several sequences (steps). The rows may be in any order.

A step-wise batch has N rows (steps) of M trajectories. An outcome reward belongs to a trajectory's last step, so an
advantage estimator gets only the M rows of last steps, and its advantages are copied to all steps:

    scores_M = trajectory_scores(scores_N, trajectory_N, is_last_step_N)
    group_M = trajectory_scores(group_N, trajectory_N, is_last_step_N)
    advantages_N = spread_to_steps(grpo_advantages(scores_M, group_M), trajectory_N)
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_core.algorithms.checks import (
    require_between,
    require_bool,
    require_floating,
    require_int64,
    require_same_length,
)
from rl_core.algorithms.groups import group_sum
from rl_core.algorithms.returns import continues, reverse_scan
from rl_core.errors import ShapeError
from rl_core.trajectory_rows import why_incomplete


def require_complete_trajectories(
    trajectory_N: Tensor, is_last_step_N: Tensor, step_index_N: Tensor | None = None
) -> None:
    """Raises ShapeError unless every trajectory has all its steps.

    Args:
        trajectory_N: int64, equal for the steps of one trajectory, in any order.
        is_last_step_N: bool, whether the row is the last step of its trajectory.
        step_index_N: int64, position of the row among its trajectory's steps; None: not known.

    Raises:
        ShapeError: lengths or dtypes do not fit; a trajectory has no last step, or several; its step indices are not
            0 … n − 1; or its last step does not have the largest index. The message names trajectory and row.
    """
    require_same_length(trajectory_N=trajectory_N, is_last_step_N=is_last_step_N)
    require_int64(trajectory_N=trajectory_N)
    require_bool(is_last_step_N=is_last_step_N)
    if step_index_N is not None:
        require_same_length(trajectory_N=trajectory_N, step_index_N=step_index_N)
        require_int64(step_index_N=step_index_N)
    steps = None if step_index_N is None else step_index_N.tolist()
    if reason := why_incomplete(trajectory_N.tolist(), is_last_step_N.tolist(), steps):
        raise ShapeError(reason)


def trajectory_scores(scores_N: Tensor, trajectory_N: Tensor, is_last_step_N: Tensor) -> Tensor:
    """The score of each trajectory's last step.

    Args:
        scores_N: one score or other value per step, such as its group; any dtype. Only values of last steps are read.
        trajectory_N: int64, equal for the steps of one trajectory, in any order.
        is_last_step_N: bool, true for exactly one step of each trajectory.

    Returns:
        [M] in the dtype of `scores_N`, in ascending order of the trajectories' ids.

    Raises:
        ShapeError: lengths or dtypes do not fit, or a trajectory has no last step or several.
    """
    require_same_length(scores_N=scores_N, trajectory_N=trajectory_N, is_last_step_N=is_last_step_N)
    require_complete_trajectories(trajectory_N, is_last_step_N)
    last_rows = is_last_step_N.nonzero().squeeze(1)
    return scores_N[last_rows[trajectory_N[last_rows].argsort()]]


def trajectory_lengths(lengths_N: Tensor, trajectory_N: Tensor) -> Tensor:
    """Number of sampled tokens in all steps of each trajectory: int64 [M], in ascending order of the trajectories'
    ids."""
    require_same_length(lengths_N=lengths_N, trajectory_N=trajectory_N)
    require_int64(lengths_N=lengths_N, trajectory_N=trajectory_N)
    return group_sum(lengths_N, trajectory_N).long()


def spread_to_steps(values_M: Tensor, trajectory_N: Tensor) -> Tensor:
    """Gives every step its trajectory's value.

    Args:
        values_M: one value per trajectory, in ascending order of id, as `trajectory_scores` returns.
        trajectory_N: int64, equal for the steps of one trajectory, in any order.

    Returns:
        [N] in the dtype of `values_M`.

    Raises:
        ShapeError: there are more or fewer values than trajectories.
    """
    require_same_length(trajectory_N=trajectory_N)
    require_int64(trajectory_N=trajectory_N)
    ids_M, index_N = torch.unique(trajectory_N, return_inverse=True)
    if values_M.shape != ids_M.shape:
        raise ShapeError(f"values_M: the rows form {ids_M.numel()} trajectories, got shape {tuple(values_M.shape)}")
    return values_M[index_N]


def step_returns(rewards_N: Tensor, trajectory_N: Tensor, step_index_N: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Discounted sum of the rewards from each step to its trajectory's end.

    G_i = r_i + gamma · G_{i+1} over the steps i of one trajectory. The discount applies per step, not per token.
    Source: Sutton & Barto 2018, eq. 3.9, with a step as one action.

    Args:
        rewards_N: reward of each step, finite.
        trajectory_N: int64, equal for the steps of one trajectory, in any order.
        step_index_N: int64, position of the step in its trajectory.
        gamma: discount per step, in [0, 1].

    Returns:
        The returns, [N] in the dtype and row order of `rewards_N`.

    Raises:
        ShapeError: lengths or dtypes do not fit, or two steps of a trajectory have the same index.
        ConfigError: `gamma` is out of range.
    """
    require_between(0, 1, gamma=gamma)
    require_same_length(rewards_N=rewards_N, trajectory_N=trajectory_N, step_index_N=step_index_N)
    require_floating(rewards_N=rewards_N)
    require_int64(trajectory_N=trajectory_N, step_index_N=step_index_N)
    order_N = trajectory_order(trajectory_N, step_index_N)
    decay_N = gamma * continues(trajectory_N[order_N]).double()
    returns_N = reverse_scan(rewards_N[order_N].double(), decay_N)
    return torch.empty_like(rewards_N).index_copy(0, order_N, returns_N.to(rewards_N.dtype))


def trajectory_order(trajectory_N: Tensor, step_index_N: Tensor) -> Tensor:
    """Row indices sorted by trajectory, then by step: int64 [N].

    Args:
        trajectory_N: int64, equal for the steps of one trajectory, in any order.
        step_index_N: int64, position of the step in its trajectory.

    Raises:
        ShapeError: lengths or dtypes do not fit, or two steps of a trajectory have the same index.
    """
    require_same_length(trajectory_N=trajectory_N, step_index_N=step_index_N)
    require_int64(trajectory_N=trajectory_N, step_index_N=step_index_N)
    by_step_N = step_index_N.argsort(stable=True)
    order_N = by_step_N[trajectory_N[by_step_N].argsort(stable=True)]
    trajectory_N, step_index_N = trajectory_N[order_N], step_index_N[order_N]
    repeats = (continues(trajectory_N)[:-1] & (step_index_N[1:] == step_index_N[:-1])).nonzero().flatten()
    if repeats.numel():
        a, b = sorted(order_N[int(repeats[0]) : int(repeats[0]) + 2].tolist())
        step = int(step_index_N[repeats[0]])
        raise ShapeError(f"trajectory {int(trajectory_N[repeats[0]])}: rows {a} and {b} both have step index {step}")
    return order_N
