"""Selects the samples to train on, and counts what was dropped and why.

All functions are pure; random choices depend on a seed argument. Which samples are selected does not depend on the
order of the rows. Metrics are (sum, weight) pairs: a metric's value is sum / weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rl_core.algorithms.checks import (
    require_between,
    require_bool,
    require_floating,
    require_int64,
    require_ordered,
    require_row_per_sequence,
    require_same_length,
)
from rl_core.algorithms.groups import group_spread, sequence_sum
from rl_core.errors import ConfigError

Metrics = dict[str, tuple[float, float]]


class MaskSelection(NamedTuple):
    """A loss mask in which some sequences were cleared."""

    loss_mask_T: Tensor
    """bool, a subset of the mask that was passed in."""
    metrics: Metrics


class GroupSelection(NamedTuple):
    """The groups of a batch to train on."""

    rows_R: Tensor
    """int64, indices of the input rows that form the batch, ordered by group, and in input order within a group."""
    group_R: Tensor
    """int64, new group id of each row. A copy has the id of the group that it replaces."""
    is_copy_R: Tensor
    """bool, whether the row belongs to a copy that replaces another group. Such a row needs a new trajectory id."""
    is_complete: bool
    """Whether enough groups were informative. If not, sample more prompts and select again."""
    metrics: Metrics


def zero_variance_groups(scores_N: Tensor, group_N: Tensor, *, zero_variance_filter_tol: float = 1e-6) -> Tensor:
    """Whether the scores of a sample's group are (almost) equal, so that the group gives no training signal.

    True if max − min of the group's scores is at most the tolerance.

    Args:
        scores_N: outcome reward of each trajectory, finite, any range.
        group_N: int64, equal for samples of one prompt.
        zero_variance_filter_tol: scores with at most this spread count as equal; at least 0.

    Returns:
        bool [N]; true for a group of one.

    Raises:
        ShapeError: lengths or dtypes do not fit.
        ConfigError: the tolerance is negative.
    """
    ids_P, flat_P, _ = _flat_groups(scores_N, group_N, zero_variance_filter_tol)
    return flat_P[torch.searchsorted(ids_P, group_N)]


def zero_variance_mask(
    loss_mask_T: Tensor,
    sequence_T: Tensor,
    scores_N: Tensor,
    group_N: Tensor,
    *,
    zero_variance_filter_tol: float = 1e-6,
) -> MaskSelection:
    """Clears the loss mask of samples in groups of equal scores, which also removes them from every denominator.

    Args:
        loss_mask_T: bool, the trained tokens.
        sequence_T: int64, non-decreasing index of the sequence that each token belongs to.
        scores_N: outcome reward of each sequence, finite.
        group_N: int64, equal for samples of one prompt.
        zero_variance_filter_tol: scores with at most this spread count as equal; at least 0.

    Returns:
        MaskSelection with the metrics `selection/zero_variance_groups` (cleared groups, all groups) and
        `selection/zero_variance_tokens` (cleared tokens, all trained tokens).

    Raises:
        ShapeError: lengths or dtypes do not fit.
        ConfigError: the tolerance is negative.
    """
    _, flat_P, _ = _flat_groups(scores_N, group_N, zero_variance_filter_tol)
    flat_N = zero_variance_groups(scores_N, group_N, zero_variance_filter_tol=zero_variance_filter_tol)
    kept_T = _cleared(loss_mask_T, sequence_T, "scores_N", flat_N)
    metrics = {
        "selection/zero_variance_groups": (_count(flat_P), float(flat_P.numel())),
        "selection/zero_variance_tokens": (_count(loss_mask_T & ~kept_T), _count(loss_mask_T)),
    }
    return MaskSelection(kept_T, metrics)


def dynamic_sampling_filter(
    scores_N: Tensor, group_N: Tensor, *, num_groups: int, zero_variance_filter_tol: float = 1e-6
) -> GroupSelection:
    """Keeps the first `num_groups` informative groups, and reports whether more prompts must be sampled.

    A group is informative if its scores differ. If more than `num_groups` are informative, those with the highest ids
    are surplus. If the selection is not complete, call this function again with the informative rows of all earlier
    rounds and the new rows.
    Source: Yu et al. 2025 (DAPO), arXiv 2503.14476, eq. 11.

    Args:
        scores_N: outcome reward of each trajectory, finite, any range.
        group_N: int64, equal for samples of one prompt; groups are used in ascending order of id.
        num_groups: number of groups in a batch.
        zero_variance_filter_tol: scores with at most this spread count as equal; at least 0.

    Returns:
        GroupSelection. If fewer than `num_groups` groups are informative, the selection is incomplete and has the rows
        of all of them. Metrics, each relative to all groups: `selection/zero_variance_groups` (without groups of one
        sample), `selection/single_sample_groups`, `selection/surplus_groups`, `selection/kept_groups`.

    Raises:
        ShapeError: lengths or dtypes do not fit.
        ConfigError: the tolerance is negative or `num_groups` not positive.
    """
    if num_groups < 1:
        raise ConfigError(f"num_groups: {num_groups} is not a positive number of groups")
    ids_P, flat_P, count_P = _flat_groups(scores_N, group_N, zero_variance_filter_tol)
    informative_P = ids_P[~flat_P]
    kept_P = informative_P[:num_groups]
    metrics = _group_metrics(flat_P, count_P)
    metrics["selection/surplus_groups"] = (float(informative_P.numel() - kept_P.numel()), float(ids_P.numel()))
    metrics["selection/kept_groups"] = (float(kept_P.numel()), float(ids_P.numel()))
    return _selection(group_N, kept_P, kept_P, kept_P.numel() == num_groups, metrics)


def dynamic_sampling_replace(
    scores_N: Tensor,
    group_N: Tensor,
    *,
    seed: int,
    min_replace_ratio: float = 0.3,
    zero_variance_filter_tol: float = 1e-6,
) -> GroupSelection:
    """Replaces every group of equal scores by a copy of an informative group, drawn at random.

    The informative groups are shuffled and used in turn, so that none is copied twice before all have been copied once.
    The same seed gives the same copies for any order of the rows.
    Source: An et al. 2025, POLARIS (a blog post, no equation), https://hkunlp.github.io/blog/2025/Polaris.

    Args:
        scores_N: outcome reward of each trajectory, finite, any range.
        group_N: int64, equal for samples of one prompt.
        seed: seed of the draw; derive it from the run's seed and the step.
        min_replace_ratio: fraction of informative groups below which nothing is replaced, in [0, 1].
        zero_variance_filter_tol: scores with at most this spread count as equal; at least 0.

    Returns:
        GroupSelection. If the fraction of informative groups is 0 or below `min_replace_ratio`, the selection is
        incomplete and has only the rows of the informative groups. Metrics, each relative to all groups:
        `selection/zero_variance_groups` (without groups of one sample), `selection/single_sample_groups`,
        `selection/replaced_groups`.

    Raises:
        ShapeError: lengths or dtypes do not fit.
        ConfigError: the tolerance is negative or the ratio out of range.
    """
    require_between(0, 1, min_replace_ratio=min_replace_ratio)
    ids_P, flat_P, count_P = _flat_groups(scores_N, group_N, zero_variance_filter_tol)
    informative_P, replaced_P = ids_P[~flat_P], ids_P[flat_P]
    is_complete = informative_P.numel() > 0 and informative_P.numel() >= min_replace_ratio * ids_P.numel()
    if not is_complete:
        replaced_P = replaced_P[:0]
    metrics = _group_metrics(flat_P, count_P)
    metrics["selection/replaced_groups"] = (float(replaced_P.numel()), float(ids_P.numel()))
    shuffled_P = informative_P[torch.randperm(informative_P.numel(), generator=torch.Generator().manual_seed(seed))]
    turn_P = torch.arange(replaced_P.numel(), device=ids_P.device) % max(shuffled_P.numel(), 1)
    source_P = torch.cat([informative_P, shuffled_P[turn_P]])
    return _selection(group_N, source_P, torch.cat([informative_P, replaced_P]), is_complete, metrics)


def overlong_mask(loss_mask_T: Tensor, sequence_T: Tensor, is_truncated_N: Tensor) -> MaskSelection:
    """Clears the loss mask of truncated sequences, because the finished response might have had another reward.

    Source: Yu et al. 2025 (DAPO, overlong filtering), arXiv 2503.14476, section 3.4.

    Args:
        loss_mask_T: bool, the trained tokens.
        sequence_T: int64, non-decreasing index of the sequence that each token belongs to.
        is_truncated_N: bool, whether the sequence ended at the length limit.

    Returns:
        MaskSelection with the metrics `selection/overlong_sequences` (cleared sequences, all sequences with a trained
        token) and `selection/overlong_tokens` (cleared tokens, all trained tokens).

    Raises:
        ShapeError: lengths or dtypes do not fit.
    """
    require_bool(is_truncated_N=is_truncated_N)
    kept_T = _cleared(loss_mask_T, sequence_T, "is_truncated_N", is_truncated_N)
    trained_S = sequence_sum(loss_mask_T, sequence_T) > 0
    left_S = sequence_sum(kept_T, sequence_T) > 0
    metrics = {
        "selection/overlong_sequences": (_count(trained_S & ~left_S), _count(trained_S)),
        "selection/overlong_tokens": (_count(loss_mask_T & ~kept_T), _count(loss_mask_T)),
    }
    return MaskSelection(kept_T, metrics)


def soft_overlong_penalty(lengths_N: Tensor, *, max_len: int, cache_len: int) -> Tensor:
    """A reward that falls from 0 to −1 over the last `cache_len` tokens before the limit.

    With length l: R = 0 up to max_len − cache_len; (max_len − cache_len − l) / cache_len up to max_len; −1 above.
    Source: Yu et al. 2025 (DAPO), arXiv 2503.14476, eq. 13.

    Args:
        lengths_N: int64, number of sampled tokens of each trajectory.
        max_len: length at which the penalty reaches −1, in tokens.
        cache_len: number of tokens before `max_len` over which the penalty grows, in [1, max_len].

    Returns:
        Penalties float32 [N] in [−1, 0]. Add them to the outcome rewards.

    Raises:
        ShapeError: the lengths are not int64 with one axis.
        ConfigError: `cache_len` is out of range.
    """
    require_same_length(lengths_N=lengths_N)
    require_int64(lengths_N=lengths_N)
    require_between(1, max_len, cache_len=cache_len)
    return ((max_len - cache_len - lengths_N).float() / cache_len).clamp(-1.0, 0.0)


def _flat_groups(scores_N: Tensor, group_N: Tensor, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the ids of the groups in ascending order, whether each group's scores are equal, and each group's
    size."""
    require_same_length(scores_N=scores_N, group_N=group_N)
    require_floating(scores_N=scores_N)
    require_int64(group_N=group_N)
    require_between(0, float("inf"), zero_variance_filter_tol=tolerance)
    ids_P, spread_P, count_P = group_spread(scores_N, group_N)
    return ids_P, spread_P <= tolerance, count_P


