"""Memory of the host that weights are received in."""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
_LEAST_BYTES = 1 << 22


def fresh_memory(num_bytes: int) -> Tensor:
    """uint8 [num_bytes] that nobody used before and that goes back to the system with the tensor: in huge pages where
    there are any, because what comes through 4 KiB pages costs three times as much to receive as to copy."""
    import torch

    if num_bytes < _LEAST_BYTES or _HUGE is None:
        return torch.empty(num_bytes, dtype=torch.uint8)
    mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        mapped.madvise(_HUGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)
