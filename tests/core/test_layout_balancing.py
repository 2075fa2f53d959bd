"""Assignment of sequences to ranks, and of a rank's sequences to micro-batches."""

from __future__ import annotations

import itertools
import math
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rl_core.errors import ConfigError, ShapeError
from rl_core.layout import (
    equal_count_partition,
    flop_cost,
    greedy_partition,
    karmarkar_karp_partition,
    padded_lengths,
    part_members,
    part_sums,
    plan_micro_batches,
)

PARTITIONS = (greedy_partition, equal_count_partition, karmarkar_karp_partition)
LENGTHS = st.lists(st.integers(1, 500), min_size=0, max_size=80)


def spread(costs_N, part_N, num_parts) -> float:
    return float(np.ptp(part_sums(costs_N, part_N, num_parts)))


def best_largest_sum(costs, num_parts) -> float:
    """The smallest possible largest sum, found by trying every assignment."""
    assignments = itertools.product(range(num_parts), repeat=len(costs))
    return min(part_sums(costs, np.array(parts, np.int64), num_parts).max() for parts in assignments)


def fewest_bins(lengths, max_tokens, max_sequences) -> int:
    """The fewest possible bins, found by trying every assignment to 1, 2, … bins."""
    for num_bins in range(1, len(lengths) + 1):
        for parts in itertools.product(range(num_bins), repeat=len(lengths)):
            tokens, counts = np.bincount(parts, lengths), np.bincount(parts)
            if tokens.max() <= max_tokens and counts.max() <= max_sequences:
                return num_bins
    raise AssertionError("a sequence exceeds the budget")


# --- partitions -----------------------------------------------------------------------------------------------------


def test_the_greedy_partition_adds_the_next_largest_item_to_the_smallest_sum():
    assert greedy_partition([8, 7, 6, 5, 4], 2).tolist() == [0, 1, 1, 0, 0]  # 17 and 13


def test_karmarkar_karp_follows_the_textbook_example():
    # Differencing 8 7 6 5 4: (8,7)→1, (6,5)→1, (4,1)→3, (3,1)→2: sums 16 and 14; greedy's are 17 and 13.
    assert sorted(part_sums([8, 7, 6, 5, 4], karmarkar_karp_partition([8, 7, 6, 5, 4], 2), 2)) == [14, 16]


def require_the_bound(costs, part_N, num_parts) -> None:
    """Requires that every cost is in a part and that the parts' sums differ by at most the largest cost."""
    assert part_sums(costs, part_N, num_parts).sum() == sum(costs)
    assert spread(costs, part_N, num_parts) <= max(costs, default=0)


@pytest.mark.parametrize("partition", PARTITIONS)
@settings(max_examples=500)
@given(costs=LENGTHS, num_parts=st.integers(1, 64))
def test_sums_differ_by_at_most_the_largest_cost(partition, costs, num_parts):
    part_N = partition(costs, num_parts)
    assert part_N.dtype == np.int64
    assert part_N.shape == (len(costs),)
    require_the_bound(costs, part_N, num_parts)


def test_dealing_in_order_is_rejected_by_the_check_of_the_bound():
    """Negative control of the test above."""
    require_the_bound([9, 1] * 20, greedy_partition([9, 1] * 20, 2), 2)
    with pytest.raises(AssertionError):
        require_the_bound([9, 1] * 20, np.arange(40) % 2, 2)


@pytest.mark.parametrize("partition", [greedy_partition, karmarkar_karp_partition])
@given(costs=st.lists(st.integers(1, 30), min_size=1, max_size=7), num_parts=st.integers(1, 3))
def test_the_largest_sum_is_within_grahams_bound_of_the_best(partition, costs, num_parts):
    largest = part_sums(costs, partition(costs, num_parts), num_parts).max()
    assert largest <= (4 / 3 - 1 / (3 * num_parts)) * best_largest_sum(costs, num_parts) + 1e-9


