"""Which tokens of a batch stand in the same place after the same tokens, so that a model need compute them only once.

The samples of a prompt share it, the turns and branches of an episode share their beginnings. What a causal model
computes at a token depends on the tokens up to it alone: equal beginnings give equal states, whatever follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from rl_core.layout.balancing import IntArray, greedy_partition, part_sums
from rl_core.layout.slices import index_runs

_LEAST_SAVED = 16
"""Tokens that a shared beginning has to save, over all sequences that share it: below, its own call of the attention
kernel costs more."""
_PARTS_OF_A_SHARE = (2.0, 1.5, 1.0, 0.5, 0.25)
"""Sizes that are tried for a family, in a rank's share of the tokens: parts of a cut family repeat what they share, so
the best is often above 1."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixForest:
    """The sequences of a stream as paths through trees. A node is a run of tokens, laid out in consecutive cells; the
    nodes lie end to end, each after its parent."""

    cell_T: IntArray
    """[T] the cell of each token of the stream; tokens of the same cell have the same tokens before them."""
    length_M: IntArray
    """[M] tokens of each node, at least 1."""
    parent_M: IntArray
    """[M] the node whose last token stands before this one's first; −1 where a sequence begins."""
    order_N: IntArray
    """[N] the sequences in an order in which those that share most are neighbours."""

    @property
    def num_cells(self) -> int:
        """Tokens that are left to compute."""
        return int(self.length_M.sum())


def separate_sequences(offsets: npt.ArrayLike) -> PrefixForest:
    """Sequences of which none shares anything: every sequence is a node, cell t is token t."""
    offsets = np.asarray(offsets, np.int64)
    lengths = np.diff(offsets)
    return PrefixForest(
        cell_T=np.arange(offsets[-1]),
        length_M=lengths,
        parent_M=np.full(len(lengths), -1),
        order_N=np.arange(len(lengths)),
    )


def prefix_forest(
    offsets: npt.ArrayLike, *columns: npt.NDArray[np.generic], least_saved: int = _LEAST_SAVED
) -> PrefixForest:
    """Finds what sequences share at their beginning, by comparing it.

    Args:
        offsets: of the stream, int64 [N+1].
        columns: [T, …] each: two tokens are the same where all columns are. Token ids, and whatever else a model reads
            of a token, such as the experts that it is sent to.
        least_saved: a beginning is shared where that saves so many tokens.

    Returns:
        The forest; the same for the same input.
    """
    offsets = np.asarray(offsets, np.int64)
    keys = _keys(columns, int(offsets[-1]))
    sequences = [keys[start:end].tobytes() for start, end in pairwise(offsets)]
    order_N = np.array(sorted(range(len(sequences)), key=sequences.__getitem__), np.int64)
    lengths = np.diff(offsets)[order_N]
    common = np.array(
        [
            _common_length(keys[offsets[a] : offsets[a + 1]], keys[offsets[b] : offsets[b + 1]])
            for a, b in pairwise(order_N)
        ],
        np.int64,
    )
    cell_T = np.empty(offsets[-1], np.int64)
    length_M: list[int] = []
    parent_M: list[int] = []
    num_cells = 0
    # Runs of neighbours (first, end) that share their first `depth` tokens, of which `parent` is the last node.
    runs = [(0, len(lengths), 0, -1)]
    while runs:
        first, end, depth, parent = runs.pop()
        inner = common[first : end - 1]
        shared = int(inner.min()) if end - first > 1 else int(lengths[first])
        cuts = first + 1 + np.flatnonzero(inner == shared)
        is_node = shared > depth and ((shared - depth) * (end - first - 1) >= least_saved or end - first == 1)
        if is_node:
            tokens = offsets[order_N[first:end], None] + np.arange(depth, shared)
            cell_T[tokens] = num_cells + np.arange(shared - depth)
            num_cells += shared - depth
            length_M.append(shared - depth)
            parent_M.append(parent)
            depth, parent = shared, len(length_M) - 1
        if end - first > 1:
            bounds = [first, *cuts.tolist(), end]
            runs.extend((a, b, depth, parent) for a, b in zip(bounds[-2::-1], bounds[:0:-1], strict=True))
    return PrefixForest(
        cell_T=cell_T,
        length_M=np.array(length_M, np.int64),
        parent_M=np.array(parent_M, np.int64),
        order_N=order_N,
    )


