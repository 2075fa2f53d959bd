"""Shared prefixes of sequences, compared with explicit sets of prefixes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rl_core.layout.packing import plan_micro_batches
from rl_core.layout.prefixes import (
    PrefixForest,
    families,
    input_cells,
    prefix_blocks,
    prefix_forest,
    separate_sequences,
)

Sequences = list[list[int]]
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12)
"""Few different tokens, so that many sequences share prefixes, are prefixes of others, or are equal."""


def stream_of(sequences: Sequences) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Offsets and tokens of the stream."""
    return np.cumsum([0, *map(len, sequences)]), np.array([token for tokens in sequences for token in tokens])


def forest_of(sequences: Sequences, least_saved: int = 1) -> PrefixForest:
    offsets, tokens_T = stream_of(sequences)
    return prefix_forest(offsets, tokens_T, least_saved=least_saved)


def prefixes_of(sequences: Sequences) -> list[tuple[int, ...]]:
    """For each token of the stream, its sequence up to that token."""
    return [tuple(tokens[: t + 1]) for tokens in sequences for t in range(len(tokens))]


@settings(max_examples=300)
@given(sequences=SEQUENCES, least_saved=st.sampled_from([1, 3, 16]))
def test_tokens_share_a_cell_only_if_their_prefixes_are_equal(sequences: Sequences, least_saved: int):
    forest = forest_of(sequences, least_saved)
    prefixes_of_cell: dict[int, set[tuple[int, ...]]] = {}
    for cell, prefix in zip(forest.cell_T.tolist(), prefixes_of(sequences), strict=True):
        prefixes_of_cell.setdefault(cell, set()).add(prefix)
    assert sorted(prefixes_of_cell) == list(range(forest.num_cells))
    assert all(len(prefixes) == 1 for prefixes in prefixes_of_cell.values())
    if least_saved == 1:
        assert forest.num_cells == len(set(prefixes_of(sequences)))


@settings(max_examples=300)
@given(sequences=SEQUENCES, least_saved=st.sampled_from([1, 3]), multiple=st.sampled_from([1, 4]))
def test_a_cell_attends_to_exactly_the_tokens_of_its_prefix(sequences: Sequences, least_saved: int, multiple: int):
    offsets, tokens_T = stream_of(sequences)
    forest = forest_of(sequences, least_saved)
    cells = input_cells(forest, offsets, total_multiple=multiple)
    is_last_T = np.isin(np.arange(len(tokens_T)), offsets[1:] - 1)
    needed = set(forest.cell_T[~is_last_T].tolist())
    assert (cells.index_C >= 0).sum() == max(1, len(needed))
    assert len(cells.index_C) % multiple == 0
    assert (cells.cell_T[~is_last_T] >= 0).all()
    assert cells.length_M.sum() == len(cells.index_C)
    seen = seen_cells(cells.length_M, cells.parent_M)
    for prefix, cell in zip(prefixes_of(sequences), cells.cell_T.tolist(), strict=True):
        if cell >= 0:
            assert tuple(tokens_T[cells.index_C[seen[cell]]].tolist()) == prefix
            assert cells.position_C[cell] == len(prefix) - 1


def seen_cells(length_M: NDArray[np.int64], parent_M: NDArray[np.int64]) -> list[list[int]]:
    """For each cell, the cells that it attends to: its block's keys, then the cells of its own node up to itself."""
    blocks = prefix_blocks(length_M, parent_M)
    query_ends, key_ends = np.cumsum(blocks.query_length_B), np.cumsum(blocks.key_length_B)
    before: dict[int, list[int]] = {}
    for i in range(len(query_ends)):
        keys = blocks.key_K[key_ends[i] - blocks.key_length_B[i] : key_ends[i]].tolist()
        for query in blocks.query_Q[query_ends[i] - blocks.query_length_B[i] : query_ends[i]].tolist():
            assert query not in before, "each query must be in one block only"
            before[query] = keys
    starts = np.repeat(np.cumsum(length_M) - length_M, length_M)
    return [[*before.get(cell, []), *range(start, cell + 1)] for cell, start in enumerate(starts.tolist())]


def test_tokens_with_different_other_inputs_do_not_share_a_cell():
    offsets, tokens_T = stream_of([[1, 2, 3], [1, 2, 4]])
    routes_TLK = np.zeros((6, 2, 1), np.uint8)
    assert prefix_forest(offsets, tokens_T, routes_TLK, least_saved=1).num_cells == 4
    routes_TLK[4, 1] = 1
    assert prefix_forest(offsets, tokens_T, routes_TLK, least_saved=1).num_cells == 5


def test_sharing_few_tokens_is_not_worth_it():
    sequences = [[1, 2, 3, 4], [1, 2, 3, 5], [6, 7]]
    assert forest_of(sequences, least_saved=4).num_cells == separate_sequences([0, 4, 8, 10]).num_cells == 10
    assert forest_of(sequences, least_saved=3).num_cells == 7


