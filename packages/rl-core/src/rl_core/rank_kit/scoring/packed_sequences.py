"""Where the sequences of a packed stream lie, for attention."""

from __future__ import annotations

import attrs
import numpy as np
import torch
from torch import Tensor

from rl_core.layout.balancing import IntArray
from rl_core.layout.prefixes import InputCells, prefix_blocks
from rl_core.layout.rectangles import rectangle_cells, rectangle_rows
from rl_core.rank_kit.device_copies import on_device
from rl_core.rank_kit.scoring.rank_mesh import UlyssesGroup


@attrs.frozen(eq=False)
class PackedSequences:
    """The sequences, and the rectangles they are attended in; one per micro-batch."""

    offsets: Tensor
    """int32 [N+1] on the stream's device."""
    max_length: int
    rectangles: tuple[tuple[int, int], ...]
    """(rows, width) of each; their cells are numbered one rectangle after the other."""
    num_cells: int
    cell_T: Tensor | None
    """int64 [T], the cell of each token; None where cell t is token t."""
    ulysses: UlyssesGroup | None = None
    """Where it is given, the model's tensors hold this rank's slice of every row only."""
    shared: SharedPrefixes | None = None
    """Where it is given, the sequences are nodes of a `PrefixForest`, and see those before them too."""

    @classmethod
    def of_lengths(
        cls, lengths_N: IntArray, device: torch.device, *, ulysses: UlyssesGroup | None = None
    ) -> PackedSequences:
        """Groups sequences by length (at least 1 each)."""
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
        """The nodes of a forest as sequences."""
        packed = cls.of_lengths(cells.length_M, device, ulysses=ulysses)
        has_parents = bool((cells.parent_M >= 0).any())
        return attrs.evolve(packed, shared=SharedPrefixes.of(cells, device)) if has_parents else packed


@attrs.frozen(eq=False)
class SharedPrefixes:
    """What the nodes of a forest see of those before them; and the sequences as they were."""

    own: AttentionBlocks
    """Every node's queries, and as many keys."""
    before: AttentionBlocks
    """The queries of a node's children, and the keys of the node and of all before it."""
    query_Q: Tensor
    """int64, the stream's rows that see something before their own node."""
    key_K: Tensor
    """int64, the rows that they see, once per block."""
    sequences: PackedSequences
    """Every sequence from its first token on, with what it shares."""
    row_T: Tensor
    """int64, the stream's row of each token of `sequences`."""
    token_C: Tensor
    """int64, for each of the stream's rows a token of `sequences`."""

    @classmethod
    def of(cls, cells: InputCells, device: torch.device) -> SharedPrefixes:
        """From the cells of a micro-batch."""
        blocks = prefix_blocks(cells.length_M, cells.parent_M)
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
    """Blocks of queries that see a block of keys each, end to end, and the rectangles they are computed in."""

    query_offsets: Tensor
    """int32 [B+1]"""
    key_offsets: Tensor
    """int32 [B+1]"""
    most_queries: int
    most_keys: int
    rectangles: tuple[tuple[int, int, int], ...]
    """(rows, queries of a row, keys of a row)"""
    query_slot_Q: Tensor
    """int64, each query's place in the rectangles, end to end."""
    key_slot_K: Tensor

    @property
    def num_query_slots(self) -> int:
        """Queries with their padding."""
        return sum(rows * queries for rows, queries, _ in self.rectangles)

    @classmethod
    def of(
        cls, query_length_B: IntArray, key_length_B: IntArray, device: torch.device, *, pads_keys: bool = False
    ) -> AttentionBlocks:
        """Puts blocks of a similar number of queries into one rectangle, and unless keys may be padded, as they may
        under a causal mask, of as many keys."""
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