def families(
    forest: PrefixForest,
    offsets: npt.ArrayLike,
    *,
    max_tokens: int | None = None,
    max_sequences: int | None = None,
    num_data_ranks: int = 1,
) -> tuple[list[IntArray], IntArray]:
    """Sequences to keep together in a micro-batch: those that share something, as many as its limits let in.

    Over several ranks a large family is cut where that makes the ranks' parts of the tokens more equal; what it shares
    is then computed once per cut.

    Returns:
        The sequences of each family, ascending, and the tokens [families] that are computed for it.
    """
    offsets = np.asarray(offsets, np.int64)
    length_N = np.diff(offsets)[forest.order_N]
    new_N = length_N - _common_with_one_before(forest, offsets)
    most = max_tokens or forest.num_cells
    best = _cut(length_N, new_N, most, max_sequences)
    share = forest.num_cells / num_data_ranks
    for part in _PARTS_OF_A_SHARE if num_data_ranks > 1 else ():
        if _largest_load(best[1], num_data_ranks) <= 1.05 * share:
            break
        other = _cut(length_N, new_N, min(most, int(part * share)), max_sequences)
        best = min(best, other, key=lambda found: _largest_load(found[1], num_data_ranks))
    starts, tokens = best
    return [np.sort(family) for family in np.split(forest.order_N, starts[1:])], np.array(tokens, np.int64)


def _cut(length_N: IntArray, new_N: IntArray, budget: int, max_sequences: int | None) -> tuple[list[int], list[int]]:
    """Where families begin among sequences in the forest's order, and the tokens of each."""
    starts, tokens = [0], [int(length_N[0])]
    for i, (length, new) in enumerate(zip(length_N.tolist(), new_N.tolist(), strict=True)):
        is_full = tokens[-1] + new > budget or i - starts[-1] == max_sequences
        if i and (new == length or is_full):
            starts.append(i)
            tokens.append(length)
        elif i:
            tokens[-1] += new
    return starts, tokens


def _largest_load(tokens: list[int], num_ranks: int) -> float:
    return float(part_sums(tokens, greedy_partition(tokens, num_ranks), num_ranks).max())


def _common_with_one_before(forest: PrefixForest, offsets: IntArray) -> IntArray:
    """[N] tokens that each sequence of `order_N` shares, as the forest has it, with the one before it there."""
    first_N, length_N = offsets[:-1][forest.order_N], np.diff(offsets)[forest.order_N]
    compared = np.minimum(length_N, np.concatenate([[0], length_N[:-1]]))
    one = index_runs(first_N, compared)
    other = index_runs(np.concatenate([[0], first_N[:-1]]), compared)
    same = np.concatenate([[0], np.cumsum(forest.cell_T[one] == forest.cell_T[other])])
    ends = np.cumsum(compared)
    # Cells are the same up to where the sequences part, and never after.
    return same[ends] - same[ends - compared]


@dataclass(frozen=True, kw_only=True, eq=False)
class InputCells:
    """What a model is given to predict every token of a stream: each sequence but its last token, which precedes
    nothing. Nodes as in `PrefixForest`."""

    index_C: IntArray
    """[C] a token of the stream that stands in each cell; −1 for padding."""
    position_C: IntArray
    """[C] its place in its sequence, from 0."""
    cell_T: IntArray
    """[T] the cell of each token, −1 where it is not given."""
    given_N: IntArray
    """[N] tokens of each sequence that are given, its first ones."""
    length_M: IntArray
    parent_M: IntArray