def test_saved_tokens_of_nested_shared_beginnings_are_counted_once():
    """All four sequences share the first token, and each pair shares a longer prefix. Sharing within the pairs leaves
    two cells for the first token, so sharing it among all four saves only one more cell."""
    sequences = [[1, *([group] * 5), answer] for group in (2, 3) for answer in (4, 5)]
    assert forest_of(sequences, least_saved=2).num_cells == 2 * (6 + 2)
    assert forest_of(sequences, least_saved=1).num_cells == 1 + 2 * (5 + 2)


@pytest.mark.parametrize("shared", [1, 31, 32, 33, 95, 96, 97, 300])
def test_long_beginnings_are_shared_up_to_their_first_difference(shared: int):
    sequences = [[*([7] * shared), *rest] for rest in ([1, 2], [3], [1, 4, 5], [1, 2])]
    offsets, tokens_T = stream_of(sequences)
    routes_TLK = np.zeros((len(tokens_T), 2, 1), np.int16)
    apart = [{*prefixes_of(sequences)}, {(*prefix, i >= offsets[3]) for i, prefix in enumerate(prefixes_of(sequences))}]
    routed_apart_TLK = routes_TLK + (np.arange(len(tokens_T)) >= offsets[3])[:, None, None]
    for unlike, routed in zip(apart, (routes_TLK, routed_apart_TLK), strict=True):
        assert prefix_forest(offsets, tokens_T, routed, least_saved=1).num_cells == len(unlike)


def test_groups_that_share_little_are_separate_families():
    """64 prompts of 200 tokens, each with 16 answers of 100 tokens. All prompts begin with the same 8 tokens."""
    sequences = [[*([7] * 8), *([group] * 192), *range(100, 200)] for group in range(64) for _ in range(16)]
    for i, tokens in enumerate(sequences):
        tokens[200] = i
    offsets, tokens_T = stream_of(sequences)
    forest = prefix_forest(offsets, tokens_T)
    assert forest.num_cells == 8 + 64 * (192 + 16 * 100)
    members, tokens = families(forest, offsets)
    assert sorted(map(tuple, members)) == [tuple(range(16 * g, 16 * g + 16)) for g in range(64)]
    assert tokens.tolist() == [1800] * 64


LONG = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=60), min_size=1, max_size=30)


@settings(max_examples=200)
@given(sequences=LONG, slack=st.integers(0, 60), slots=st.sampled_from([None, 1, 4]), ranks=st.sampled_from([1, 2, 5]))
def test_families_are_planned_within_the_limits_on_tokens_and_sequences(
    sequences: Sequences, slack: int, slots: int | None, ranks: int
):
    offsets, _ = stream_of(sequences)
    forest, budget = forest_of(sequences), max(map(len, sequences)) + slack
    members, tokens = families(forest, offsets, max_tokens=budget, max_sequences=slots, num_data_ranks=ranks)
    assert sorted(np.concatenate(members).tolist()) == list(range(len(sequences)))
    for family, computed in zip(members, tokens.tolist(), strict=True):
        assert computed == len(set(forest.cell_T[cells_of(offsets, family)].tolist())) <= budget
        assert len(family) <= (slots or len(sequences))
    counts = [len(family) for family in members]
    plan = plan_micro_batches(tokens, num_data_ranks=ranks, max_tokens=budget, max_sequences=slots, counts_N=counts)
    for micro_batch in (m for rank in plan for m in rank):
        assert tokens[micro_batch].sum() <= budget
        assert sum(counts[i] for i in micro_batch) <= (slots or len(sequences))
    assert sorted(int(i) for rank in plan for m in rank for i in m) == list(range(len(members)))


def cells_of(offsets: NDArray[np.int64], family: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in family])


@pytest.mark.parametrize(("num_groups", "most_tokens"), [(1, 600), (4, 1800), (5, 2900), (64, 16 * 1800)])
def test_groups_do_not_leave_ranks_idle(num_groups: int, most_tokens: int):
    """Groups of 16 answers of 100 tokens to a prompt of 200 tokens, on four ranks. A single group is cut into four;
    five groups are cut so that no rank gets two whole groups; 4 and 64 groups stay whole."""
    sequences = [[*([group] * 200), *range(1000 + i, 1100 + i)] for group in range(num_groups) for i in range(16)]
    offsets, tokens_T = stream_of(sequences)
    forest = prefix_forest(offsets, tokens_T)
    assert forest.num_cells == num_groups * 1800
    members, tokens = families(forest, offsets, num_data_ranks=4)
    plan = plan_micro_batches(tokens, num_data_ranks=4)
    assert max(sum(int(tokens[m].sum()) for m in rank) for rank in plan) <= most_tokens
    assert all(len({sequences[i][0] for i in family}) == 1 for family in members)


def test_the_forest_of_a_chain_of_turns_has_the_cells_of_the_last_turn():
    turns = [list(range(n)) for n in (20, 40, 60, 80)]
    forest = forest_of(turns)
    assert forest.num_cells == 80
    assert [(a, b) for a, b in pairwise(forest.parent_M.tolist())] == [(-1, 0), (0, 1), (1, 2)]
