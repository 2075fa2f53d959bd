"""Holds the keys and values of rows that decode together. As long as no rows are added, the cost of copying keys and
values grows only linearly with the number of sampled tokens.

Every row is left-padded and ends at the last column in use, so appending a token to all rows appends one column. Spare
columns follow, and a step writes only its own column. When no spare column is left, or when added rows do not fit, all
rows move to new tensors. New tensors have as many spare columns as columns in use. When rows leave, the last remaining
rows move to the free places, so for each row that leaves, at most one other row moves. Columns that are padding for all
rows are hidden from attention, and left out of new tensors. Padding is always overwritten with zeros: attention gives
it weight 0, but 0 times a non-finite value of an earlier row would not be 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

Layers = Sequence[tuple[Tensor, Tensor]]
"""Keys and values [B, heads, S, head_dim] of each layer."""


def rows_without(num_rows: int, gone: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns the old index of each row after the rows `gone` have left: rows from the end fill the places that became
    free, and all others keep their index."""
    stays_B = np.ones(num_rows, bool)
    stays_B[gone] = False
    num_left = int(stays_B.sum())
    row_B = np.arange(num_left)
    row_B[~stays_B[:num_left]] = num_left + np.flatnonzero(stays_B[num_left:])
    return row_B


@attrs.define(eq=False)
class RowCache:
    """Keys and values of all rows. In row b, the first `pad_B[b]` of the columns in use are padding."""

    pad_B: npt.NDArray[np.int64] = attrs.field(factory=lambda: np.empty(0, np.int64))
    _layers: Layers = ()
    """Tensors with spare space. The first `num_rows` rows and the columns from `_start` to `_end` are in use."""
    _start: int = 0
    _end: int = 0

    @property
    def num_rows(self) -> int:
        """Number of rows in use."""
        return len(self.pad_B)

    def with_room(self) -> DynamicCache:
        """Returns the cache in the model's format, with space for one more column."""
        if self._end == self._layers[0][0].shape[2]:
            self._move_to_new(self.num_rows, self._end - self._start, self._layers)
        # The layers are appended, because `DynamicCache(layers)` would copy every tensor.
        cache = DynamicCache()
        for keys, values in self._layers:
            whole = keys[: self.num_rows, :, self._start :], values[: self.num_rows, :, self._start :]
            cache.layers.append(_LayerWithRoom(*whole, self._end - self._start))
        return cache

    def appended(self) -> None:
        """Records that the model has written the column for which `with_room` made space."""
        self._end += 1

    def add(self, num_rows: int, width: int, like: Layers) -> None:
        """Adds empty rows, to be written by `fill`.

        Args:
            num_rows: number of rows to add.
            width: maximum number of columns that the new rows need.
            like: keys and values of any rows of this model, from which the number of heads, the head size, the dtype
                and the device are taken.
        """
        num_before, width_before = self.num_rows, self._end - self._start
        width, num_rows = max(width, width_before), num_before + num_rows
        if not self._layers or num_rows > len(self._layers[0][0]) or width > self._end:
            self._move_to_new(num_rows, width, like)
        first = self._end - width
        for tensor in self._tensors():
            tensor[:num_before, :, first : self._start] = 0
        pad_B = np.full(num_rows, width)
        pad_B[:num_before] = self.pad_B + width - width_before
        self.pad_B, self._start = pad_B, first

    def fill(
        self,
        rows: npt.NDArray[np.int64],
        layers: Layers,
        sources: npt.NDArray[np.int64],
        pad_B: npt.NDArray[np.int64],
    ) -> None:
        """Copies rows from `layers` into the cache.

        Args:
            rows: indices of the rows to write.
            layers: keys and values of the source rows, each of which ends at the last column.
            sources: for each of `rows`, the index of its source row in `layers`.
            pad_B: number of padding columns of each row of `layers`.
        """
        width = layers[0][0].shape[2]
        for tensor, other in zip(self._tensors(), (tensor for layer in layers for tensor in layer), strict=True):
            index, source = (torch.from_numpy(numbers).to(tensor.device) for numbers in (rows, sources))
            tensor[index, :, self._end - width : self._end] = other[source]
            tensor[index, :, self._start : self._end - width] = 0
        self.pad_B[rows] = self._end - self._start - width + pad_B[sources]

    def keep(self, row_B: npt.NDArray[np.int64]) -> None:
        """Keeps only some rows: the new row b is the old row `row_B[b]` (see `rows_without`)."""
        if not len(row_B):
            self.pad_B, self._layers, self._start, self._end = self.pad_B[:0], (), 0, 0
            return
        pad_B = self.pad_B[row_B]
        if len(moved := np.flatnonzero(row_B != np.arange(len(row_B)))):
            first = self._start + int(pad_B[moved].min())
            for tensor in self._tensors():
                index, source = (torch.from_numpy(numbers).to(tensor.device) for numbers in (moved, row_B[moved]))
                tensor[index, :, first : self._end] = tensor[source, :, first : self._end]
                tensor[index, :, self._start : first] = 0
        cut = int(pad_B.min())
        self.pad_B, self._start = pad_B - cut, self._start + cut

    def _tensors(self) -> list[Tensor]:
        return [tensor for layer in self._layers for tensor in layer]

    def _move_to_new(self, num_rows: int, width: int, like: Layers) -> None:
        """Moves the rows to new tensors, in which they end at column `width`, followed by `width` spare columns."""

        def moved(old: Tensor | None, like: Tensor) -> Tensor:
            new = like.new_zeros((num_rows, like.shape[1], 2 * width, like.shape[3]))
            if old is not None:
                used = old[: self.num_rows, :, self._start : self._end]
                new[: self.num_rows, :, width - used.shape[2] : width] = used
            return new

        olds = self._tensors() or [None] * (2 * len(like))
        likes = [tensor for layer in like for tensor in layer]
        tensors = [moved(old, one) for old, one in zip(olds, likes, strict=True)]
        self._layers = list(zip(tensors[::2], tensors[1::2], strict=True))
        self._start, self._end = width - (self._end - self._start), width


class _LayerWithRoom(DynamicLayer):
    """A layer that writes new columns into the spare space after those in use. It also serves sliding-window models,
    because their mask hides columns outside the window."""

    def __init__(self, keys: Tensor, values: Tensor, width: int) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self._whole = keys, values
        self.keys, self.values = keys[:, :, :width], values[:, :, :width]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See `DynamicLayer.update`."""
        first = self.get_seq_length()
        end = first + key_states.shape[2]
        for whole, new in zip(self._whole, (key_states, value_states), strict=True):
            whole[:, :, first:end] = new
        self.keys, self.values = (whole[:, :, :end] for whole in self._whole)
        return self.keys, self.values