def input_cells(forest: PrefixForest, offsets: npt.ArrayLike, *, total_multiple: int = 1) -> InputCells:
    """Leaves out what precedes nothing, and pads the whole by a node of padding to a multiple.

    At least one cell is left: a rank that has nothing to predict still runs its collectives.
    """
    offsets = np.asarray(offsets, np.int64)
    parents = np.unique(forest.parent_M[forest.parent_M >= 0])
    length_M = forest.length_M - 1
    length_M[parents] += 1
    if not length_M.any():
        length_M[0] = 1
    starts = np.cumsum(forest.length_M) - forest.length_M
    kept = index_runs(starts, length_M)
    cell = np.full(forest.num_cells, -1)
    cell[kept] = np.arange(len(kept))
    token_of_cell = np.empty(forest.num_cells, np.int64)
    token_of_cell[forest.cell_T] = np.arange(len(forest.cell_T))
    index_C = token_of_cell[kept]
    cell_T = cell[forest.cell_T]
    place_T = np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))
    is_given = length_M > 0
    number = np.cumsum(is_given) - 1
    parent_M = np.where(forest.parent_M >= 0, number[forest.parent_M], -1)[is_given]
    filler = -len(index_C) % total_multiple
    return InputCells(
        index_C=np.concatenate([index_C, np.full(filler, -1)]),
        position_C=np.concatenate([place_T[index_C], np.arange(filler)]),
        cell_T=cell_T,
        given_N=np.add.reduceat(cell_T >= 0, offsets[:-1]),
        length_M=np.append(length_M[is_given], [filler] if filler else []).astype(np.int64),
        parent_M=np.append(parent_M, [-1] if filler else []).astype(np.int64),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixBlocks:
    """What nodes see of the nodes before them: block b is a node with children, whose tokens are the queries and which,
    with all nodes before it, is the keys."""

    query_Q: IntArray
    """Cells, block after block. Every cell of a node that has a parent is in exactly one."""
    query_length_B: IntArray
    key_K: IntArray
    """Cells, block after block; a cell is in as many as there are nodes with children on the way."""
    key_length_B: IntArray


def prefix_blocks(length_M: IntArray, parent_M: IntArray) -> PrefixBlocks:
    """The blocks of nodes that lie end to end (`InputCells`)."""
    starts = np.cumsum(length_M) - length_M
    children = np.argsort(parent_M, kind="stable")
    children = children[parent_M[children] >= 0]
    parents, first = np.unique(parent_M[children], return_index=True)
    paths: dict[int, IntArray] = {-1: np.empty(0, np.int64)}
    for node in parents.tolist():
        own = np.arange(starts[node], starts[node] + length_M[node])
        paths[node] = np.concatenate([paths[int(parent_M[node])], own])
    keys = [paths[node] for node in parents.tolist()]
    return PrefixBlocks(
        query_Q=index_runs(starts[children], length_M[children]),
        query_length_B=np.add.reduceat(length_M[children], first) if len(first) else np.empty(0, np.int64),
        key_K=np.concatenate([np.empty(0, np.int64), *keys]),
        key_length_B=np.array([len(path) for path in keys], np.int64),
    )


def _keys(columns: tuple[npt.NDArray[np.generic], ...], num_tokens: int) -> npt.NDArray[np.uint8]:
    """uint8 [T, bytes of a token], contiguous."""
    parts = [np.ascontiguousarray(column).reshape(num_tokens, -1).view(np.uint8) for column in columns]
    return np.ascontiguousarray(np.concatenate(parts, 1)) if len(parts) > 1 else parts[0]


def _common_length(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> int:
    """Tokens that two sequences share at their beginning."""
    length, size = min(len(a), len(b)), a.shape[1]
    differs = a[:length].reshape(-1) != b[:length].reshape(-1)
    first = int(differs.argmax())
    return first // size if differs[first] else length
