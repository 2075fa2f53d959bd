"""Moves rows of a tensor to distinct places and back. Because places are distinct, backward copies rows of the gradient
without the sums that the backward of torch's indexing computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def scatter_rows(source: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """Returns zeros [num_rows, …] in which row index[i] is source[i]. Indices must be distinct. In backward, the rows
    of the gradient at `index` are gathered."""
    return _ScatterRows.apply(source, index, num_rows)  # pyright: ignore[reportReturnType]


def gather_rows(source: Tensor, index: Tensor) -> Tensor:
    """Returns source[index] along the first axis. Indices must be distinct: the gradient is copied, not summed."""
    return _GatherRows.apply(source, index)  # pyright: ignore[reportReturnType]


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(index)
        return source.new_zeros((num_rows, *source.shape[1:])).index_copy_(0, index, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (index,) = ctx.saved_tensors
        return grad[index], None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = source.shape[0]
        return source[index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (index,) = ctx.saved_tensors
        return grad.new_zeros((ctx.num_rows, *grad.shape[1:])).index_copy_(0, index, grad), None
