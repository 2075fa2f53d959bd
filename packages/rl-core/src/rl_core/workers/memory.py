"""How a process that computes on a CPU keeps its memory."""

from __future__ import annotations

import ctypes
import os

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Parameters of mallopt, from glibc's malloc.h."""
_LARGE = 1 << 30
_OF_THE_USER = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Has glibc keep what is freed, for this process, in place of giving it back to the kernel at once; called before
    the thread is started that computes.

    By default a large tensor is mapped anew each time and every page of it is zeroed by a page fault: 17,000 to 28,000
    of them in a step of the quick start, 0 to 560 with this, at the same peak memory. Threads share one arena: that of
    a thread of its own never holds more than 64 MiB in one piece, and larger tensors would be mapped again. Transparent
    huge pages (THP_MEM_ALLOC_ENABLE=1) left 6,000 to 10,000, and added nothing to this but a fifth of the memory.

    Left alone: another allocator or C library, what the environment sets by glibc's own variables, and processes with
    an accelerator, whose tensors are elsewhere.
    """
    if torch.accelerator.is_available() or not _is_glibc():
        return
    if any(name in os.environ for name in _OF_THE_USER):
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_THRESHOLD, _LARGE)
    mallopt(_M_TRIM_THRESHOLD, _LARGE)
    mallopt(_M_ARENA_MAX, 1)


def _is_glibc() -> bool:
    names = getattr(os, "confstr_names", {})
    return "CS_GNU_LIBC_VERSION" in names and (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
