"""Advantages of turns. See `advantages` for the conventions of all estimators."""

from __future__ import annotations

from torch import Tensor

from rl_core.algorithms.advantages import TokenAdvantages, grpo_advantages
from rl_core.algorithms.checks import require_int64, require_row_per_sequence
from rl_core.algorithms.returns import continues, on_stream, turn_index, turn_returns


def turn_level_advantages(
    rewards_T: Tensor,
    mask_T: Tensor,
    trajectory_T: Tensor,
    group_N: Tensor,
    *,
    gamma: float = 1.0,
    grpo_norm_by_std: bool = True,
) -> TokenAdvantages:
    """Compares the return of each turn with the returns of the same turn in all samples of its prompt.

    G_u = R_u + gamma · G_{u+1} (`returns.turn_returns`). All tokens of turn u have A = (G_u − mean) / (std + 1e-6),
    with mean and standard deviation (n − 1 in the denominator) over the u-th turns of the prompt's samples. Without
    `grpo_norm_by_std`: A = G_u − mean. With one turn per trajectory this is `grpo_advantages`.
    Source: the return of Sutton & Barto 2018, eq. 3.9, with a turn as one action; the group's baseline of Shao et al.
    2024, arXiv 2402.03300, applied to each turn separately.

    Args:
        rewards_T: token-level rewards, finite; 0 on tokens that were not sampled.
        mask_T: bool, the sampled tokens.
        trajectory_T: int64, non-decreasing index of the trajectory that each token belongs to; the steps of a
            trajectory are consecutive.
        group_N: int64, one per trajectory, equal for samples of one prompt.
        gamma: discount per turn, in [0, 1].
        grpo_norm_by_std: whether to divide by the standard deviation.

    Returns:
        TokenAdvantages [T] with G as returns. The advantage is 0 for a turn that only one sample of the prompt reached.

    Raises:
        ShapeError: lengths or dtypes do not fit, or a token that was not sampled has a reward.
        DataError: a return is not finite.
        ConfigError: `gamma` is out of range.
    """
    returns_T = turn_returns(rewards_T, mask_T, trajectory_T, gamma=gamma)
    require_row_per_sequence(trajectory_T, group_N=group_N)
    require_int64(group_N=group_N)
    index_T = mask_T.nonzero().squeeze(1)
    turn_T = turn_index(mask_T, trajectory_T)[index_T]
    last_U = index_T[~continues(turn_T)]
    trajectory_U = trajectory_T[last_U]
    key_U = _unique_pairs(group_N[trajectory_U], _numbers(trajectory_U))
    advantages_U = grpo_advantages(returns_T[last_U], key_U, grpo_norm_by_std=grpo_norm_by_std)
    return TokenAdvantages(on_stream(advantages_U[turn_T], index_T, rewards_T), returns_T)


def _numbers(trajectory_U: Tensor) -> Tensor:
    """Number of each turn in its trajectory, from 0."""
    position_U = trajectory_U.new_ones(trajectory_U.numel()).cumsum(0) - 1
    begins_U = trajectory_U.new_ones(trajectory_U.numel()).bool()
    begins_U[1:] = trajectory_U[1:] != trajectory_U[:-1]
    return position_U - (position_U * begins_U).cummax(0).values


def _unique_pairs(first_U: Tensor, second_U: Tensor) -> Tensor:
    """One id per distinct pair, int64 [U]."""
    _, index_U = first_U.unique(return_inverse=True)
    return index_U * (int(second_U.max()) + 1 if second_U.numel() else 1) + second_U
