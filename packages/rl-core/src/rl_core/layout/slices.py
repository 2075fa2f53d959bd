"""Computes the position of each token of a micro-batch in a model's input, and the positions that a rank holds.

A layout is a set of index arrays into the token stream; a shard is an array of positions in a layout. `index[shard]`
gathers columns about input tokens (tokens, positions, routed experts), `target_index[shard]` gathers columns about
predicted tokens (target, mask, advantage, log-prob), and `inverse_index` maps results back to the stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl_core.errors import ShapeError
from rl_core.layout.balancing import IntArray
from rl_core.layout.mesh import Mesh
from rl_core.layout.packing import padded_lengths


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """A micro-batch as model input: S positions, each sequence followed by its padding."""

    index: IntArray
    """[S] stream index of the input token; −1 for padding."""
    target_index: IntArray
    """[S] stream index of the next token of the same sequence; −1 at a sequence's last token and for padding."""
    position: IntArray
    """[S] position in the sequence, from 0; counting continues in the sequence's padding."""
    boundaries: IntArray
    """[segments + 1] the start of each padded sequence, then S. Attention never crosses a boundary (`cu_seqlens`)."""


def packed_layout(
    offsets: npt.ArrayLike, sequences: npt.ArrayLike, *, sequence_multiple: int = 1, total_multiple: int = 1
) -> Layout:
    """Lays sequences end to end, for models that accept boundaries (`cu_seqlens`).

    Args:
        offsets: offsets of the stream, int64 [N+1].
        sequences: indices of the micro-batch's sequences, in the desired order.
        sequence_multiple: each sequence is padded to a multiple of this; `Mesh.sequence_multiple`.
        total_multiple: the total length is padded to a multiple of this by an additional segment of padding;
            `Mesh.micro_batch_tokens_multiple`.

    Returns:
        The layout. Without sequences, it is one segment of padding, because a rank without sequences must still run its
        collectives.
    """
    starts, lengths = _starts_and_lengths(offsets, sequences)
    widths = padded_lengths(lengths, sequence_multiple)
    if total_multiple < 1:
        raise ShapeError(f"cannot pad a micro-batch to a multiple of {total_multiple} tokens; expected at least 1")
    multiple = math.lcm(sequence_multiple, total_multiple)
    total = max(1, -(-int(widths.sum()) // multiple)) * multiple
    filler = total - int(widths.sum())
    if filler:
        starts, lengths, widths = (np.append(a, b) for a, b in ((starts, 0), (lengths, 0), (widths, filler)))
    return _layout(starts, lengths, widths)


def padded_layout(offsets: npt.ArrayLike, sequences: npt.ArrayLike, *, width_multiple: int = 1) -> Layout:
    """Lays sequences out as rows of the same width, one per sequence, padded on the right. The rectangle is
    `index.reshape(len(boundaries) - 1, -1)`.

    Args:
        offsets: offsets of the stream, int64 [N+1].
        sequences: indices of the micro-batch's sequences, in the desired order.
        width_multiple: the width is the longest length rounded up to a multiple of this; `Mesh.sequence_multiple`.

    Returns:
        The layout. Without sequences, it is one row of padding.
    """
    starts, lengths = _starts_and_lengths(offsets, sequences)
    if not len(lengths):
        starts, lengths = np.zeros(1, np.int64), np.zeros(1, np.int64)
    width = int(padded_lengths([max(1, *lengths.tolist())], width_multiple)[0])
    return _layout(starts, lengths, np.full(len(lengths), width))


def context_positions(boundaries: IntArray, rank: int, size: int) -> IntArray:
    """Positions of a layout that context-parallel rank `rank` holds. Every segment is split into 2·size equal chunks;
    rank r holds chunks r and 2·size−1−r.

    With a causal mask, the earlier of the two chunks attends to few keys and the later one to many, so that all ranks
    do equal work.

    Raises:
        ShapeError: a segment's length is not a multiple of 2·size (checked only for size > 1).
    """
    _require_rank(rank, size, "context")
    if size == 1:
        return np.arange(boundaries[-1])
    lengths = np.diff(boundaries)
    chunks, rest = np.divmod(lengths, 2 * size)
    if rest.any():
        wrong = np.flatnonzero(rest)[0]
        raise ShapeError(
            f"segment {wrong} has {lengths[wrong]} tokens, not a multiple of 2 · {size} context-parallel ranks: "
            "create the layout with sequence_multiple=mesh.sequence_multiple"
        )
    first, second = boundaries[:-1] + rank * chunks, boundaries[:-1] + (2 * size - 1 - rank) * chunks
    return index_runs(np.stack([first, second], 1).ravel(), np.repeat(chunks, 2))


def even_slice(num_positions: int, rank: int, size: int) -> slice:
    """Splits positions into `size` contiguous parts of equal length, and returns the part of `rank`. Ulysses ranks, and
    tensor ranks with sequence parallelism, are assigned such parts.

    Raises:
        ShapeError: `num_positions` is not a multiple of `size`.
    """
    _require_rank(rank, size, "slice")
    if num_positions % size:
        raise ShapeError(
            f"{num_positions} positions cannot be split evenly over {size} ranks: "
            "create the layout with total_multiple=mesh.micro_batch_tokens_multiple()"
        )
    width = num_positions // size
    return slice(rank * width, (rank + 1) * width)


def rank_positions(boundaries: IntArray, mesh: Mesh, rank: int) -> IntArray:
    """Positions of a packed layout that are the model's input on `rank`: the rank's Ulysses slice of its context
    chunks.

    Tensor ranks have the same input. With sequence parallelism, each of them holds
    `positions[even_slice(len(positions), tensor_rank, mesh.tensor)]` inside the model.
    """
    place = mesh.coordinates(rank)
    positions = context_positions(boundaries, place.context, mesh.context)
    return positions[even_slice(len(positions), place.sequence, mesh.sequence)]


def inverse_index(indices: Sequence[IntArray], num_tokens: int) -> IntArray:
    """Finds, for each token of the stream, its position in the concatenation of the results computed at `indices`.

    With the returned `inverse`, `np.concatenate(values)[inverse]` are the values in the order of the stream; replace
    entries where `inverse` is −1 by 0. Pass `index` arrays for results about input tokens, and `target_index` arrays
    for results about predicted tokens (`inverse` is then −1 at the first token of each sequence).

    Args:
        indices: arrays of stream indices (−1 for none), in the order in which their results are concatenated.
        num_tokens: T of the stream.

    Returns:
        int64 [T], −1 for tokens that are in no array.

    Raises:
        ShapeError: a token occurs twice or is outside the stream.
    """
    flat = np.concatenate([np.asarray(index, np.int64).ravel() for index in indices])
    places = np.flatnonzero(flat >= 0)
    tokens = flat[places]
    if len(tokens) and tokens.max() >= num_tokens:
        raise ShapeError(f"stream index {tokens.max()} is outside a stream of {num_tokens} tokens")
    counts = np.bincount(tokens, minlength=num_tokens)
    if (counts > 1).any():
        token = np.argmax(counts > 1)
        raise ShapeError(f"token {token} of the stream occurs {counts[token]} times, expected once")
    inverse = np.full(num_tokens, -1, np.int64)
    inverse[tokens] = places
    return inverse


def index_runs(starts: IntArray, counts: IntArray) -> IntArray:
    """Concatenates the runs start, start+1, …, start+count−1 of all pairs of a start and a count."""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)


def _starts_and_lengths(offsets: npt.ArrayLike, sequences: npt.ArrayLike) -> tuple[IntArray, IntArray]:
    offsets, sequences = np.asarray(offsets, np.int64), np.asarray(sequences)
    if sequences.dtype == bool:
        raise ShapeError("sequences: expected indices, got a mask; convert it with np.flatnonzero")
    if sequences.size and not np.issubdtype(sequences.dtype, np.integer):
        raise ShapeError(f"sequences: expected indices, got {sequences.dtype}")
    sequences = sequences.astype(np.int64)
    if offsets.ndim != 1 or not len(offsets) or offsets[0] != 0 or (np.diff(offsets) < 1).any():
        raise ShapeError(
            f"offsets: got {_first_few(offsets)}; expected 0, followed by the cumulative sums of the lengths, such as "
            "[0, 3, 4, 6] for lengths 3, 1 and 2"
        )
    wrong = np.flatnonzero((sequences < 0) | (sequences >= len(offsets) - 1))
    if len(wrong):
        raise ShapeError(f"sequence {sequences[wrong[0]]} is not in a batch of {len(offsets) - 1} sequences")
    return offsets[sequences], np.diff(offsets)[sequences]


def _first_few(values: IntArray) -> str:
    shown = ", ".join(map(str, values.ravel()[:6]))
    return f"[{shown}, …]" if values.size > 6 else f"[{shown}]"


def _layout(starts: IntArray, lengths: IntArray, widths: IntArray) -> Layout:
    boundaries = np.concatenate([[0], np.cumsum(widths)])
    position = index_runs(np.zeros_like(widths), widths)
    token = position + np.repeat(starts, widths)
    length = np.repeat(lengths, widths)
    return Layout(
        index=np.where(position < length, token, -1),
        target_index=np.where(position + 1 < length, token + 1, -1),
        position=position,
        boundaries=boundaries,
    )


def _require_rank(rank: int, size: int, what: str) -> None:
    if not 0 <= rank < size:
        raise ShapeError(f"{what} rank {rank} is outside 0…{size - 1}")
