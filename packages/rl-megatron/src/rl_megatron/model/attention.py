"""Core attention for packed sequences and context parallelism, used where Transformer Engine cannot provide it.

Sequences of similar length are attended as right-padded rows of one rectangle, because kernels are called once per
rectangle and padding costs less than a call. The layout is computed once per micro-batch, for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rl_core.layout.rectangles import rectangle_cells, rectangle_rows
from rl_core.layout.slices import context_positions
from rl_core.rank_kit.row_moves import gather_rows, scatter_rows


@attrs.frozen(eq=False)
class _Cells:
    """Maps tokens of a stream to cells of rectangles."""

    token_U: Tensor | None
    """int64, the tokens that lie in a cell; None: all tokens, in order."""
    cell_U: Tensor | None
    """int64, the cell of each of these tokens; None: token i lies in cell i."""
    num_cells: int

    def filled(self, stream: Tensor) -> Tensor:
        """Returns [cells, …]; cells without a token are zero."""
        taken = stream if self.token_U is None else gather_rows(stream, self.token_U)
        return taken if self.cell_U is None else scatter_rows(taken, self.cell_U, self.num_cells)


@attrs.frozen(eq=False)
class _Part:
    """Queries, and the keys that they attend to. Each query sees the keys of its segment up to its own position. No
    key occurs twice in a part."""

    queries: _Cells
    keys: _Cells
    shapes: tuple[tuple[int, int, int], ...]
    """(rows, queries, keys) of each rectangle."""
    masks: tuple[Tensor | None, ...]
    """bool [rows or 1, 1, queries, keys] of each rectangle; None: causal, with query and key 0 aligned."""


@attrs.frozen(eq=False)
class AttentionPlan:
    """Says which keys each query of one context rank attends to in a micro-batch, and how the results are ordered."""

    parts: tuple[_Part, ...]
    """One part. With several context ranks there are two: a rank has two chunks of every segment, and each part has one
    chunk of every segment."""
    order: Tensor | None
    """int64, the position of each of this rank's tokens in the concatenated results of all parts; None: in order."""

    @classmethod
    def of(cls, boundaries: np.ndarray, rank: int, size: int, device: torch.device) -> AttentionPlan:
        """Plans attention over concatenated segments. If there are several context ranks (`size`), each has two chunks
        of every segment, and keys are ordered by rank."""
        pieces = _pieces(boundaries, rank, size)
        place_T = None
        if size > 1:
            held_T = np.concatenate([context_positions(boundaries, other, size) for other in range(size)])
            place_T = np.argsort(held_T)
        parts = np.split(pieces, 1 if size == 1 else 2)
        order = np.concatenate([_indices(part[:, 0], part[:, 2]) for part in parts])
        return cls(
            parts=tuple(_part_of(part, len(order), place_T, device) for part in parts),
            order=None if size == 1 else torch.from_numpy(np.argsort(order)).to(device),
        )


@dataclass
class Segments(PackedSeqParams):
    """Megatron's description of packed sequences, with their boundaries on the CPU."""

    boundaries: np.ndarray | None = None
    """int64 [segments + 1], boundaries of the whole micro-batch, before context ranks split it."""
    plan: AttentionPlan | None = None
    """Created when an attention layer first needs it."""

    @classmethod
    def of(cls, boundaries: np.ndarray, device: torch.device) -> Segments:
        """Creates the segments of padded, concatenated sequences."""
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
    """softmax(q kᵀ · scale) v, causal, within each segment, computed by torch's own kernels.

    Under context parallelism keys and values are gathered from all ranks of the group, and their gradients reduced.
    This rank's queries are two chunks of every segment. A chunk needs the keys from the start of its segment to
    the end of the chunk.
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
        **_unused: Any,  # latent attention passes its head sizes, which the tensors' shapes show too
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
        """Returns [tokens, heads · size] when packed, else [tokens, rows, heads · size]. The arguments have the same
        shapes, with heads and size as separate axes."""
        rank, size = self.context_group.rank(), self.context_group.size()
        if packed_seq_params is None:
            length, num_rows = query.shape[:2]
            plan = _plan_of_rows(num_rows, length * size, rank, size, query.device)
            query, key, value = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value))
            return self._attend(query, key, value, plan).unflatten(0, (num_rows, length)).transpose(0, 1).flatten(2)
        if packed_seq_params.plan is None:
            assert packed_seq_params.boundaries is not None
            packed_seq_params.plan = AttentionPlan.of(packed_seq_params.boundaries, rank, size, query.device)
        query, key, value = (tensor.reshape(tensor.shape[0], *tensor.shape[-2:]) for tensor in (query, key, value))
        return self._attend(query, key, value, packed_seq_params.plan).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
        """Returns the attention of this rank's queries. All tensors are [tokens, heads, size]."""
        if self.context_group.size() > 1:
            key, value = (_gather(tensor, self.context_group) for tensor in (key, value))
        attended = [_attend_part(query, key, value, part, self.scale) for part in plan.parts]
        return attended[0] if plan.order is None else gather_rows(torch.cat(attended), plan.order)


