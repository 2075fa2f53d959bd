"""Assigns sequences to data-parallel ranks and to micro-batches."""

from __future__ import annotations

import heapq
from numbers import Integral

import numpy as np
import numpy.typing as npt

from rl_core.errors import ConfigError, ShapeError
from rl_core.layout.balancing import IntArray, Partition, equal_count_partition, greedy_partition, part_members


def plan_micro_batches(
    lengths_N: npt.ArrayLike,
    *,
    num_data_ranks: int,
    max_tokens: int | None = None,
    max_sequences: int | None = None,
    multiple: int = 1,
    sequence_multiple: int = 1,
    costs_N: npt.ArrayLike | None = None,
    counts_N: npt.ArrayLike | None = None,
    partition: Partition | None = None,
) -> list[list[IntArray]]:
    """Splits sequences over data-parallel ranks, and each rank's part into micro-batches, by the sequences' lengths.

    First, `partition` gives all ranks sequences of nearly equal total cost. Then each rank's sequences are packed into
    the same number of micro-batches: the smallest multiple of `multiple` with which a packing within the limits is
    found for every rank. If a balanced packing is found within the limits, the micro-batches of a rank have nearly
    equal numbers of tokens. Micro-batches are ordered largest first, so that all ranks run micro-batches of similar
    size at the same time.

    A rank with fewer sequences than micro-batches has empty micro-batches at the end. In an empty micro-batch, the rank
    joins the collectives without contributing.

    Args:
        lengths_N: tokens of each sequence, at least 1.
        num_data_ranks: number of data-parallel ranks (`Mesh.data`).
        max_tokens: largest number of tokens of a micro-batch, counted after padding and before context parallelism
            splits the sequences. None: no limit.
        max_sequences: largest number of sequences of a micro-batch. None: no limit. If both limits are None, each rank
            has `multiple` micro-batches.
        multiple: each rank's number of micro-batches is a multiple of this (`Mesh.micro_batch_multiple`).
        sequence_multiple: each sequence is padded to a multiple of this (`Mesh.sequence_multiple`).
        counts_N: number of sequences in each item, at most `max_sequences`. Each length is then the length of an item
            of one or more sequences, which is not split. None: each item is a single sequence.
        costs_N: costs to balance over the ranks; None: the padded lengths. See `flop_cost`.
        partition: the function that splits the sequences over ranks. None: `greedy_partition`, or
            `equal_count_partition` if `max_sequences` is set without `counts_N`, because then the rank with the most
            sequences determines the number of micro-batches.

    Returns:
        plan[data_rank][micro_batch]: ascending int64 sequence indices. Equal arguments always give the same plan.

    Raises:
        ConfigError: a single item exceeds `max_tokens` or `max_sequences`, or a limit, `num_data_ranks` or `multiple`
            is not a whole number of at least 1.
        ShapeError: lengths or counts are not positive integers; costs, counts or the results of `partition` do not fit
            the lengths; or `sequence_multiple` is below 1.
    """
    lengths_N = padded_lengths(lengths_N, sequence_multiple)
    limits = {"max_tokens": max_tokens, "max_sequences": max_sequences}
    counts = {"num_data_ranks": num_data_ranks, "multiple": multiple}
    for name, number in {**{name: 1 if limit is None else limit for name, limit in limits.items()}, **counts}.items():
        if not isinstance(number, Integral) or number < 1:
            raise ConfigError(f"plan_micro_batches: {name} is {number!r}, expected a whole number of at least 1")
    require_within_budget(lengths_N, max_tokens, sequence_multiple)
    costs_N = lengths_N if costs_N is None else np.asarray(costs_N)
    if costs_N.shape != lengths_N.shape:
        raise ShapeError(f"costs_N has shape {costs_N.shape} for {len(lengths_N)} sequences")
    if partition is None:
        counts_sequences = max_sequences is not None and counts_N is None
        partition = equal_count_partition if counts_sequences else greedy_partition
    rank_N = np.asarray(partition(costs_N, num_data_ranks))
    if rank_N.shape != lengths_N.shape or ((rank_N < 0) | (rank_N >= num_data_ranks)).any():
        raise ShapeError(
            f"partition: got {rank_N.tolist()[:8]} … of shape {rank_N.shape}; expected a data rank from 0 to "
            f"{num_data_ranks - 1} for each of {len(lengths_N)} sequences"
        )
    ranks = part_members(rank_N, num_data_ranks)
    counts_N = np.ones_like(lengths_N) if counts_N is None else np.asarray(counts_N, np.int64)
    if counts_N.shape != lengths_N.shape or (counts_N < 1).any():
        raise ShapeError(
            f"counts_N: got {counts_N.tolist()[:8]} … of shape {counts_N.shape}; expected a number of sequences, at "
            f"least 1, for each of {len(lengths_N)} lengths"
        )
    if max_sequences is not None and (counts_N > max_sequences).any():
        item = np.argmax(counts_N > max_sequences)
        raise ConfigError(
            f"plan_micro_batches: item {item} has {counts_N[item]} sequences, more than max_sequences={max_sequences}"
        )
    return _pack_ranks(ranks, lengths_N, counts_N, max_tokens, max_sequences, multiple)