def _group_metrics(flat_P: Tensor, count_P: Tensor) -> Metrics:
    single_P = count_P == 1
    return {
        "selection/zero_variance_groups": (_count(flat_P & ~single_P), float(flat_P.numel())),
        "selection/single_sample_groups": (_count(single_P), float(flat_P.numel())),
    }


def _selection(
    group_N: Tensor, source_P: Tensor, target_P: Tensor, is_complete: bool, metrics: Metrics
) -> GroupSelection:
    """Selects the groups `source_P`, with the new ids `target_P`, in ascending order of the new ids."""
    order_P = target_P.argsort()
    source_P, target_P = source_P[order_P], target_P[order_P]
    ids, counts = torch.unique(group_N, return_counts=True)
    found_P = torch.searchsorted(ids, source_P)
    length_P = counts[found_P]
    start_P = (counts.cumsum(0) - counts)[found_P]
    within_R = torch.arange(int(length_P.sum()), device=group_N.device)
    within_R -= torch.repeat_interleave(length_P.cumsum(0) - length_P, length_P)
    rows_R = group_N.argsort(stable=True)[torch.repeat_interleave(start_P, length_P) + within_R]
    group_R = torch.repeat_interleave(target_P, length_P)
    return GroupSelection(rows_R, group_R, group_N[rows_R] != group_R, is_complete, metrics)


def _cleared(loss_mask_T: Tensor, sequence_T: Tensor, name: str, dropped_N: Tensor) -> Tensor:
    require_same_length(loss_mask_T=loss_mask_T, sequence_T=sequence_T)
    require_bool(loss_mask_T=loss_mask_T)
    require_ordered(sequence_T)
    require_row_per_sequence(sequence_T, **{name: dropped_N})
    return loss_mask_T & ~dropped_N[sequence_T]


def _count(mask: Tensor) -> float:
    return float(mask.count_nonzero())
