"""Micro-batches as inputs of one rank's model, and `to_stream`, which puts the model's outputs back in the stream's
order."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.batch import Batch
from rl_core.interfaces import Plan
from rl_core.layout.mesh import Mesh
from rl_core.layout.slices import Layout, context_positions, packed_layout, padded_layout
from rl_core.rank_kit.device_copies import on_device
from rl_megatron.model.attention import Segments
from rl_megatron.place import Place


@attrs.frozen(kw_only=True, eq=False)
class MicroBatch:
    """One context-parallel rank's part of a micro-batch: B rows (1 if packed) of S positions. Tensor and pipeline ranks
    with the same context rank hold the same part."""

    batch: Batch | None
    """The micro-batch's sequences. None: there are none; the micro-batch runs only because other ranks wait for this
    rank."""
    sequences: tuple[int, ...]
    """Indices of the micro-batch's sequences in the rank's batch."""
    tokens_BS: Tensor
    positions_BS: Tensor
    segments: Segments | None
    """Boundaries of the packed sequences of the whole micro-batch; None if sequences are padded, one per row."""
    index_P: Tensor
    """int64 [B · S], row-major, on the CPU: index of the input token in the stream of `batch`, -1 for padding."""
    target_index_P: Tensor
    """Like `index_P`, for the token that the position predicts; -1 if it predicts none."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in `batch`; 0 if it is None."""
        return 0 if self.batch is None else self.batch.num_tokens

    def scored_places(self, mask_T: Tensor | None) -> Tensor:
        """Returns the int64 positions in row-major [B · S] whose predicted token is in the mask. If the mask is None,
        returns all positions that predict a token."""
        is_scored_P = self.target_index_P >= 0
        if mask_T is not None:
            is_scored_P = is_scored_P & mask_T[self.target_index_P.clamp(min=0)]
        return is_scored_P.nonzero().squeeze(1)


def micro_batches(batch: Batch, plan: Plan, place: Place, *, use_sample_packing: bool) -> list[MicroBatch]:
    """Lays out all micro-batches of a call.

    With an interleaved schedule, which needs micro-batches of one shape, all are padded to the largest.
    """
    layouts = list(_layouts(batch, plan, place.mesh, use_sample_packing=use_sample_packing))
    if place.mesh.virtual_pipeline == 1:
        rows, width = 0, 0
    else:
        rows = max(_num_rows(layout, use_sample_packing) for _, layout in layouts)
        width = max(len(layout.index) // _num_rows(layout, use_sample_packing) for _, layout in layouts)
        layouts = list(_layouts(batch, plan, place.mesh, use_sample_packing=use_sample_packing, width=width))
    made = []
    for sequences, (part, layout) in zip(plan, layouts, strict=True):
        arrays = [layout.index, layout.target_index, layout.position]
        index_BS, target_index_BS, position_BS = (
            _own_part(array, layout, place, use_sample_packing=use_sample_packing, rows=rows) for array in arrays
        )
        made.append(
            MicroBatch(
                batch=part,
                sequences=tuple(sequences),
                tokens_BS=on_device(_tokens(part, index_BS), place.device),
                positions_BS=on_device(position_BS, place.device),
                segments=Segments.of(layout.boundaries, place.device) if use_sample_packing else None,
                index_P=index_BS.flatten(),
                target_index_P=target_index_BS.flatten(),
            )
        )
    return made


def _layouts(
    batch: Batch, plan: Plan, mesh: Mesh, *, use_sample_packing: bool, width: int = 1
) -> Iterator[tuple[Batch | None, Layout]]:
    for sequences in plan:
        part = batch.select(list(sequences)) if len(sequences) else None
        offsets = np.zeros(1, np.int64) if part is None else np.asarray(part.offsets)
        members = np.arange(len(sequences))
        if use_sample_packing:
            total = max(width, mesh.micro_batch_tokens_multiple())
            yield part, packed_layout(offsets, members, sequence_multiple=mesh.sequence_multiple, total_multiple=total)
        else:
            yield part, padded_layout(offsets, members, width_multiple=max(width, mesh.sequence_multiple))


def _num_rows(layout: Layout, use_sample_packing: bool) -> int:
    return 1 if use_sample_packing else len(layout.boundaries) - 1


def _own_part(array: np.ndarray, layout: Layout, place: Place, *, use_sample_packing: bool, rows: int) -> Tensor:
    """Returns this context rank's part, [B, S], filled up to `rows` rows with padding."""
    size, rank = place.mesh.context, place.coordinates.context
    array_BS = array.reshape(_num_rows(layout, use_sample_packing), -1)
    boundaries = layout.boundaries if use_sample_packing else layout.boundaries[:2]
    array_BS = array_BS[:, context_positions(boundaries, rank, size)]
    if len(array_BS) < rows:
        array_BS = np.pad(array_BS, ((0, rows - len(array_BS)), (0, 0)), constant_values=-1)
    return torch.from_numpy(np.ascontiguousarray(array_BS))


def _tokens(part: Batch | None, index_BS: Tensor) -> Tensor:
    if part is None:
        return torch.zeros_like(index_BS)
    return torch.where(index_BS >= 0, part["tokens"][index_BS.clamp(min=0)], 0)


def to_stream(values_S: Tensor, index_S: Tensor, num_tokens: int, group: dist.ProcessGroup) -> Tensor:
    """Returns [num_tokens]: the values of all context ranks at their indices, 0 elsewhere.

    Every rank of the group gets the whole tensor and computes the same loss from it. The backward pass therefore does
    not sum over ranks: each rank receives the gradient of its own values.
    """
    values_T = values_S.new_zeros(num_tokens).index_put((index_S,), values_S)
    return values_T if group.size() == 1 else _SumOverRanks.apply(values_T, group)  # pyright: ignore[reportReturnType]


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: object, values_T: Tensor, group: dist.ProcessGroup) -> Tensor:
        summed_T = values_T.clone()
        dist.all_reduce(summed_T, group=group)
        return summed_T

    @staticmethod
    # torch's own signature says `*grad_outputs`.
    def backward(_ctx: object, *grad_outputs: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_outputs[0], None