@given(costs=LENGTHS, num_parts=st.integers(1, 64))
@example(costs=[1] * 15 + [3], num_parts=3)
def test_no_part_of_an_equal_count_partition_gets_more_than_its_share_rounded_up(costs, num_parts):
    counts = np.bincount(equal_count_partition(costs, num_parts), minlength=num_parts)
    assert counts.max() <= -(-len(costs) // num_parts)
    assert np.ptp(counts) == 0 or len(costs) % num_parts


def test_karmarkar_karp_balances_better_than_greedy():
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(20):
        costs = rng.lognormal(6, 1, 256)
        greedy, differencing = (spread(costs, p(costs, 8), 8) for p in (greedy_partition, karmarkar_karp_partition))
        ratios.append(differencing / greedy)
    assert np.median(ratios) < 0.1


@given(costs=LENGTHS, num_parts=st.integers(1, 10))
def test_part_members_list_every_item_once_under_its_part(costs, num_parts):
    part_N = greedy_partition(costs, num_parts)
    members = part_members(part_N, num_parts)
    assert len(members) == num_parts
    assert sorted(np.concatenate(members).tolist()) == list(range(len(costs)))
    assert all((part_N[items] == part).all() for part, items in enumerate(members))


def test_invalid_costs_and_numbers_of_parts_are_refused():
    with pytest.raises(ShapeError, match=r"costs_N\[1\] is nan"):
        greedy_partition([1.0, float("nan")], 2)
    with pytest.raises(ShapeError, match="num_parts is 0"):
        karmarkar_karp_partition([1.0], 0)


def test_flop_cost_adds_a_linear_and_a_quadratic_term():
    # 6 · 1000 · 10 + 6 · 2 · 8 · 10²
    assert flop_cost([10], hidden_size=8, num_layers=2, num_parameters=1000).tolist() == [69_600.0]


# --- micro-batches --------------------------------------------------------------------------------------------------


@settings(max_examples=1000)
@given(
    lengths=LENGTHS,
    num_data_ranks=st.integers(1, 64),
    max_tokens=st.none() | st.integers(512, 2000),
    max_sequences=st.none() | st.integers(1, 9),
    multiple=st.integers(1, 4),
    sequence_multiple=st.sampled_from([1, 2, 8, 12]),
)
def test_a_plan_holds_every_sequence_once_within_the_limits_with_equally_many_micro_batches_per_rank(
    lengths, num_data_ranks, max_tokens, max_sequences, multiple, sequence_multiple
):
    limits = {"max_tokens": max_tokens, "max_sequences": max_sequences}
    sizes = {"multiple": multiple, "sequence_multiple": sequence_multiple}
    plan = plan_micro_batches(lengths, num_data_ranks=num_data_ranks, **limits, **sizes)
    padded = padded_lengths(lengths, sequence_multiple)
    assert len(plan) == num_data_ranks
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) % multiple == 0
    micro_batches = [micro_batch for rank in plan for micro_batch in rank]
    assert all(m.dtype == np.int64 and (np.diff(m) > 0).all() for m in micro_batches)
    assert sorted(np.concatenate(micro_batches).tolist()) == list(range(len(lengths)))
    assert all(max_tokens is None or padded[m].sum() <= max_tokens for m in micro_batches)
    assert all(max_sequences is None or len(m) <= max_sequences for m in micro_batches)
    loads = [sum(padded[m].sum() for m in rank) for rank in plan]
    assert max(loads) - min(loads) <= max(padded, default=0)


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    max_tokens=st.integers(20, 40),
    max_sequences=st.integers(1, 6),
)
def test_six_sequences_get_at_most_one_micro_batch_more_than_the_fewest_possible(lengths, max_tokens, max_sequences):
    plan = plan_micro_batches(lengths, num_data_ranks=1, max_tokens=max_tokens, max_sequences=max_sequences)
    assert len(plan[0]) <= fewest_bins(lengths, max_tokens, max_sequences) + 1


def test_tight_budgets_are_packed_tightly():
    # Balanced filling alone would need three micro-batches here.
    assert [m.tolist() for m in plan_micro_batches([5, 4, 3, 3, 3], num_data_ranks=1, max_tokens=9)[0]] == [
        [0, 1],
        [2, 3, 4],
    ]


def test_extra_micro_batches_for_a_tight_budget_come_in_whole_multiples():
    plan = plan_micro_batches([6, 6, 6, 6, 6, 1], num_data_ranks=1, max_tokens=10, multiple=2)
    assert [m.tolist() for m in plan[0]] == [
        [0],
        [1],
        [2],
        [3],
        [4],
        [5],
    ]  # two sequences of 6 tokens exceed 10, and the number of micro-batches must be even


