"""Attention over a prefix forest, in which each shared prefix is computed once. A token sees itself, the tokens before
it in its node, and all ancestors of the node.

The computation takes two calls of a flash attention kernel. In the first call, each node attends to itself with a
causal mask. In the second call, the children of each node attend to the node and its ancestors without a mask. The
kernel also returns the logarithm of the softmax's denominator, with which the two outputs are merged. The backward pass
also takes two calls of the kernel. Both get the merged output and the merged log-denominator, so each call returns its
part's exact contribution to the gradients. Ring attention merges the outputs of several devices in the same way (Liu et
al. 2023, arXiv 2310.01889). Hydragen does the same for shared prefixes during generation (Juravsky et al. 2024, arXiv
2402.05099).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_transformers.rank.packed_sequences import AttentionBlocks, SharedPrefixes

_aten: Any = torch.ops.aten


def shared_attention(
    query_CHD: Tensor, key_CKD: Tensor, value_CKD: Tensor, shared: SharedPrefixes, scaling: float | None
) -> Tensor | None:
    """Computes the attention of a forest's C cells, [C, H, D]. Returns None if no kernel supports such tensors.

    Args:
        query_CHD, key_CKD, value_CKD: the vectors of all cells. Key and value may have fewer heads.
        shared: the nodes, and the ancestors that they see.
        scaling: factor of query · key; None: D ** −0.5.
    """
    kernel = _kernel_for(query_CHD, key_CKD, value_CKD)
    if kernel is None:
        return None
    if (half := half_precision(query_CHD)) is not None:
        query_CHD, key_CKD, value_CKD = (t.to(half) for t in (query_CHD, key_CKD, value_CKD))
    return _SharedAttention.apply(query_CHD, key_CKD, value_CKD, shared, scaling, kernel)  # pyright: ignore[reportReturnType]


def half_precision(query: Tensor) -> torch.dtype | None:
    """The half precision in which attention computes. Under autocast, this is autocast's dtype, even for a float32
    tensor, because rotary embeddings of float32 models give float32. Otherwise, it is the tensor's dtype; None if that
    is not half precision."""
    if torch.is_autocast_enabled(query.device.type):
        return torch.get_autocast_dtype(query.device.type)
    return query.dtype if query.dtype in (torch.bfloat16, torch.float16) else None


def flash_precision(query: Tensor, key: Tensor, value: Tensor) -> torch.dtype | None:
    """The half precision in which CUDA's flash attention computes these vectors; None if the kernel does not support
    them. The kernel needs vectors on CUDA, in half precision, all of the same size (in MLA, sizes differ): a multiple
    of 8, at most 256."""
    size = query.shape[-1]
    is_fitting = size == key.shape[-1] == value.shape[-1] and size % 8 == 0 and size <= 256
    return half_precision(query) if query.is_cuda and is_fitting else None


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        shared: SharedPrefixes,
        scaling: float | None,
        kernel: _Kernel,
    ) -> Tensor:
        output, lse = kernel.forward(query, key, value, shared.own, True, scaling)
        rows, keys = shared.query_Q, shared.key_K
        prefix_output, prefix_lse = kernel.forward(query[rows], key[keys], value[keys], shared.before, False, scaling)
        own_lse = lse[rows]
        merged_lse = torch.logaddexp(own_lse, prefix_lse)
        merged = output[rows] * (own_lse - merged_lse).exp()[..., None]
        merged += prefix_output * (prefix_lse - merged_lse).exp()[..., None]
        # Out of place: selective checkpointing keeps the kernel's results for the recomputation of the layer.
        output = output.index_copy(0, rows, merged.to(output.dtype))
        lse = lse.index_copy(0, rows, merged_lse)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.settings = shared, scaling, kernel
        return output

    @staticmethod
    @once_differentiable
    # The decorator hides the parameters' names from the checker.
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grad_outputs
        query, key, value, output, lse = ctx.saved_tensors
        shared, scaling, kernel = ctx.settings
        grads = kernel.backward(grad, query, key, value, output, lse, shared.own, True, scaling)
        rows, keys = shared.query_Q, shared.key_K
        more = kernel.backward(
            grad[rows], query[rows], key[keys], value[keys], output[rows], lse[rows], shared.before, False, scaling
        )
        sums = [part.to(lse.dtype) for part in grads]
        for total, part, index in zip(sums, more, (rows, keys, keys), strict=True):
            total.index_add_(0, index, part.to(lse.dtype))
        return *(total.to(query.dtype) for total in sums), None, None, None


class _Kernel(Protocol):
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, blocks: AttentionBlocks, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the output [Q, H, D], and the log of the softmax's denominator [Q, H] in float32 or float64."""
        ...

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        blocks: AttentionBlocks,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of query, key and value."""
        ...


class _Rectangles:
    """torch's flash attention for CPUs, on padded rectangles."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, blocks: AttentionBlocks, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        outputs, lses = [], []
        for q, k, v in _in_rectangles(blocks, (query,), (key, value)):
            output, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
            outputs.append(_as_rows(output))
            lses.append(_as_rows(lse))
        return torch.cat(outputs)[blocks.query_slot_Q], torch.cat(lses)[blocks.query_slot_Q]

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        blocks: AttentionBlocks,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts: list[tuple[Tensor, ...]] = []
        # exp(score − lse) must be 0 at padding, so the log-denominator there is infinite.
        padded_lse = lse.new_full((blocks.num_query_slots, lse.shape[1]), torch.inf)
        padded_lse.index_copy_(0, blocks.query_slot_Q, lse)
        lses = padded_lse.split([rows * queries for rows, queries, _ in blocks.rectangles])
        rectangles = _in_rectangles(blocks, (query, output, grad), (key, value))
        for (q, out, d, k, v), (rows, queries, _), one in zip(rectangles, blocks.rectangles, lses, strict=True):
            grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                d, q, k, v, out, one.unflatten(0, (rows, queries)).transpose(1, 2), 0.0, causal, scale=scale
            )
            parts.append(tuple(_as_rows(part) for part in grads))
        slots = (blocks.query_slot_Q, blocks.key_slot_K, blocks.key_slot_K)
        dq, dk, dv = (torch.cat(part)[slot] for part, slot in zip(zip(*parts, strict=True), slots, strict=True))
        return dq, dk, dv


