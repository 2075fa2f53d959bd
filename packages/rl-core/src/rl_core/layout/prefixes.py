"""Finds shared prefixes of the sequences in a batch, so that a model computes them only once.

The samples of a prompt share the prompt; the turns and branches of an episode share prefixes. A causal model's state at
a token depends only on this token and the tokens before it, so equal prefixes give equal states.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from rl_core.layout.balancing import IntArray, greedy_partition, part_sums
from rl_core.layout.slices import index_runs

_LEAST_SAVED = 16
"""A prefix is shared only if sharing it saves the computation of at least this many tokens over all its sequences. For
fewer tokens, the additional call of the attention kernel costs more time than sharing saves."""
_REPEATED = 0.01
"""A sequence starts a new family if it shares few tokens with earlier sequences: at most this fraction of the tokens
computed so far for the current family."""
_PARTS_OF_A_SHARE = (2.0, 1.5, 1.0, 0.5, 0.25)
"""Limits of a family's size to try, as multiples of a rank's equal share of the tokens. If a family is cut, each part
computes the shared tokens again, so the best limit is often above 1."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixForest:
    """The sequences of a stream as paths in trees. A node is a run of tokens that the same sequences share, and each of
    its tokens is computed once, in one cell. Cells are numbered consecutively, node after node; a node comes after its
    parent."""

    cell_T: IntArray
    """[T] cell of each token of the stream. Tokens with the same cell are equal and have the same prefix."""
    length_M: IntArray
    """[M] number of tokens of each node, at least 1."""
    parent_M: IntArray
    """[M] parent of each node; −1 for a root. The parent's last token precedes the node's first token."""
    order_N: IntArray
    """[N] the sequences, ordered so that sequences with long common prefixes are neighbours."""
    new_N: IntArray
    """[N] for each sequence in the order of `order_N`, the number of tokens that it shares with no earlier sequence."""

    @property
    def num_cells(self) -> int:
        """Number of tokens to compute."""
        return int(self.length_M.sum())


def separate_sequences(offsets: npt.ArrayLike) -> PrefixForest:
    """Returns the forest in which no prefix is shared: every sequence is one node, and cell t holds token t."""
    offsets = np.asarray(offsets, np.int64)
    lengths = np.diff(offsets)
    return PrefixForest(
        cell_T=np.arange(offsets[-1]),
        length_M=lengths,
        parent_M=np.full(len(lengths), -1),
        order_N=np.arange(len(lengths)),
        new_N=lengths,
    )


def prefix_forest(
    offsets: npt.ArrayLike, *columns: npt.NDArray[np.generic], least_saved: int = _LEAST_SAVED
) -> PrefixForest:
    """Finds shared prefixes by comparing tokens.

    Args:
        offsets: offsets of the stream, int64 [N+1].
        columns: token ids, and everything else that a model reads per token, such as its experts; each [T, …]. Two
            tokens are equal if they are equal in all columns.
        least_saved: a prefix is shared if sharing it saves at least this many tokens, compared with sharing only the
            next shorter common prefix.

    Returns:
        The forest. Equal arguments always give the same forest.
    """
    offsets = np.asarray(offsets, np.int64)
    order_N = _sorted_sequences(offsets, columns)
    start_N, length_N = offsets[order_N], np.diff(offsets)[order_N]
    common = _common_lengths(columns, start_N[:-1], start_N[1:], np.minimum(length_N[:-1], length_N[1:]))
    shared = _shared_nodes(common.tolist(), least_saved)
    # A node's sequences are neighbours. Of the nodes on a sequence's path, the last one is the deepest.
    inner_N = np.full(len(order_N), -1)
    np.maximum.at(
        inner_N, index_runs(shared.first_M, shared.count_M), np.repeat(np.arange(len(shared)), shared.count_M)
    )
    depth_N = np.append(shared.end_M, 0)[inner_N]  # index −1 (no node on the path) selects the appended 0
    own = np.flatnonzero(length_N > depth_N)
    nodes = shared.with_one(own, depth_N[own], length_N[own], inner_N[own])
    length_M = nodes.end_M - nodes.start_M
    return PrefixForest(
        cell_T=_cells(nodes, start_N, length_M),
        length_M=length_M,
        parent_M=nodes.parent_M,
        order_N=order_N,
        new_N=np.bincount(nodes.first_M, length_M, minlength=len(order_N)).astype(np.int64),
    )


