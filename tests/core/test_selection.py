"""Selection of samples to train on: values computed by hand, any order of rows, seeds, counts of what is dropped."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.algorithms.selection import (
    GroupSelection,
    dynamic_sampling_filter,
    dynamic_sampling_replace,
    overlong_mask,
    soft_overlong_penalty,
    zero_variance_groups,
    zero_variance_mask,
)
from rl_core.errors import ConfigError, ShapeError
from tests.core.token_streams import Stream, streams

# Scores differ within groups 4, 9 and 1. Both scores of group 2 are 1. Group 7 has only one sample.
GROUPS = torch.tensor([4, 2, 4, 7, 2, 9, 9, 1, 1])
SCORES = torch.tensor([1.0, 1, 0, 0, 1, 0, 1, 1, 0])


def test_a_group_of_equal_scores_or_of_one_sample_has_no_variance():
    assert zero_variance_groups(SCORES, GROUPS).tolist() == [False, True, False, True, True] + [False] * 4


def test_the_tolerance_is_on_the_spread_of_scores():
    scores_N, group_N = torch.tensor([0.5, 0.625]), torch.tensor([0, 0])
    assert zero_variance_groups(scores_N, group_N, zero_variance_filter_tol=0.125).tolist() == [True, True]
    assert zero_variance_groups(scores_N, group_N, zero_variance_filter_tol=0.12).tolist() == [False, False]


def test_the_zero_variance_mask_clears_tokens_and_counts_groups():
    sequence_T = torch.arange(9)
    mask_T = torch.tensor([True, True, True, True, False, True, True, True, True])
    kept_T, metrics = zero_variance_mask(mask_T, sequence_T, SCORES, GROUPS)
    assert kept_T.tolist() == [True, False, True, False, False, True, True, True, True]
    assert metrics == {"selection/zero_variance_groups": (2, 5), "selection/zero_variance_tokens": (2, 8)}


def test_the_filter_keeps_informative_groups_and_counts_the_others_by_reason():
    selection = dynamic_sampling_filter(SCORES, GROUPS, num_groups=2)
    assert selection.rows_R.tolist() == [7, 8, 0, 2]
    assert selection.group_R.tolist() == [1, 1, 4, 4]
    assert selection.is_complete
    assert selection.metrics == {
        "selection/zero_variance_groups": (1, 5),
        "selection/single_sample_groups": (1, 5),
        "selection/surplus_groups": (1, 5),
        "selection/kept_groups": (2, 5),
    }


def test_the_filter_is_incomplete_if_too_few_groups_are_informative():
    selection = dynamic_sampling_filter(SCORES, GROUPS, num_groups=4)
    assert not selection.is_complete
    assert selection.group_R.tolist() == [1, 1, 4, 4, 9, 9]
    nothing = dynamic_sampling_filter(torch.ones(2), torch.tensor([0, 0]), num_groups=1)
    assert not nothing.is_complete
    assert nothing.rows_R.tolist() == []


def test_groups_kept_by_the_filter_count_in_its_next_call():
    first = dynamic_sampling_filter(SCORES, GROUPS, num_groups=4)
    scores_N = torch.cat([SCORES[first.rows_R], torch.tensor([0.0, 1.0])])
    group_N = torch.cat([first.group_R, torch.tensor([12, 12])])
    second = dynamic_sampling_filter(scores_N, group_N, num_groups=4)
    assert second.is_complete
    assert second.group_R.tolist() == [1, 1, 4, 4, 9, 9, 12, 12]


def test_groups_without_variance_are_replaced_by_copies_of_informative_groups():
    selection = dynamic_sampling_replace(SCORES, GROUPS, seed=3)
    assert selection.is_complete
    assert selection.group_R.tolist() == [1, 1, 2, 2, 4, 4, 7, 7, 9, 9]
    assert selection.is_copy_R.tolist() == [False, False, True, True, False, False, True, True, False, False]
    sources = GROUPS[selection.rows_R]
    assert not zero_variance_groups(SCORES[selection.rows_R], selection.group_R).any()
    # Two copies, three informative groups: no group is copied twice before each was copied once.
    assert sources[2] != sources[6]
    assert selection.metrics == {
        "selection/zero_variance_groups": (1, 5),
        "selection/single_sample_groups": (1, 5),
        "selection/replaced_groups": (2, 5),
    }


def test_nothing_is_replaced_if_the_fraction_of_informative_groups_is_below_the_minimum():
    scores_N, group_N = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1, 2, 2])
    too_few = dynamic_sampling_replace(scores_N, group_N, seed=0, min_replace_ratio=0.34)
    assert not too_few.is_complete
    assert too_few.rows_R.tolist() == [0, 1]
    assert too_few.metrics["selection/replaced_groups"] == (0, 3)
    enough = dynamic_sampling_replace(scores_N, group_N, seed=0, min_replace_ratio=0.33)
    assert enough.rows_R.tolist() == [0, 1] * 3
    assert not dynamic_sampling_replace(torch.ones(2), torch.tensor([0, 0]), seed=0, min_replace_ratio=0).is_complete


def outcome(selection: GroupSelection, rows: torch.Tensor) -> list[tuple[int, int]]:
    """Sorted pairs (original row, new group) of a selection. `rows` maps its row numbers to the original ones."""
    return sorted(zip(rows[selection.rows_R].tolist(), selection.group_R.tolist(), strict=True))


@given(stream=streams(max_sequences=14, max_length=2), seed=st.integers(0, 5))
def test_selection_depends_on_the_seed_and_not_on_the_order_of_rows(stream: Stream, seed: int):
    scores_N, group_N = stream.scores(), stream.groups()
    rows = torch.arange(scores_N.numel())
    order = torch.randperm(scores_N.numel(), generator=torch.Generator().manual_seed(stream.seed))
    pairs = []
    for shown in (rows, order):
        replaced = dynamic_sampling_replace(scores_N[shown], group_N[shown], seed=seed, min_replace_ratio=0.0)
        kept = dynamic_sampling_filter(scores_N[shown], group_N[shown], num_groups=2)
        pairs.append((outcome(replaced, shown), outcome(kept, shown), replaced.metrics, kept.metrics))
    assert pairs[0] == pairs[1]


@given(stream=streams(max_sequences=14, max_length=2), num_groups=st.integers(1, 4))
def test_every_group_is_counted_once_as_kept_or_dropped(stream: Stream, num_groups: int):
    selection = dynamic_sampling_filter(stream.scores(), stream.groups(), num_groups=num_groups)
    assert sum(count for count, _ in selection.metrics.values()) == stream.groups().unique().numel()
    assert selection.group_R.unique().numel() == selection.metrics["selection/kept_groups"][0]


def test_a_seed_always_draws_the_same_copies_and_other_seeds_draw_other_copies():
    group_N = torch.arange(40).repeat_interleave(2)
    scores_N = torch.tensor([0.0, 1.0] * 20 + [0.0, 0.0] * 20)
    draws = [tuple(dynamic_sampling_replace(scores_N, group_N, seed=s).rows_R.tolist()) for s in (0, 1, 2, 0, 1, 2)]
    assert draws[:3] == draws[3:]
    assert len(set(draws)) == 3


def test_overlong_filtering_clears_truncated_sequences_and_counts_them():
    mask_T = torch.tensor([True, True, False, True, False])
    kept_T, metrics = overlong_mask(mask_T, torch.tensor([0, 1, 1, 2, 3]), torch.tensor([False, True, False, True]))
    assert kept_T.tolist() == [True, False, False, True, False]
    # Sequence 3 was truncated too, but has no trained token.
    assert metrics == {"selection/overlong_sequences": (1, 3), "selection/overlong_tokens": (1, 3)}


def test_the_soft_penalty_falls_linearly_over_the_last_cache_len_tokens():
    lengths_N = torch.tensor([0, 80, 81, 90, 100, 101, 500])
    penalties = soft_overlong_penalty(lengths_N, max_len=100, cache_len=20)
    torch.testing.assert_close(penalties, torch.tensor([0, 0, -0.05, -0.5, -1, -1, -1]))


def test_settings_out_of_range_and_shapes_that_do_not_fit_are_errors():
    with pytest.raises(ConfigError, match="cache_len: 101 is not between 1 and 100"):
        soft_overlong_penalty(torch.tensor([1]), max_len=100, cache_len=101)
    with pytest.raises(ConfigError, match="num_groups: 0"):
        dynamic_sampling_filter(SCORES, GROUPS, num_groups=0)
    with pytest.raises(ConfigError, match=r"min_replace_ratio: 1\.5"):
        dynamic_sampling_replace(SCORES, GROUPS, seed=0, min_replace_ratio=1.5)
    with pytest.raises(ConfigError, match="zero_variance_filter_tol: -1"):
        zero_variance_groups(SCORES, GROUPS, zero_variance_filter_tol=-1.0)
    with pytest.raises(ShapeError, match="row 8 is missing from group_N"):
        zero_variance_groups(SCORES, GROUPS[:8])
    with pytest.raises(ShapeError, match=r"is_truncated_N: .* at least 5 entries, .* index 4; got shape \(2,\)"):
        overlong_mask(torch.ones(5, dtype=torch.bool), torch.arange(5), torch.tensor([True, False]))
