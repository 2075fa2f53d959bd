"""Finds a process's descendants and their memory use, from /proc."""

from __future__ import annotations

import os

_PAGE = os.sysconf("SC_PAGE_SIZE")


def descendants_of(pid: int) -> list[int]:
    """Returns the ids of all descendants of a process. A descendant whose parent has ended is found only if `pid` or
    another descendant has adopted it (`confinement.adopt_orphans`)."""
    numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    if pid == 1:  # every other process of a PID namespace descends from its process 1
        return [number for number in numbers if number != 1]
    parents = {number: parent for number in numbers if (parent := _parent(number)) is not None}
    below = {pid}
    # A child may have a lower pid than its parent, so one pass is not enough.
    while found := {number for number, parent in parents.items() if parent in below} - below:
        below |= found
    return sorted(below - {pid})


def memory_of(pids: list[int], bound: int) -> int:
    """Returns the resident bytes of these processes.

    First adds up their sizes, which is cheap but counts shared pages several times. If this sum is above `bound`,
    returns a sum that counts shared pages once.
    """
    resident = {pid: _resident(pid) for pid in pids}
    total = sum(resident.values())
    if total <= bound:
        return total
    return sum(_share(pid, bytes_) for pid, bytes_ in resident.items())


def _parent(pid: int) -> int | None:
    stat = _read(f"/proc/{pid}/stat")
    # The name, in brackets, may itself contain brackets and spaces.
    return int(stat[stat.rindex(b")") + 1 :].split()[1]) if stat else None


def _resident(pid: int) -> int:
    statm = _read(f"/proc/{pid}/statm")
    return int(statm.split()[1]) * _PAGE if statm else 0


def _share(pid: int, resident: int) -> int:
    """Returns the bytes of a process's private pages plus its share of the shared ones, or `resident` if its
    `smaps_rollup` cannot be read; 0 if the process has ended meanwhile."""
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return min(resident, _resident(pid))


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # the process has ended, or belongs to another user
        return b""
