"""Contiguous elements of a tensor, in the form in which `torch.distributed.checkpoint` writes and reads them.

ZeRO shards a parameter into contiguous ranges of elements, not into blocks of rows and columns. In a saved state such a
tensor is flat, and each rank's piece is one chunk, so states can be read with any number of ranks and pieces of any
size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager


class FlatPiece(Tensor):
    """Elements [start, start + len) of a flat tensor of `num_elements`. Shares memory with the tensor given to `of`."""

    start: int
    num_elements: int

    @classmethod
    def of(cls, elements: Tensor, *, start: int, num_elements: int) -> FlatPiece:
        """Creates a piece, which may be empty.

        Args:
            elements: 1-d tensor.
            start: index of the piece's first element in the whole tensor.
            num_elements: size of the whole tensor.
        """
        piece = elements.detach().as_subclass(cls)
        piece.start, piece.num_elements = start, num_elements
        return piece

    def size(self, dim: int | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The size of the whole tensor, like a DTensor's; torch compares it with the saved size."""
        return torch.Size([self.num_elements]) if dim is None else self.num_elements

    def copied(self) -> FlatPiece:
        """A copy in CPU memory."""
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
    """Copies a state of pieces to CPU memory before torch writes it in the background."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns the copy to write."""
        return {name: piece.copied() for name, piece in state_dict.items()}

    def synchronize_staging(self) -> None:
        """Does nothing: `stage` copies synchronously."""

    def close(self) -> None:
        """Does nothing: there are no resources to release."""


def whole_shape(tensor: Tensor) -> torch.Size:
    """The shape that a saved state records for `tensor`."""
    return torch.Size([tensor.num_elements]) if isinstance(tensor, FlatPiece) else tensor.shape
