"""Arranges sequences of similar length as right-padded rows of a rectangle, for kernels that accept only rectangles.

With a causal mask, no token attends to the padding on its right.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
_SHORT = 32
"""All sequences up to this length share a rectangle, because another kernel call would cost more than the padding."""
_GROWTH = 1.25
"""Longer sequences share a rectangle only if the ratio of their lengths is at most about this, so padding adds at most
25 % to their tokens."""


def rectangle_rows(lengths_N: IntArray, alike_N: IntArray | None = None) -> tuple[IntArray, IntArray]:
    """Puts sequences of these lengths (at least 1 each) into rectangles.

    Args:
        lengths_N: tokens of each sequence.
        alike_N: sequences share a rectangle only if their entries in this array are equal. None: no such restriction.

    Returns:
        Two arrays, int64 [N]: the number of each sequence's rectangle, and the sequence's row in this rectangle.
        Rectangles of shorter sequences have lower numbers.
    """
    class_N = np.ceil(np.log(np.maximum(lengths_N, _SHORT) / _SHORT) / np.log(_GROWTH) - 1e-9).astype(np.int64)
    if alike_N is not None:
        class_N = class_N * (int(alike_N.max(initial=0)) + 1) + alike_N
    _, rectangle_N, rows = np.unique(class_N, return_inverse=True, return_counts=True)
    row_N = np.empty_like(rectangle_N)
    order = np.argsort(rectangle_N, kind="stable")
    row_N[order] = np.arange(len(lengths_N)) - np.repeat(np.cumsum(rows) - rows, rows)
    return rectangle_N, row_N


def rectangle_cells(
    lengths_N: IntArray, rectangle_N: IntArray, row_N: IntArray
) -> tuple[tuple[tuple[int, int], ...], IntArray]:
    """Computes the cell of each token from the rows of the sequences. Cells are numbered consecutively over all
    rectangles.

    Args:
        lengths_N: tokens of each sequence; may differ from the lengths for which the rows were computed.
        rectangle_N, row_N: see `rectangle_rows`.

    Returns:
        (rows, width) of each rectangle, and int64 [T]: the cell of each token of the concatenated sequences.
    """
    rows = np.bincount(rectangle_N)
    widths = np.zeros(len(rows), np.int64)
    np.maximum.at(widths, rectangle_N, lengths_N)
    first_cell = np.concatenate([[0], np.cumsum(rows * widths)])
    start_N = first_cell[rectangle_N] + row_N * widths[rectangle_N]
    ends = np.cumsum(lengths_N)
    cell_T = np.repeat(start_N - (ends - lengths_N), lengths_N) + np.arange(ends[-1])
    return tuple(zip(rows.tolist(), widths.tolist(), strict=True)), cell_T
