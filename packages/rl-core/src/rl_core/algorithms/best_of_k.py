"""The advantage of being the best of k samples. See `advantages` for the conventions of all estimators."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_core.algorithms.groups import require_groups
from rl_core.errors import ConfigError


def best_minus_second_advantages(scores_N: Tensor, group_N: Tensor, *, k: int | None = None) -> Tensor:
    """The amount by which a sample raises the best score of k samples: its margin over the second best if it is the
    best sample, else 0.

    A_i = mean of (max S − max S∖i) over those k-subsets S of the group that contain sample i. A subset whose
    best sample is not i adds 0. If k is the group's size, the best sample gets best minus second best, all others 0.
    Weighted with these advantages, the policy gradient is an unbiased estimate of the gradient of the expected best of
    k (max@k; pass@k for scores 0 and 1), up to a constant factor.
    Sources: Tang et al. 2025, arXiv 2503.19595, for groups of k samples (leave-one-out control variate); Walder &
    Karkhanis 2025, arXiv 2505.15201, for the mean over the k-subsets of a larger group.

    Args:
        scores_N: outcome reward of each trajectory, finite, any range.
        group_N: int64, equal for samples of one prompt.
        k: subset size, at least 2; None: the group's size.

    Returns:
        Advantages [N], at least 0; 0 for a group smaller than k, and for a group of one.

    Raises:
        ShapeError: lengths or dtypes do not fit.
        DataError: a score is not finite.
        ConfigError: `k` is below 2, so a subset has no second best.
    """
    require_groups(scores_N, group_N)
    if k is not None and k < 2:
        raise ConfigError(f"k: got {k}; best minus second needs subsets of at least 2 samples")
    _, index_N, count_P = torch.unique(group_N, return_inverse=True, return_counts=True)
    advantages_N = torch.zeros_like(scores_N, dtype=torch.float64)
    by_group_N = index_N.argsort(stable=True)
    size_N = count_P[index_N[by_group_N]]
    for size in count_P.unique().tolist():
        if size >= (k or 2):
            rows_PG = by_group_N[size_N == size].view(-1, size)
            sorted_PG, order_PG = scores_N[rows_PG].double().sort(dim=1)
            weight_GG = _second_best_weights(size, k or size).to(sorted_PG)
            above_PGG = sorted_PG[:, :, None] - sorted_PG[:, None, :]
            advantages_N[rows_PG.gather(1, order_PG)] = (above_PGG * weight_GG).sum(-1)
    return advantages_N.to(scores_N.dtype)


def _second_best_weights(size: int, k: int) -> Tensor:
    """Returns a matrix whose rows and columns are samples in the order of their scores, lowest first. Of the
    k-subsets that contain sample j, entry [j, m] is the share in which j is the best sample and m the second best."""
    total = math.comb(size - 1, k - 1)
    return torch.tensor(
        [[math.comb(m, k - 2) / total if m < j else 0.0 for m in range(size)] for j in range(size)],
        dtype=torch.float64,
    )
