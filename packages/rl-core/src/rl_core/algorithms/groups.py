"""Sums and means over rows that share an id, independent of the order of rows.

Sums are in float64, and callers round the final result. So the order of rows hardly ever changes a float32 result, and
a group of equal float32 scores has a standard deviation of exactly 0. The functions with `group_N` raise ShapeError if
lengths do not fit or an argument is not a tensor; callers of `sequence_sum` check this themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_core.algorithms.checks import require_finite, require_floating, require_int64, require_same_length

_PART = 1 << 18


def group_sum(values_N: Tensor, group_N: Tensor) -> Tensor:
    """Sum of each group.

    Args:
        values_N: any number type.
        group_N: int64 ids, any values, any order.

    Returns:
        float64 [P], one sum per distinct id, in ascending order of the ids.
    """
    require_same_length(values_N=values_N, group_N=group_N)
    ids_P, index_N = torch.unique(group_N, return_inverse=True)
    return _sums(values_N, index_N, ids_P.numel())


def group_mean(values_N: Tensor, group_N: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of each row's group, and the number of rows in it: (float64 [N], int64 [N])."""
    require_same_length(values_N=values_N, group_N=group_N)
    _, index_N, count_P = torch.unique(group_N, return_inverse=True, return_counts=True)
    return (_sums(values_N, index_N, count_P.numel()) / count_P)[index_N], count_P[index_N]


def group_std(values_N: Tensor, group_N: Tensor) -> Tensor:
    """Standard deviation of each row's group with n − 1 in the denominator: float64 [N], 0 for a group of one."""
    mean_N, count_N = group_mean(values_N, group_N)
    mean_square_N, _ = group_mean((values_N.double() - mean_N).square(), group_N)
    return (mean_square_N * count_N / (count_N - 1).clamp(min=1)).sqrt()


def group_spread(values_N: Tensor, group_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Largest minus smallest value of each group, with the groups' ids and sizes: (ids int64 [P], spread [P], count
    int64 [P]), in ascending order of the ids."""
    require_same_length(values_N=values_N, group_N=group_N)
    ids_P, index_N, count_P = torch.unique(group_N, return_inverse=True, return_counts=True)
    blank_P = values_N.new_zeros(ids_P.numel())
    highest_P = blank_P.scatter_reduce(0, index_N, values_N, "amax", include_self=False)
    lowest_P = blank_P.scatter_reduce(0, index_N, values_N, "amin", include_self=False)
    return ids_P, highest_P - lowest_P, count_P


def sequence_sum(values_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Sum over the tokens of each sequence: float64 [S], S = the stream's last sequence index + 1; differentiable."""
    num_sequences = int(sequence_T[-1]) + 1 if sequence_T.numel() else 0
    return _sums(values_T, sequence_T, num_sequences)


def require_groups(scores_N: Tensor, group_N: Tensor) -> None:
    """Raises ShapeError unless scores are floating-point numbers, ids are int64, and both have the same length; raises
    DataError if a score is not finite."""
    require_same_length(scores_N=scores_N, group_N=group_N)
    require_floating(scores_N=scores_N)
    require_int64(group_N=group_N)
    require_finite(scores_N=scores_N)


def _sums(values: Tensor, index: Tensor, num_groups: int) -> Tensor:
    sums = torch.zeros(num_groups, dtype=torch.float64, device=values.device)
    # Sum in parts: for 4M tokens, allocating a float64 copy of the whole stream would take longer than the sum.
    for part, part_index in zip(values.split(_PART), index.split(_PART), strict=True):
        sums.index_add_(0, part_index, part.double())
    return sums
