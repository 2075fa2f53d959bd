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
        pieces = _pieces(boundaries, rank, size)
        attended, places = [], []
        for num_queries, num_keys in np.unique(pieces[:, 2:], axis=0).tolist():
            starts = pieces[(pieces[:, 2] == num_queries) & (pieces[:, 3] == num_keys), :2]
            queries = _rows(query, starts[:, 0], num_queries)
            keys, values = (_rows(tensor, starts[:, 1], num_keys) for tensor in (key, value))
            attended.append(_causal(queries, keys, values, scale=self.scale).flatten(0, 1))
            places.append(_indices(starts[:, 0], num_queries))
        if len(attended) == 1:
            return attended[0]
        order = torch.from_numpy(np.argsort(np.concatenate(places))).to(query.device)
        return torch.cat(attended).index_select(0, order)


def _pieces(boundaries: np.ndarray, rank: int, size: int) -> np.ndarray:
    """int64 [pieces, 4]: consecutive queries of this rank and the keys of their segment up to the last of them.

    First query (among this rank's), first key (of all), number of queries, number of keys. Kernels are called for all
    pieces of one shape at once: a micro-batch of many short sequences would spend its time on calls.
    """
    starts, lengths = boundaries[:-1], np.diff(boundaries)
    if size == 1:
        return np.stack([starts, starts, lengths, lengths], axis=1)
    chunks = lengths // (2 * size)
    first = np.stack([starts // size, starts, chunks, (rank + 1) * chunks], axis=1)
    second = np.stack([starts // size + chunks, starts, chunks, (2 * size - rank) * chunks], axis=1)
    return np.concatenate([first, second])


def _indices(starts: np.ndarray, length: int) -> np.ndarray:
    return (starts[:, None] + np.arange(length)).ravel()


def _rows(tensor: Tensor, starts: np.ndarray, length: int) -> Tensor:
    """[pieces, length, …] of what begins at `starts`."""
    if len(starts) == 1:
        return tensor[None, int(starts[0]) : int(starts[0]) + length]
    index = torch.from_numpy(_indices(starts, length)).to(tensor.device)
    return tensor.index_select(0, index).unflatten(0, (len(starts), length))


def _causal(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
    """[pieces, queries, rows, heads, size]: the last query sees all keys, the one before it all but one, and so on."""
    num_pieces, num_queries, num_rows = query.shape[:3]
    num_keys = key.shape[1]
    mask = None
    if num_queries != num_keys:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_queries)
    attended = F.scaled_dot_product_attention(
        *(tensor.permute(0, 2, 3, 1, 4).flatten(0, 1) for tensor in (query, key, value)),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[3] != key.shape[3],
    )
    return attended.unflatten(0, (num_pieces, num_rows)).permute(0, 3, 1, 2, 4)


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
