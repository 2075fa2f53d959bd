"""Describes where the sequences of a packed stream are, as attention needs it."""

from __future__ import annotations

import attrs
import numpy as np
import torch
from torch import Tensor

from rl_core.layout.balancing import IntArray
from rl_core.layout.prefixes import InputCells, prefix_blocks
from rl_core.layout.rectangles import rectangle_cells, rectangle_rows
from rl_core.rank_kit.device_copies import on_device
from rl_transformers.rank.rank_mesh import UlyssesGroup


@attrs.frozen(eq=False)
class PackedSequences:
    """The sequences of a micro-batch, and the rectangles in which attention is computed."""

    offsets: Tensor
    """int32 [N+1], the bounds of the sequences in the stream, on the model's device."""
    max_length: int
    rectangles: tuple[tuple[int, int], ...]
    """(rows, width) of each rectangle; cells are numbered consecutively across all rectangles."""
    num_cells: int
    cell_T: Tensor | None
    """int64 [T], the cell of each token; None: token t is in cell t."""
    ulysses: UlyssesGroup | None = None
    """If set, the model's tensors hold only this rank's slice of every row."""
    shared: SharedPrefixes | None = None
    """If set, the sequences are nodes of a `PrefixForest`, and also see their ancestors."""

    @classmethod
    def of_lengths(
        cls, lengths_N: IntArray, device: torch.device, *, ulysses: UlyssesGroup | None = None
    ) -> PackedSequences:
        """Describes sequences of these lengths (at least 1). Groups sequences of similar length into rectangles."""
        rectangles, cell_T = rectangle_cells(lengths_N, *rectangle_rows(lengths_N))
        num_cells = sum(rows * width for rows, width in rectangles)
        is_identity = num_cells == len(cell_T) and bool((cell_T == np.arange(len(cell_T))).all())
        return cls(
            offsets=_offsets(lengths_N, device),
            max_length=int(lengths_N.max()),
            rectangles=rectangles,
            num_cells=num_cells,
            cell_T=None if is_identity else on_device(torch.from_numpy(cell_T), device),
            ulysses=ulysses,
        )

    @classmethod
    def of_nodes(
        cls, cells: InputCells, device: torch.device, *, ulysses: UlyssesGroup | None = None
    ) -> PackedSequences:
        """Describes the nodes of a prefix forest as sequences."""
        packed = cls.of_lengths(cells.length_M, device, ulysses=ulysses)
        has_parents = bool((cells.parent_M >= 0).any())
        return attrs.evolve(packed, shared=SharedPrefixes.of(cells, device)) if has_parents else packed


@attrs.frozen(eq=False)
class SharedPrefixes:
    """The blocks of attention between the nodes of a prefix forest and their ancestors, and the original sequences."""

    own: AttentionBlocks
    """One block per node: its queries and its keys."""
    before: AttentionBlocks
    """One block per node with children: the queries of the children; the keys of the node and all its ancestors."""
    query_Q: Tensor
    """int64, the stream's rows (one per token or padding) whose nodes have ancestors."""
    key_K: Tensor
    """int64, the stream's rows that these queries see; a row appears once for each block of queries that sees it."""
    sequences: PackedSequences
    """Every sequence in full, including its shared prefix; then the padding, if any, as another sequence."""
    row_T: Tensor
    """int64, the stream's row of each token of `sequences`."""
    token_C: Tensor
    """int64, for each row of the stream, the index of a token of `sequences` that this row holds."""

    @classmethod
    def of(cls, cells: InputCells, device: torch.device) -> SharedPrefixes:
        """Computes the blocks from the cells of a micro-batch."""
        blocks = prefix_blocks(cells.length_M, cells.parent_M)
        # Padding forms one more sequence, so that `token_C` has a token for every row.
        fillers = np.flatnonzero(cells.index_C < 0)
        row_T = np.concatenate([cells.cell_T[cells.cell_T >= 0], fillers])
        lengths = np.append(cells.given_N, [len(fillers)])
        token_C = np.empty(len(cells.index_C), np.int64)
        token_C[row_T] = np.arange(len(row_T))
        return cls(
            own=AttentionBlocks.of(cells.length_M, cells.length_M, device, pads_keys=True),
            before=AttentionBlocks.of(blocks.query_length_B, blocks.key_length_B, device),
            query_Q=on_device(torch.from_numpy(blocks.query_Q), device),
            key_K=on_device(torch.from_numpy(blocks.key_K), device),
            sequences=PackedSequences.of_lengths(lengths[lengths > 0], device),
            row_T=on_device(torch.from_numpy(row_T), device),
            token_C=on_device(torch.from_numpy(token_C), device),
        )


@attrs.frozen(eq=False)
class AttentionBlocks:
    """Concatenated blocks of queries, each with the block of keys that it sees, and the rectangles in which attention
    is computed."""

    query_offsets: Tensor
    """int32 [B+1], the bounds of the blocks among the queries."""
    key_offsets: Tensor
    """int32 [B+1], the bounds of the blocks among the keys."""
    most_queries: int
    most_keys: int
    rectangles: tuple[tuple[int, int, int], ...]
    """(rows, queries per row, keys per row) of each rectangle."""
    query_slot_Q: Tensor
    """int64, the index of each query in the concatenated rectangles."""
    key_slot_K: Tensor

    @property
    def num_query_slots(self) -> int:
        """Number of queries including padding."""
        return sum(rows * queries for rows, queries, _ in self.rectangles)

    @classmethod
    def of(
        cls, query_length_B: IntArray, key_length_B: IntArray, device: torch.device, *, pads_keys: bool = False
    ) -> AttentionBlocks:
        """Puts blocks with similar numbers of queries into one rectangle. If `pads_keys` is False, blocks of a
        rectangle also have equal numbers of keys. Keys may be padded only under a causal mask."""
        rows = rectangle_rows(query_length_B, None if pads_keys else key_length_B)
        query_shapes, query_slot_Q = rectangle_cells(query_length_B, *rows)
        key_shapes, key_slot_K = rectangle_cells(key_length_B, *rows)
        return cls(
            query_offsets=_offsets(query_length_B, device),
            key_offsets=_offsets(key_length_B, device),
            most_queries=int(query_length_B.max()),
            most_keys=int(key_length_B.max()),
            rectangles=tuple((n, q, k) for (n, q), (_, k) in zip(query_shapes, key_shapes, strict=True)),
            query_slot_Q=on_device(torch.from_numpy(query_slot_Q), device),
            key_slot_K=on_device(torch.from_numpy(key_slot_K), device),
        )


def _offsets(lengths: IntArray, device: torch.device) -> Tensor:
    return on_device(torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)), device)
