"""Core attention for packed sequences and context parallelism, where Transformer Engine is not installed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rl_core.layout.slices import context_positions


@dataclass
class Segments(PackedSeqParams):
    """Megatron's description of packed sequences, with their boundaries on the CPU."""

    boundaries: np.ndarray | None = None
    """int64 [segments + 1], of the whole micro-batch, before context ranks split it."""

    @classmethod
    def of(cls, boundaries: np.ndarray, device: torch.device) -> Segments:
        """Of padded sequences, laid end to end."""
        cumulative = torch.from_numpy(boundaries).to(device=device, dtype=torch.int32)
        longest = int(np.diff(boundaries).max())
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cumulative,
            cu_seqlens_kv=cumulative,
            cu_seqlens_q_padded=cumulative,
            cu_seqlens_kv_padded=cumulative,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            boundaries=boundaries,
        )


class CoreAttention(torch.nn.Module):
    """softmax(q kᵀ · scale) v, causal, within each segment; torch's own kernels.

    Under context parallelism keys and values are gathered from all ranks of the group, and their gradients summed back.
    This rank's queries are two chunks of every segment, each of which sees the segment up to its own end.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_unused: Any,  # latent attention gives head sizes, which the tensors have
    ):
        super().__init__()
        self.scale = softmax_scale
        self.context_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Segments | None = None,
    ) -> Tensor:
        """Shapes are Megatron's: [tokens, heads, size] when packed, else [tokens, rows, heads, size]."""
        if packed_seq_params is None:
            size = self.context_group.size()
            boundaries = np.array([0, query.shape[0] * size])
            return self._attend(query, key, value, boundaries).flatten(2)
        assert packed_seq_params.boundaries is not None
        query, key, value = (t.reshape(t.shape[0], 1, *t.shape[-2:]) for t in (query, key, value))
        return self._attend(query, key, value, packed_seq_params.boundaries).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, boundaries: np.ndarray) -> Tensor:
        rank, size = self.context_group.rank(), self.context_group.size()
        if size > 1:
            held = np.concatenate([context_positions(boundaries, other, size) for other in range(size)])
            natural = torch.from_numpy(np.argsort(held)).to(key.device)
            key, value = (_gather(tensor, self.context_group)[natural] for tensor in (key, value))
        parts = []
        place = 0
        for start, end in zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True):
            chunk = (end - start) // (2 * size)
            ends = [end] if size == 1 else [start + (rank + 1) * chunk, start + (2 * size - rank) * chunk]
            for seen in ends:
                length = end - start if size == 1 else chunk
                parts.append(
                    _causal(query[place : place + length], key[start:seen], value[start:seen], scale=self.scale)
                )
                place += length
        return torch.cat(parts)


def _causal(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
    """[queries, rows, heads, size]: the last query sees all keys, the one before it all but one, and so on."""
    num_queries, num_keys = query.shape[0], key.shape[0]
    mask = None
    if num_queries != num_keys:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_queries)
    attended = F.scaled_dot_product_attention(
        *(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return attended.permute(2, 0, 1, 3)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    # torch's own signature says `*grad_outputs`.
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        summed = grad_outputs[0].contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed.chunk(ctx.group.size())[ctx.group.rank()], None


def _gather(tensor: Tensor, group: Any) -> Tensor:
    """Along the first axis, in rank order; gradients of all ranks' copies are summed."""
    return _Gather.apply(tensor, group)  # pyright: ignore[reportReturnType]
