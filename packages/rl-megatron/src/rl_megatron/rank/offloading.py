"""Offloads tensors to CPU memory: frees their storage on the accelerator and keeps the tensor objects."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostCopy:
    """Keeps copies of tensors in CPU memory while their device memory is released. After `bring_back`, every view of
    the tensors is valid again."""

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor | None]] = []

    @property
    def is_out(self) -> bool:
        """Whether the device memory is released."""
        return bool(self._copies)

    def take_out(self, kept: Iterable[Tensor], dropped: Iterable[Tensor] = ()) -> None:
        """Copies the storage of `kept` to the CPU and releases it; releases the storage of `dropped` without a copy."""
        seen: set[int] = set()
        for tensors, is_kept in ((kept, True), (dropped, False)):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if storage.size() == 0 or storage.data_ptr() in seen:
                    continue
                seen.add(storage.data_ptr())
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                self._copies.append((whole, whole.to("cpu", copy=True) if is_kept else None))
        for whole, _ in self._copies:
            whole.untyped_storage().resize_(0)

    def bring_back(self) -> None:
        """Allocates the storage again: `kept` tensors get their values back, and `dropped` tensors become zero."""
        for whole, copy in self._copies:
            whole.untyped_storage().resize_(whole.numel())
            if copy is None:
                whole.zero_()
            else:
                whole.copy_(copy)
        self._copies.clear()
