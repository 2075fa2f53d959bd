"""Which tokens a rank holds, and how its results are gathered back into the stream."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import ShapeError
from rl_core.layout import (
    Mesh,
    context_positions,
    even_slice,
    inverse_index,
    packed_layout,
    padded_layout,
    plan_micro_batches,
    rank_positions,
)
from tests.core.test_layout_mesh import meshes

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=20)


def offsets_of(lengths) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_a_packed_micro_batch_equals_one_laid_out_by_hand():
    layout = packed_layout([0, 3, 4, 6], [2, 0], sequence_multiple=4, total_multiple=12)
    assert layout.index.tolist() == [4, 5, -1, -1, 0, 1, 2, -1, -1, -1, -1, -1]
    assert layout.target_index.tolist() == [5, -1, -1, -1, 1, 2, -1, -1, -1, -1, -1, -1]
    assert layout.position.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
    assert layout.boundaries.tolist() == [0, 4, 8, 12]


def test_a_padded_micro_batch_equals_one_laid_out_by_hand():
    layout = padded_layout([0, 3, 4, 6], [0, 2], width_multiple=2)
    assert layout.index.reshape(2, -1).tolist() == [[0, 1, 2, -1], [4, 5, -1, -1]]
    assert layout.target_index.reshape(2, -1).tolist() == [[1, 2, -1, -1], [5, -1, -1, -1]]
    assert layout.boundaries.tolist() == [0, 4, 8]


def test_context_ranks_hold_mirrored_chunks_of_every_sequence():
    boundaries = np.array([0, 8, 12])
    assert context_positions(boundaries, 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert context_positions(boundaries, 1, 2).tolist() == [2, 3, 4, 5, 9, 10]


def test_ulysses_ranks_hold_contiguous_slices():
    assert even_slice(8, 1, 4) == slice(2, 4)


def test_a_micro_batch_without_sequences_is_padding():
    packed = packed_layout([0, 3], [], sequence_multiple=4, total_multiple=8)
    padded = padded_layout([0, 3], [], width_multiple=4)
    assert packed.index.tolist() == packed.target_index.tolist() == [-1] * 8
    assert packed.boundaries.tolist() == [0, 8]
    assert padded.index.tolist() == [-1] * 4
    assert padded.boundaries.tolist() == [0, 4]


# --- by properties, over length lists and meshes of up to 64 ranks ----------------------------------------------------


def layouts_of_ranks(lengths, mesh: Mesh, max_tokens: int):
    """Yields (rank, layout, positions) for each rank and each of its micro-batches."""
    plan = plan_micro_batches(
        lengths, num_data_ranks=mesh.data, max_tokens=max_tokens, sequence_multiple=mesh.sequence_multiple
    )
    offsets = offsets_of(lengths)
    multiples = {"sequence_multiple": mesh.sequence_multiple, "total_multiple": mesh.micro_batch_tokens_multiple()}
    layouts = [[packed_layout(offsets, sequences, **multiples) for sequences in part] for part in plan]
    for rank in range(mesh.world_size):
        for layout in layouts[mesh.data_rank(rank)]:
            yield rank, layout, rank_positions(layout.boundaries, mesh, rank)


def is_representative(mesh: Mesh, rank: int) -> bool:
    """True for one rank of each set of ranks that hold the same tokens."""
    place = mesh.coordinates(rank)
    return place.tensor == 0 and place.pipeline == 0


@settings(max_examples=500)
@given(LENGTHS, meshes(), st.integers(0, 200))
def test_shards_partition_the_tokens_and_the_inverse_restores_the_stream(lengths, mesh, slack):
    budget = -(-max(lengths) // mesh.sequence_multiple) * mesh.sequence_multiple + slack
    parts = [
        (layout.index[positions], layout.target_index[positions])
        for rank, layout, positions in layouts_of_ranks(lengths, mesh, budget)
        if is_representative(mesh, rank)
    ]
    num_tokens = sum(lengths)
    held = np.concatenate([index for index, _ in parts])
    assert sorted(held[held >= 0].tolist()) == list(range(num_tokens))
    inverse = inverse_index([index for index, _ in parts], num_tokens)
    assert np.array_equal(held[inverse], np.arange(num_tokens))
    firsts = set(offsets_of(lengths)[:-1].tolist())
    predicted = inverse_index([target for _, target in parts], num_tokens)
    assert set(np.flatnonzero(predicted < 0).tolist()) == firsts


@settings(max_examples=500)
@given(LENGTHS, meshes(), st.integers(0, 200))
def test_ranks_of_a_replica_hold_equally_many_tokens_and_tensor_ranks_hold_the_same_tokens(lengths, mesh, slack):
    budget = -(-max(lengths) // mesh.sequence_multiple) * mesh.sequence_multiple + slack
    by_rank: dict[int, list[np.ndarray]] = {}
    for rank, layout, positions in layouts_of_ranks(lengths, mesh, budget):
        by_rank.setdefault(rank, []).append(layout.index[positions])
        assert len(positions) % mesh.tensor == 0
    for axis in ("context", "sequence", "tensor", "pipeline"):
        for group in mesh.groups(axis):
            for parts in zip(*(by_rank[rank] for rank in group), strict=True):
                assert len({len(part) for part in parts}) == 1
                assert axis in ("context", "sequence") or all(np.array_equal(parts[0], part) for part in parts)


def fake_logprobs(tokens, targets, positions) -> np.ndarray:
    """A function of input token, predicted token and position, so that misplacing any of them changes the result."""
    return np.sin(tokens * 1.7 + targets * 0.3 + positions * 0.11)


def logprobs_through(lengths, tokens_T, mesh: Mesh, max_tokens: int) -> np.ndarray:
    """Log-probs computed rank by rank and gathered back into the stream."""
    parts, values = [], []
    for rank, layout, positions in layouts_of_ranks(lengths, mesh, max_tokens):
        if is_representative(mesh, rank):
            index, target_index = layout.index[positions], layout.target_index[positions]
            values.append(fake_logprobs(tokens_T[index], tokens_T[target_index], layout.position[positions]))
            parts.append(target_index)
    inverse = inverse_index(parts, len(tokens_T))
    return np.where(inverse >= 0, np.concatenate(values)[inverse], 0.0)


@settings(max_examples=500)
@given(LENGTHS, meshes(), st.integers(0, 200))
def test_any_layout_of_a_batch_gives_the_numbers_of_the_plain_stream(lengths, mesh, slack):
    tokens_T = np.random.default_rng(sum(lengths)).integers(0, 1000, sum(lengths))
    expected = np.zeros(len(tokens_T))
    for start, end in zip(offsets_of(lengths)[:-1], offsets_of(lengths)[1:], strict=True):
        for t in range(start + 1, end):
            expected[t] = fake_logprobs(tokens_T[t - 1], tokens_T[t], t - 1 - start)
    budget = -(-max(lengths) // mesh.sequence_multiple) * mesh.sequence_multiple + slack
    assert np.array_equal(logprobs_through(lengths, tokens_T, mesh, budget), expected)


def test_mixing_up_index_and_target_index_is_caught_by_the_numbers():
    """Negative control of the test above."""
    lengths, tokens_T = [5, 7], np.arange(12) * 3
    layout = packed_layout(offsets_of(lengths), [0, 1])
    values = fake_logprobs(tokens_T[layout.index], tokens_T[layout.target_index], layout.position)
    wrong = values[inverse_index([layout.index], 12)]
    right = logprobs_through(lengths, tokens_T, Mesh(world_size=1), 99)
    is_predicted = right != 0  # a sequence's first token has no log-prob
    assert not np.allclose(wrong[is_predicted], right[is_predicted])


@given(LENGTHS, st.sampled_from([1, 4, 6]))
def test_packed_and_padded_rows_hold_the_same_pairs(lengths, multiple):
    sequences = np.arange(len(lengths))[::-1]
    packed = packed_layout(offsets_of(lengths), sequences, sequence_multiple=multiple)
    padded = padded_layout(offsets_of(lengths), sequences, width_multiple=multiple)

    def pairs(layout) -> list[tuple[int, int, int]]:
        columns = (layout.index, layout.target_index, layout.position)
        return [row for row in zip(*(c.tolist() for c in columns), strict=True) if row[0] >= 0]

    assert pairs(packed) == pairs(padded)
    assert np.ptp(np.diff(padded.boundaries)) == 0


@given(LENGTHS, st.integers(2, 8))
def test_context_ranks_do_equal_work_under_a_causal_mask(lengths, size):
    layout = packed_layout(offsets_of(lengths), np.arange(len(lengths)), sequence_multiple=2 * size)
    work = [int((layout.position[context_positions(layout.boundaries, r, size)] + 1).sum()) for r in range(size)]
    assert len(set(work)) == 1


def test_contiguous_shards_in_place_of_mirrored_ones_do_unequal_work():
    layout = packed_layout([0, 64], [0])
    work = [int((layout.position[even_slice(64, r, 2)] + 1).sum()) for r in range(2)]
    assert work[1] > 2 * work[0]


# --- what is refused --------------------------------------------------------------------------------------------------


def test_positions_that_cannot_be_split_and_unknown_ranks_are_refused():
    with pytest.raises(ShapeError, match="segment 1 has 6 tokens, not a multiple of 2 · 2"):
        context_positions(np.array([0, 4, 10]), 0, 2)
    with pytest.raises(ShapeError, match="10 positions cannot be split evenly over 4"):
        even_slice(10, 0, 4)
    with pytest.raises(ShapeError, match="context rank 2 is outside"):
        context_positions(np.array([0, 4]), 2, 2)


def test_a_token_held_twice_or_outside_the_stream_is_named():
    with pytest.raises(ShapeError, match="token 1 of the stream occurs 2 times"):
        inverse_index([np.array([0, 1]), np.array([1, -1]), np.array([2, 2, 2])], 3)
    with pytest.raises(ShapeError, match="stream index 3 is outside a stream of 3 tokens"):
        inverse_index([np.array([3])], 3)
    with pytest.raises(ShapeError, match="sequence 2 is not in a batch of 2 sequences"):
        packed_layout([0, 1, 2], [2])
    with pytest.raises(ShapeError, match="sequences: expected indices, got float64"):
        packed_layout([0, 1, 2], [0.7])
    with pytest.raises(ShapeError, match="a multiple of -2 tokens; expected at least 1"):
        packed_layout([0, 1, 2], [0], total_multiple=-2)
    with pytest.raises(ShapeError, match=r"sequences: expected indices, got a mask; .*np\.flatnonzero"):
        packed_layout([0, 1, 2], [False, True])


@pytest.mark.parametrize("offsets", [[3, 1, 2], [0, 3, 3], [], [[0, 3]]])
def test_lists_that_are_not_offsets_are_refused(offsets):
    with pytest.raises(
        ShapeError, match=r"offsets: got \[.*\]; expected 0, followed by the cumulative sums of the lengths"
    ):
        packed_layout(offsets, [0])


def test_the_error_about_offsets_shows_only_the_first_of_many():
    with pytest.raises(ShapeError, match=r"offsets: got \[0, 1, 1, 1, 1, 1, …\]; expected"):
        padded_layout([0, *[1] * 40], [0])
