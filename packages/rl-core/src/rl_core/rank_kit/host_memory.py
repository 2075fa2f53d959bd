"""Host memory for received weights and for copies of sent weights."""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
_LEAST_BYTES = 1 << 22


def fresh_memory(num_bytes: int) -> Tensor:
    """Returns new memory, uint8 [num_bytes]. On Linux, 4 MiB or more are mapped separately, with huge pages if they are
    available, and unmapped when the tensor is freed. With 4 KiB pages, page faults make receiving a tensor three times
    as expensive as copying it."""
    import torch

    if num_bytes < _LEAST_BYTES or _HUGE is None:
        return torch.empty(num_bytes, dtype=torch.uint8)
    mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel has no huge pages
        mapped.madvise(_HUGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)