def test_all_ranks_get_as_many_micro_batches_as_the_rank_that_needs_most():
    def halves(costs_N, num_parts) -> np.ndarray:
        return np.array([0, 0, 0, 0, 1, 1, 1])

    plan = plan_micro_batches([5, 5, 5, 5, 6, 6, 6], num_data_ranks=2, max_tokens=10, partition=halves)
    assert [[m.tolist() for m in rank] for rank in plan] == [[[0, 3], [1], [2]], [[4], [5], [6]]]


def test_micro_batches_of_a_rank_are_balanced_and_the_largest_comes_first():
    plan = plan_micro_batches([4, 4, 1, 1, 1, 1], num_data_ranks=1, max_tokens=9)
    assert [m.tolist() for m in plan[0]] == [[0, 2, 4], [1, 3, 5]]
    plan = plan_micro_batches([4, 3, 3], num_data_ranks=1, max_tokens=9)
    assert [m.tolist() for m in plan[0]] == [[1, 2], [0]]


def test_a_rank_without_sequences_gets_empty_micro_batches():
    plan = plan_micro_batches([7, 5], num_data_ranks=3, max_sequences=1, multiple=2)
    assert [[m.tolist() for m in rank] for rank in plan] == [[[0], []], [[1], []], [[], []]]


def test_with_sequence_limits_ranks_get_equally_many_sequences():
    plan = plan_micro_batches([1000, 1, 1, 1, 1, 1, 1, 1], num_data_ranks=2, max_sequences=1)
    assert [len(rank) for rank in plan] == [4, 4]


def test_ranks_are_balanced_by_the_given_costs_with_the_given_partition():
    lengths = [50, 40, 10, 10, 10, 10, 10]

    def squares(**options) -> list[int]:
        plan = plan_micro_batches(lengths, num_data_ranks=2, **options)
        return sorted(sum(lengths[i] ** 2 for m in rank for i in m) for rank in plan)

    assert squares(costs_N=np.square(lengths), partition=karmarkar_karp_partition) == [2100, 2500]
    assert squares() == [1900, 2700]  # 70 tokens each


def test_the_same_lengths_give_the_same_plan():
    lengths = np.random.default_rng(1).integers(1, 9, 200)
    first, second = (plan_micro_batches(lengths, num_data_ranks=4, max_tokens=30) for _ in range(2))
    assert all(
        np.array_equal(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True)
    )


def test_a_sequence_over_the_budget_is_named_with_its_padding():
    with pytest.raises(ConfigError, match=r"sequence 1 has 16 tokens \(padded to a multiple of 8\).*is 15; 1 of 3.*16"):
        plan_micro_batches([5, 14, 2], num_data_ranks=2, max_tokens=15, sequence_multiple=8)


def test_invalid_lengths_limits_costs_and_counts_are_refused():
    with pytest.raises(ShapeError, match="sequence 1 has 0 tokens"):
        plan_micro_batches([5, 0], num_data_ranks=1)
    with pytest.raises(ShapeError, match="float64"):
        plan_micro_batches([5.0], num_data_ranks=1)
    with pytest.raises(ConfigError, match="max_tokens is nan, expected a whole number of at least 1"):
        plan_micro_batches([5], num_data_ranks=1, max_tokens=cast(Any, math.nan))
    with pytest.raises(ConfigError, match="num_data_ranks is '2', expected a whole number"):
        plan_micro_batches([5], num_data_ranks=cast(Any, "2"))
    for counts_N in ([1], [1, 0]):
        with pytest.raises(ShapeError, match=r"counts_N: .* at least 1, for each of 2 lengths"):
            plan_micro_batches([5, 5], num_data_ranks=1, counts_N=counts_N)
    with pytest.raises(ConfigError, match="max_tokens is 0"):
        plan_micro_batches([5], num_data_ranks=1, max_tokens=0)
    with pytest.raises(ShapeError, match="for 1 sequences"):
        plan_micro_batches([5], num_data_ranks=1, costs_N=[1, 2])
    with pytest.raises(ConfigError, match="item 1 has 3 sequences, more than max_sequences=2"):
        plan_micro_batches([5, 5], num_data_ranks=1, max_sequences=2, counts_N=[2, 3])


@pytest.mark.parametrize("ranks", [[0, 2, 1], [0, -1, 1], [0, 1]])
def test_a_partition_that_would_lose_sequences_is_refused(ranks: list[int]):
    with pytest.raises(ShapeError, match=r"partition: .* a data rank from 0 to 1 for each of 3 sequences"):
        plan_micro_batches([5, 4, 3], num_data_ranks=2, partition=lambda costs_N, num_parts: np.array(ranks))