def families(
    forest: PrefixForest,
    offsets: npt.ArrayLike,
    *,
    max_tokens: int | None = None,
    max_sequences: int | None = None,
    num_data_ranks: int = 1,
) -> tuple[list[IntArray], IntArray]:
    """Groups the sequences into families. Sequences of a family share enough tokens to be computed in the same
    micro-batch, and fit into its limits. A sequence longer than `max_tokens` is a family of its own.

    With several ranks, large families are cut if this improves the balance of tokens over ranks. Shared tokens are then
    computed once per part of a family.

    Returns:
        The sequences of each family, ascending, and the number of tokens computed for each family, [families].
    """
    offsets = np.asarray(offsets, np.int64)
    length_N = np.diff(offsets)[forest.order_N]
    most = max_tokens or forest.num_cells
    best = _cut(length_N, forest.new_N, most, max_sequences)
    share = forest.num_cells / num_data_ranks
    for part in _PARTS_OF_A_SHARE if num_data_ranks > 1 else ():
        # 5 % above an equal share is accepted, because each further cut repeats shared tokens.
        if _largest_load(best[1], num_data_ranks) <= 1.05 * share:
            break
        other = _cut(length_N, forest.new_N, min(most, int(part * share)), max_sequences)
        best = min(best, other, key=lambda found: _largest_load(found[1], num_data_ranks))
    starts, tokens = best
    return [np.sort(family) for family in np.split(forest.order_N, starts[1:])], np.array(tokens, np.int64)


def _cut(length_N: IntArray, new_N: IntArray, budget: int, max_sequences: int | None) -> tuple[list[int], list[int]]:
    """Divides the sequences, in the forest's order, into families. Returns the position in this order at which each
    family starts, and the number of tokens computed for each family."""
    starts, tokens = [0], [int(length_N[0])]
    for i, (length, new) in enumerate(zip(length_N.tolist(), new_N.tolist(), strict=True)):
        is_full = tokens[-1] + new > budget or i - starts[-1] == max_sequences
        if i and (length - new <= _REPEATED * tokens[-1] or is_full):
            starts.append(i)
            tokens.append(length)
        elif i:
            tokens[-1] += new
    return starts, tokens


def _largest_load(tokens: list[int], num_ranks: int) -> float:
    return float(part_sums(tokens, greedy_partition(tokens, num_ranks), num_ranks).max())


@dataclass(frozen=True, kw_only=True, eq=False)
class InputCells:
    """The model's input for predicting the tokens of a stream: the cells of a `PrefixForest`, without cells that
    predict nothing (the last cells of nodes without children). Nodes have the same meaning as in `PrefixForest`."""

    index_C: IntArray
    """[C] stream index of one of the tokens in each cell; −1 for padding."""
    position_C: IntArray
    """[C] position of this token in its sequence, from 0. Padding has positions from 0, too."""
    cell_T: IntArray
    """[T] cell of each token; −1 if the token is not part of the input."""
    given_N: IntArray
    """[N] number of tokens at the start of each sequence that are part of the input."""
    length_M: IntArray
    parent_M: IntArray


def input_cells(forest: PrefixForest, offsets: npt.ArrayLike, *, total_multiple: int = 1) -> InputCells:
    """Leaves out tokens that predict nothing, and adds a node of padding so that the number of cells is a multiple of
    `total_multiple`.

    At least one cell remains, because a rank without predictions must still run its collectives.
    """
    offsets = np.asarray(offsets, np.int64)
    parents = np.unique(forest.parent_M[forest.parent_M >= 0])
    length_M = forest.length_M - 1
    length_M[parents] += 1  # the last token of a node with children predicts their first tokens
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
    """Attention of nodes to their ancestors. There is one block per node with children: its queries are the tokens of
    the children, its keys are the tokens of the node and of the node's ancestors."""

    query_Q: IntArray
    """Cells of the queries, block after block. Every cell of a node with a parent is in exactly one block."""
    query_length_B: IntArray
    key_K: IntArray
    """Cells of the keys, block after block. A node's cells are in its own block and in the blocks of all its
    descendants with children."""
    key_length_B: IntArray


def prefix_blocks(length_M: IntArray, parent_M: IntArray) -> PrefixBlocks:
    """Computes the attention blocks of nodes with these lengths and parents (`InputCells`)."""
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


def _sorted_sequences(offsets: IntArray, columns: tuple[npt.NDArray[np.generic], ...]) -> IntArray:
    """[N] the sequences, ordered so that sequences with equal prefixes are neighbours."""
    num_tokens = int(offsets[-1])
    parts = [np.ascontiguousarray(column).reshape(num_tokens, -1).view(np.uint8) for column in columns]
    keys = np.concatenate(parts, 1) if len(parts) > 1 else parts[0]
    of_all, size = keys.tobytes(), keys.shape[1]
    bounds = (offsets * size).tolist()
    sequences = [of_all[start:end] for start, end in pairwise(bounds)]
    return np.array(sorted(range(len(sequences)), key=sequences.__getitem__), np.int64)