@lru_cache(maxsize=16)
def _plan_of_rows(num_rows: int, length: int, rank: int, size: int, device: torch.device) -> AttentionPlan:
    return AttentionPlan.of(np.arange(num_rows + 1) * length, rank, size, device)


def _part_of(pieces: np.ndarray, own_tokens: int, place_T: np.ndarray | None, device: torch.device) -> _Part:
    """Builds the part that consists of `pieces`. `place_T[i]` is the position, among the gathered keys, of the key with
    index i in the micro-batch; None: keys are in order."""
    first_query, first_key, num_queries, num_keys = pieces.T
    rows = rectangle_rows(num_queries)
    query_shapes, query_cell = rectangle_cells(num_queries, *rows)
    key_shapes, key_cell = rectangle_cells(num_keys, *rows)
    key_token = _indices(first_key, num_keys)
    all_keys = own_tokens if place_T is None else len(place_T)
    if place_T is not None:
        key_token = place_T[key_token]
    masks = []
    for rectangle, ((_, queries), (_, keys)) in enumerate(zip(query_shapes, key_shapes, strict=True)):
        is_in = rows[0] == rectangle
        before = np.zeros(int(is_in.sum()), np.int64)
        before[rows[1][is_in]] = (num_keys - num_queries)[is_in]
        masks.append(_mask(before, queries, keys, device))
    return _Part(
        queries=_cells(_indices(first_query, num_queries), own_tokens, query_cell, query_shapes, device),
        keys=_cells(key_token, all_keys, key_cell, key_shapes, device),
        shapes=tuple((rows, q, k) for (rows, q), (_, k) in zip(query_shapes, key_shapes, strict=True)),
        masks=tuple(masks),
    )


def _cells(
    token_U: np.ndarray,
    num_tokens: int,
    cell_U: np.ndarray,
    shapes: tuple[tuple[int, int], ...],
    device: torch.device,
) -> _Cells:
    num_cells = sum(rows * width for rows, width in shapes)
    all_tokens = np.array_equal(token_U, np.arange(num_tokens))
    all_cells = np.array_equal(cell_U, np.arange(num_cells))
    return _Cells(
        token_U=None if all_tokens else torch.from_numpy(token_U).to(device),
        cell_U=None if all_cells else torch.from_numpy(cell_U).to(device),
        num_cells=num_cells,
    )


def _mask(before_R: np.ndarray, num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
    """Returns the mask with which query i of row r sees keys 0 … `before_R[r]` + i, or None if `before_R` is all 0.

    A real query sees no padding, because padding comes after its segment. A padding query sees at least one key,
    because softmax needs one.
    """
    if not before_R.any():
        return None
    if (before_R == before_R[0]).all():
        before_R = before_R[:1]
    last_RQ = torch.from_numpy(before_R)[:, None] + torch.arange(num_queries)
    return (torch.arange(num_keys) <= last_RQ[..., None])[:, None].to(device)


def _attend_part(query: Tensor, key: Tensor, value: Tensor, part: _Part, scale: float | None) -> Tensor:
    """Returns [tokens of the part, heads, size]."""
    query_cells = [rows * queries for rows, queries, _ in part.shapes]
    key_cells = [rows * keys for rows, _, keys in part.shapes]
    rectangles = zip(
        part.shapes,
        part.masks,
        part.queries.filled(query).split(query_cells),
        part.keys.filled(key).split(key_cells),
        part.keys.filled(value).split(key_cells),
        strict=True,
    )
    outputs = []
    for (rows, _, _), mask, *cells in rectangles:
        attended = F.scaled_dot_product_attention(
            *(tensor.unflatten(0, (rows, -1)).transpose(1, 2) for tensor in cells),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output if part.queries.cell_U is None else gather_rows(output, part.queries.cell_U)


def _pieces(boundaries: np.ndarray, rank: int, size: int) -> np.ndarray:
    """Returns int64 [pieces, 4]. A piece is a range of consecutive queries of this rank, with the keys of their segment
    up to the last query.

    Columns: first query (index among this rank's), first key (index among all), number of queries, number of keys. With
    several context ranks the first chunks of all segments come first, then the second chunks.
    """
    lengths = np.diff(boundaries)
    starts, lengths = boundaries[:-1][lengths > 0], lengths[lengths > 0]
    if size == 1:
        return np.stack([starts, starts, lengths, lengths], axis=1)
    chunks = lengths // (2 * size)
    first = np.stack([starts // size, starts, chunks, (rank + 1) * chunks], axis=1)
    second = np.stack([starts // size + chunks, starts, chunks, (2 * size - rank) * chunks], axis=1)
    return np.concatenate([first, second])


def _indices(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenates the ranges start, start + 1, … of the given lengths."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1])


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
    """All-gathers along the first axis, in rank order; backward sums the gradients of all ranks' copies."""
    return _Gather.apply(tensor, group)  # pyright: ignore[reportReturnType]
