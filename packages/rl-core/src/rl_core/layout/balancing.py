"""Computes the cost of sequences, and partitions costs into parts with nearly equal sums.

Every partition function takes costs and a number of parts, and returns the index of each item's part. Ties are broken
by index, so the same costs always give the same parts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from rl_core.errors import ShapeError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Partition = Callable[[npt.ArrayLike, int], IntArray]
"""(costs_N, num_parts) → part_N, int64 in 0…num_parts−1."""


def flop_cost(lengths_N: npt.ArrayLike, *, hidden_size: int, num_layers: int, num_parameters: int) -> FloatArray:
    """Computes the floating-point operations of a forward and backward pass over each sequence.

    cost = a·len + b·len²,  a = 6 · num_parameters,  b = 6 · num_layers · hidden_size.
    Source: Narayanan et al. 2021, arXiv 2104.04473, eq. 2 without recomputation, with half the quadratic term because
    attention is causal. Each factor 6 is 2 operations per multiply-add, times 3, because the backward pass costs as
    much as two forward passes. In b, each layer has two products of len² / 2 · hidden_size multiply-adds.

    Args:
        lengths_N: tokens of each sequence.
        hidden_size: width of the attention's queries (heads · head size).
        num_layers: transformer layers.
        num_parameters: parameters that one token uses (for mixtures of experts, the active ones).

    Returns:
        float64 [N].
    """
    lengths_N = np.asarray(lengths_N, np.float64)
    return 6.0 * num_parameters * lengths_N + 6.0 * num_layers * hidden_size * lengths_N**2


def greedy_partition(costs_N: npt.ArrayLike, num_parts: int) -> IntArray:
    """Assigns each item, largest first, to the part with the smallest sum so far.

    Bounds: the parts' sums differ by at most the largest cost; the largest sum is at most 4/3 − 1/(3·num_parts) times
    the optimum. Source: Graham 1969, "Bounds on multiprocessing timing anomalies".
    """
    costs_N = _checked(costs_N, num_parts)
    part_N = np.empty(len(costs_N), np.int64)
    heap = [(0.0, part) for part in range(num_parts)]
    costs = costs_N.tolist()
    for i in _largest_first(costs_N).tolist():
        load, part = heap[0]
        part_N[i] = part
        heapq.heapreplace(heap, (load + costs[i], part))
    return part_N


def equal_count_partition(costs_N: npt.ArrayLike, num_parts: int) -> IntArray:
    """Assigns items like `greedy_partition`, but gives no part more than ⌈N / num_parts⌉ items. If num_parts divides N,
    all parts get the same number of items.

    Bound: the parts' sums differ by at most the largest cost M. Proof: let L be a part's sum, r the number of items
    that it still has room for, and c the cost of the next item. For any two parts, |L − L'| and |(L + r·c) − (L' +
    r'·c)| are 0 before the first item, and both stay at most M. For the second difference: adding the item to its part
    leaves L + r·c unchanged; c never increases, and the difference is linear in c and at most M for c = 0. For the
    first difference: two parts with room differ as in `greedy_partition`. If the part with sum L' is full, r' = 0, so L
    + c ≤ L + r·c ≤ L' + M.
    """
    costs_N = _checked(costs_N, num_parts)
    part_N = np.empty(len(costs_N), np.int64)
    room = [-(-len(costs_N) // num_parts)] * num_parts
    heap = [(0.0, part) for part in range(num_parts)]
    costs = costs_N.tolist()
    for i in _largest_first(costs_N).tolist():
        load, part = heapq.heappop(heap)
        part_N[i] = part
        room[part] -= 1
        if room[part]:
            heapq.heappush(heap, (load + costs[i], part))
    return part_N


def karmarkar_karp_partition(costs_N: npt.ArrayLike, num_parts: int) -> IntArray:
    """Partitions by the largest differencing method, which repeatedly joins the two partial partitions with the largest
    spread, pairing large parts with small ones.

    The result is more even than that of `greedy_partition`, but takes longer to compute. Bound: the parts' sums differ
    by at most the largest cost.
    Source: Karmarkar & Karp 1982, "The differencing method of set partitioning" (multi-way form).
    """
    costs_N = _checked(costs_N, num_parts)
    if not len(costs_N):
        return np.empty(0, np.int64)
    forest = _Forest(len(costs_N))
    heap = [(-cost, i, costs_N[i : i + 1], np.array([i])) for i, cost in enumerate(costs_N.tolist())]
    heapq.heapify(heap)
    for _ in range(len(costs_N) - 1):
        _, tie, sums_a, sets_a = heapq.heappop(heap)
        _, _, sums_b, sets_b = heap[0]
        sums, sets = _join(sums_a, sets_a, sums_b, sets_b, num_parts, forest)
        spread = float(sums[0] if len(sums) < num_parts else sums[0] - sums[-1])
        heapq.heapreplace(heap, (-spread, tie, sums, sets))
    return forest.part_of_items(heap[0][3])


class _Forest:
    """Sets of items, built by unions. Set i, for i < N, contains only item i. Union u creates set N + u."""

    def __init__(self, num_items: int):
        self.num_items = num_items
        # Each entry [k, 2] has the pairs of sets that k unions join.
        self.unions: list[IntArray] = []
        self.size = num_items

    def union(self, left: IntArray, right: IntArray) -> IntArray:
        self.unions.append(np.stack([left, right], 1))
        self.size += len(left)
        return np.arange(self.size - len(left), self.size)

    def part_of_items(self, sets: IntArray) -> IntArray:
        """int64 [N]: for each item, the position in `sets` of the set that contains it."""
        part = np.empty(self.size, np.int64)
        part[sets] = np.arange(len(sets))
        end = self.size
        for children in reversed(self.unions):
            part[children] = part[end - len(children) : end, None]
            end -= len(children)
        return part[: self.num_items]


def _join(
    sums_a: FloatArray, sets_a: IntArray, sums_b: FloatArray, sets_b: IntArray, num_parts: int, forest: _Forest
) -> tuple[FloatArray, IntArray]:
    """Joins two partial partitions so that large sums are paired with small ones. Sums are in descending order, and
    empty parts are left out."""
    overlap = max(0, len(sums_a) + len(sums_b) - num_parts)
    keep_a, keep_b = len(sums_a) - overlap, len(sums_b) - overlap
    sums = np.concatenate([sums_a[:keep_a], sums_b[:keep_b], sums_a[keep_a:] + sums_b[keep_b:][::-1]])
    sets = [sets_a[:keep_a], sets_b[:keep_b]]
    if overlap:
        sets.append(forest.union(sets_a[keep_a:], sets_b[keep_b:][::-1]))
    order = np.argsort(-sums, kind="stable")
    return sums[order], np.concatenate(sets)[order]


def _largest_first(costs_N: FloatArray) -> IntArray:
    return np.argsort(-costs_N, kind="stable")


def _checked(costs_N: npt.ArrayLike, num_parts: int) -> FloatArray:
    costs_N = np.asarray(costs_N, np.float64)
    if costs_N.ndim != 1:
        raise ShapeError(f"costs_N: expected one axis, got shape {costs_N.shape}")
    wrong = np.flatnonzero(~(np.isfinite(costs_N) & (costs_N >= 0)))
    if len(wrong):
        raise ShapeError(f"costs_N[{wrong[0]}] is {costs_N[wrong[0]]}; expected a finite cost of at least 0")
    if num_parts < 1:
        raise ShapeError(f"num_parts is {num_parts}, expected at least 1")
    return costs_N


def part_sums(costs_N: npt.ArrayLike, part_N: IntArray, num_parts: int) -> FloatArray:
    """The sum of the costs of each part, float64 [num_parts]."""
    return np.bincount(part_N, weights=np.asarray(costs_N, np.float64), minlength=num_parts).astype(np.float64)


def part_members(part_N: IntArray, num_parts: int) -> list[IntArray]:
    """The items of each part, ascending: the inverse of `part_N`."""
    order = np.argsort(part_N, kind="stable")
    return np.split(order, np.searchsorted(part_N[order], np.arange(1, num_parts)))