def padded_lengths(lengths_N: npt.ArrayLike, multiple: int) -> IntArray:
    """Each length rounded up to a multiple. Raises ShapeError for a length that is not a positive integer."""
    lengths_N = np.asarray(lengths_N)
    if lengths_N.ndim != 1 or (lengths_N.size and not np.issubdtype(lengths_N.dtype, np.integer)):
        raise ShapeError(f"lengths_N: expected integers on one axis, got {lengths_N.dtype} {lengths_N.shape}")
    if multiple < 1:
        raise ShapeError(f"cannot pad sequences to a multiple of {multiple} tokens; expected at least 1")
    empty = np.flatnonzero(lengths_N < 1)
    if len(empty):
        raise ShapeError(f"sequence {empty[0]} has {lengths_N[empty[0]]} tokens, expected at least 1")
    return -(-lengths_N.astype(np.int64) // multiple) * multiple


def require_within_budget(lengths_N: npt.ArrayLike, max_tokens: int | None, sequence_multiple: int) -> None:
    """Raises ConfigError if a sequence, padded to a multiple of `sequence_multiple`, exceeds `max_tokens`."""
    lengths_N = padded_lengths(lengths_N, sequence_multiple)
    over = np.flatnonzero(lengths_N > max_tokens) if max_tokens is not None else []
    if len(over):
        padded = f" (padded to a multiple of {sequence_multiple})" if sequence_multiple > 1 else ""
        raise ConfigError(
            f"sequence {over[0]} has {lengths_N[over[0]]} tokens{padded}, but the token budget of a micro-batch is "
            f"{max_tokens}; {len(over)} of {len(lengths_N)} sequences exceed it. A sequence is never split: raise the "
            f"budget to at least {lengths_N.max()}, or filter out longer sequences"
        )


def _pack_ranks(
    ranks: list[IntArray],
    lengths_N: IntArray,
    counts_N: IntArray,
    max_tokens: int | None,
    max_sequences: int | None,
    multiple: int,
) -> list[list[IntArray]]:
    budget = max_tokens or int(lengths_N.sum()) + 1
    slots = max_sequences or int(counts_N.sum()) + 1
    fewest = max(max(-(-int(lengths_N[r].sum()) // budget), -(-int(counts_N[r].sum()) // slots)) for r in ranks)
    num_bins = max(1, -(-fewest // multiple)) * multiple
    packed: list[list[list[int]]] = []
    while len(packed) < len(ranks):
        rank = ranks[len(packed)]
        lengths, counts = lengths_N[rank].tolist(), counts_N[rank].tolist()
        bins = _spread(lengths, counts, num_bins, budget, slots) or _first_fit(lengths, counts, num_bins, budget, slots)
        if bins is None:
            # Pack all ranks again, because all must have the same number of micro-batches.
            num_bins, packed = num_bins + multiple, []
        else:
            packed.append(bins)
    return [
        _largest_micro_batch_first([rank[np.array(items, np.int64)] for items in bins], lengths_N)
        for rank, bins in zip(ranks, packed, strict=True)
    ]


def _largest_micro_batch_first(micro_batches: list[IntArray], lengths_N: IntArray) -> list[IntArray]:
    tokens = [int(lengths_N[micro_batch].sum()) for micro_batch in micro_batches]
    return [np.sort(micro_batches[m]) for m in np.argsort([-t for t in tokens], kind="stable")]


def _spread(lengths: list[int], counts: list[int], num_bins: int, budget: int, slots: int) -> list[list[int]] | None:
    """Packs each item, largest first, into the bin with the fewest tokens. The bins are balanced, but this method may
    find no packing although a packing exists."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [slots] * num_bins
    heap = [(0, b) for b in range(num_bins)]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # The heap holds only bins with free slots. Its first entry has the fewest tokens.
        if not heap or heap[0][0] + lengths[i] > budget or room[heap[0][1]] < counts[i]:
            return None
        tokens, b = heapq.heappop(heap)
        bins[b].append(i)
        room[b] -= counts[i]
        if room[b]:
            heapq.heappush(heap, (tokens + lengths[i], b))
    return bins


def _first_fit(lengths: list[int], counts: list[int], num_bins: int, budget: int, slots: int) -> list[list[int]] | None:
    """Packs each item, largest first, into the first bin with room for it. If the slots never run out, the packing
    needs at most about 11/9 of the smallest possible number of bins. The bins are not balanced."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    tokens, room = [0] * num_bins, [slots] * num_bins
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = (b for b in range(num_bins) if tokens[b] + lengths[i] <= budget and room[b] >= counts[i])
        b = next(fits, None)
        if b is None:
            return None
        bins[b].append(i)
        tokens[b] += lengths[i]
        room[b] -= counts[i]
    return bins
