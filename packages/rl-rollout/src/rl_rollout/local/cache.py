"""The key-value cache of the rows that decode together: what it copies grows with what is sampled, not with its square.

Every row ends at the last column and is padded on the left, so that appending a token appends one column. There is room
behind: columns double when it is used up, and a step writes its own column alone. Of the rows that stay when others
leave, the last ones move to the free places, so that a sample's end moves one row at most. Columns that are padding for
all rows are left out of what attention sees, and given up when the columns double. Padding is zero, never what another
row has left there: attention gives it the weight 0, and 0 times what is not finite is not 0.
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
    """For each row that is left, which one it was: its own place, or, where that is gone, one from the end."""
    stays_B = np.ones(num_rows, bool)
    stays_B[gone] = False
    num_left = int(stays_B.sum())
    row_B = np.arange(num_left)
    row_B[~stays_B[:num_left]] = num_left + np.flatnonzero(stays_B[num_left:])
    return row_B


@attrs.define(eq=False)
class RowCache:
    """Keys and values of rows; row b holds nothing in the first `pad_B[b]` of the columns that are in use."""

    pad_B: npt.NDArray[np.int64] = attrs.field(factory=lambda: np.empty(0, np.int64))
    _layers: Layers = ()
    """With room: of its rows the first are in use, and of its columns those from `_start` to `_end`."""
    _start: int = 0
    _end: int = 0

    @property
    def num_rows(self) -> int:
        """Rows in use."""
        return len(self.pad_B)

    def with_room(self) -> DynamicCache:
        """As the model takes it, for one more column."""
        if self._end == self._layers[0][0].shape[2]:
            self._move_to_new(self.num_rows, self._end - self._start, self._layers)
        # `DynamicCache(layers)` would copy every tensor.
        cache = DynamicCache()
        for keys, values in self._layers:
            whole = keys[: self.num_rows, :, self._start :], values[: self.num_rows, :, self._start :]
            cache.layers.append(_LayerWithRoom(*whole, self._end - self._start))
        return cache

    def appended(self) -> None:
        """The model has written that column."""
        self._end += 1

    def add(self, num_rows: int, width: int, like: Layers) -> None:
        """Adds rows of at most `width` columns, which `fill` writes.

        Args:
            like: tensors of the shapes of one row.
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
        """Writes rows.

        Args:
            rows: which.
            layers: rows that end at the last column, too.
            sources: which of these each of them becomes.
            pad_B: columns of each of `layers`' rows that hold nothing.
        """
        width = layers[0][0].shape[2]
        for tensor, other in zip(self._tensors(), (tensor for layer in layers for tensor in layer), strict=True):
            index, source = (torch.from_numpy(numbers).to(tensor.device) for numbers in (rows, sources))
            tensor[index, :, self._end - width : self._end] = other[source]
            tensor[index, :, self._start : self._end - width] = 0
        self.pad_B[rows] = self._end - self._start - width + pad_B[sources]

    def keep(self, row_B: npt.NDArray[np.int64]) -> None:
        """Leaves rows out: row b becomes what `row_B[b]` was (see `rows_without`)."""
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
        """To larger tensors, where rows end at column `width` and as many are free behind it."""

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
    """Writes new columns behind those that are in use. Also serves sliding-window models, whose mask hides what lies
    outside of the window."""

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
