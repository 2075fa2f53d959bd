"""A contiguous run of a tensor's elements, as torch's distributed format writes and reads it.

What ZeRO gives a rank of a parameter is no rectangle of rows and columns but so many elements from some place on. In
a state such a tensor is flat, and each rank's piece is a chunk of it, so any number of ranks with pieces of any size
reads what others wrote.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager


class FlatPiece(Tensor):
    """Elements [start, start + len) of a whole of `num_elements`; shares its memory with the tensor it was made of."""

    start: int
    num_elements: int

    @classmethod
    def of(cls, elements: Tensor, *, start: int, num_elements: int) -> FlatPiece:
        """A piece, which may be empty.

        Args:
            elements: one axis.
            start: of the first one in the whole.
            num_elements: of the whole.
        """
        piece = elements.detach().as_subclass(cls)
        piece.start, piece.num_elements = start, num_elements
        return piece

    def size(self, dim: int | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Of the whole, as a DTensor's: what is compared with the size that was saved."""
        return torch.Size([self.num_elements]) if dim is None else self.num_elements

    def copied(self) -> FlatPiece:
        """The same in CPU memory of its own."""
        return FlatPiece.of(self._plain().to("cpu", copy=True), start=self.start, num_elements=self.num_elements)

    def _plain(self) -> Tensor:
        return self.as_subclass(Tensor)

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size([self.start]), sizes=torch.Size([self.numel()]))

    def __create_write_items__(self, fqn: str, piece: Any) -> list[WriteItem]:
        if not self.numel():
            return []
        data = TensorWriteData(
            chunk=self._chunk(),
            properties=TensorProperties.create_from_tensor(self._plain()),
            size=torch.Size([self.num_elements]),
        )
        index = MetadataIndex(fqn, torch.Size([self.start]))
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()] if self.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self._plain()


class PieceStager(AsyncStager):
    """torch's `AsyncStager` for a state of pieces: copies them."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The copy that is written."""
        return {name: piece.copied() for name, piece in state_dict.items()}

    def synchronize_staging(self) -> None:
        """Copies are there when `stage` returns."""

    def close(self) -> None:
        """Holds nothing."""


def whole_shape(tensor: Tensor) -> torch.Size:
    """Of the tensor that a state holds."""
    return torch.Size([tensor.num_elements]) if isinstance(tensor, FlatPiece) else tensor.shape
