"""Which processes stand below one, and how much memory they take, read from /proc."""

from __future__ import annotations

import os

_PAGE = os.sysconf("SC_PAGE_SIZE")


def children_below(pid: int) -> list[int]:
    """All processes that descend from one, itself left out. Orphans among them need a parent that adopts them."""
    numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    if pid == 1:
        return [number for number in numbers if number != 1]
    parents = {number: parent for number in numbers if (parent := _parent(number)) is not None}
    below = {pid}
    # A child may have a lower number than its parent, so one pass is not enough.
    while found := {number for number, parent in parents.items() if parent in below} - below:
        below |= found
    return sorted(below - {pid})


def memory_of(pids: list[int], bound: int) -> int:
    """Bytes in memory of these processes. Pages that they share are counted once where the sum of all, which costs
    far less to read, is above `bound`."""
    resident = {pid: _resident(pid) for pid in pids}
    total = sum(resident.values())
    if total <= bound:
        return total
    return sum(_share(pid, bytes_) for pid, bytes_ in resident.items())


def _parent(pid: int) -> int | None:
    stat = _read(f"/proc/{pid}/stat")
    # The name, in brackets, may have brackets and blanks itself.
    return int(stat[stat.rindex(b")") + 1 :].split()[1]) if stat else None


def _resident(pid: int) -> int:
    statm = _read(f"/proc/{pid}/statm")
    return int(statm.split()[1]) * _PAGE if statm else 0


def _share(pid: int, resident: int) -> int:
    """Its part of the pages that it shares, and all of its own; `resident` where it may not be read."""
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return resident


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # it has ended, or is another user's
        return b""