def _common_lengths(
    columns: tuple[npt.NDArray[np.generic], ...], one_P: IntArray, other_P: IntArray, most_P: IntArray
) -> IntArray:
    """Counts, for each pair of stream positions, the tokens from these positions to the first difference, at most
    `most_P`.

    Compares a few tokens of each pair first, then twice as many for pairs without a difference so far, and so on.
    """
    common_P, at_once = np.zeros_like(most_P), 32
    pairs = np.arange(len(most_P))
    while len(pairs):
        done = common_P[pairs]
        length = np.minimum(most_P[pairs] - done, at_once)
        same = _common_at_once(columns, one_P[pairs] + done, other_P[pairs] + done, length)
        common_P[pairs] += same
        pairs, at_once = pairs[(same == length) & (done + same < most_P[pairs])], 2 * at_once
    return common_P


def _common_at_once(
    columns: tuple[npt.NDArray[np.generic], ...], one_P: IntArray, other_P: IntArray, length_P: IntArray
) -> IntArray:
    for column in columns:
        differs = column[index_runs(one_P, length_P)] != column[index_runs(other_P, length_P)]
        places = np.flatnonzero(differs.any(tuple(range(1, differs.ndim))))
        ends = np.cumsum(length_P)
        starts = ends - length_P
        first = np.append(places, len(differs))[np.searchsorted(places, starts)]
        length_P = np.minimum(first, ends) - starts
    return length_P


@dataclass(frozen=True, kw_only=True, eq=False)
class _Nodes:
    """Nodes: runs of neighbouring sorted sequences, and the tokens that they share. Parents precede their children."""

    first_M: IntArray
    count_M: IntArray
    start_M: IntArray
    """Position of each node's first token, counted from the start of a sequence."""
    end_M: IntArray
    """Position after each node's last token."""
    parent_M: IntArray

    def __len__(self) -> int:
        return len(self.first_M)

    def with_one(self, first: IntArray, start: IntArray, end: IntArray, parent: IntArray) -> _Nodes:
        """Adds a node per given sequence, with the tokens that the sequence shares with no other."""
        firsts, starts = np.append(self.first_M, first), np.append(self.start_M, start)
        order = np.lexsort((starts, firsts))
        number = np.append(np.argsort(order), -1)  # so the parent of a root, −1, remains −1
        return _Nodes(
            first_M=firsts[order],
            count_M=np.append(self.count_M, np.ones_like(first))[order],
            start_M=starts[order],
            end_M=np.append(self.end_M, end)[order],
            parent_M=number[np.append(self.parent_M, parent)[order]],
        )


def _cells(nodes: _Nodes, start_N: IntArray, length_M: IntArray) -> IntArray:
    """[T] cell of each token of the stream, in which the sorted sequences start at `start_N`."""
    first_cell_M = np.cumsum(length_M) - length_M
    # Each pair of a sequence and a node on its path is a run of tokens of the stream.
    token = start_N[index_runs(nodes.first_M, nodes.count_M)] + np.repeat(nodes.start_M, nodes.count_M)
    cell, length = (np.repeat(values_M, nodes.count_M) for values_M in (first_cell_M, length_M))
    order = np.argsort(token)
    return index_runs(cell[order], length[order])


def _shared_nodes(common: list[int], least_saved: int) -> _Nodes:
    """The nodes that several sequences share. `common`: length of the prefix that each one shares with the next."""
    nodes: list[tuple[int, int, int, int, int]] = []
    path: list[tuple[int, int, int]] = []  # (end of run, shared tokens, node): the nodes that may contain the next run
    for first, shared, end in sorted(_shared_runs(common, least_saved)):
        while path and path[-1][0] <= first:
            path.pop()
        _, depth, parent = path[-1] if path else (0, 0, -1)
        path.append((end, shared, len(nodes)))
        nodes.append((first, end - first, depth, shared, parent))
    first_M, count_M, start_M, end_M, parent_M = np.array(nodes, np.int64).reshape(-1, 5).T
    return _Nodes(first_M=first_M, count_M=count_M, start_M=start_M, end_M=end_M, parent_M=parent_M)


def _shared_runs(common: list[int], least_saved: int) -> list[tuple[int, int, int]]:
    """Finds the maximal runs (first, shared, end) of neighbours that share `shared` tokens. Leaves out a run if sharing
    its tokens would save fewer than `least_saved` tokens compared with the run that encloses it."""
    runs: list[tuple[int, int, int]] = []
    # Open runs: (first, shared, number of sequences), where a kept inner run counts as one sequence.
    begun: list[tuple[int, int, int]] = []
    for i, shared in enumerate([*common, 0]):
        first, paths = i, 1
        while begun and begun[-1][1] > shared:
            first, of_run, others = begun.pop()
            paths += others
            outer = max(shared, begun[-1][1] if begun else 0)
            if (of_run - outer) * (paths - 1) >= least_saved:
                runs.append((first, of_run, i + 1))
                paths = 1
        if begun and begun[-1][1] == shared:
            first, _, others = begun.pop()
            paths += others
        if shared:
            begun.append((first, shared, paths))
    return runs