class _Varlen:
    """torch's flash attention for concatenated sequences, on CUDA in half precision."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, blocks: AttentionBlocks, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        output, lse, *_ = _aten._flash_attention_forward(
            query,
            key,
            value,
            blocks.query_offsets,
            blocks.key_offsets,
            blocks.most_queries,
            blocks.most_keys,
            0.0,
            causal,
            False,
            scale=scale,
        )
        return output, lse.transpose(0, 1).contiguous()

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        blocks: AttentionBlocks,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Without dropout the random state is not read.
        unused = torch.empty(0, dtype=torch.int64, device=query.device)
        return _aten._flash_attention_backward(
            grad.contiguous(),
            query,
            key,
            value,
            output,
            lse.transpose(0, 1).contiguous(),
            blocks.query_offsets,
            blocks.key_offsets,
            blocks.most_queries,
            blocks.most_keys,
            0.0,
            causal,
            unused,
            unused,
            scale=scale,
        )


def _kernel_for(query: Tensor, key: Tensor, value: Tensor) -> _Kernel | None:
    if query.device.type == "cpu":
        return _Rectangles() if query.shape[-1] == key.shape[-1] == value.shape[-1] else None
    return _Varlen() if flash_precision(query, key, value) is not None else None


def _in_rectangles(
    blocks: AttentionBlocks, queries: tuple[Tensor, ...], keys: tuple[Tensor, ...]
) -> Iterator[tuple[Tensor, ...]]:
    """Yields for each rectangle all tensors as [rows, heads, queries or keys, D], padded with zeros."""
    num_keys = sum(rows * width for rows, _, width in blocks.rectangles)
    placed = [
        *(_placed(tensor, blocks.query_slot_Q, blocks.num_query_slots) for tensor in queries),
        *(_placed(tensor, blocks.key_slot_K, num_keys) for tensor in keys),
    ]
    first_query = first_key = 0
    for rows, num_queries, num_keys in blocks.rectangles:
        spans = [(first_query, num_queries)] * len(queries) + [(first_key, num_keys)] * len(keys)
        yield tuple(
            tensor[first : first + rows * width].unflatten(0, (rows, width)).transpose(1, 2)
            for tensor, (first, width) in zip(placed, spans, strict=True)
        )
        first_query, first_key = first_query + rows * num_queries, first_key + rows * num_keys


def _placed(tensor: Tensor, slot: Tensor, num_slots: int) -> Tensor:
    return tensor.new_zeros((num_slots, *tensor.shape[1:])).index_copy_(0, slot, tensor)


def _as_rows(tensor: Tensor) -> Tensor:
    """Reshapes [rows, heads, width, …] to [rows · width, heads, …]."""
    return tensor.transpose(1, 2).flatten(0, 1)
