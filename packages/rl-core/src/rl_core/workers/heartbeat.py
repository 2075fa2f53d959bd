"""Is a rank that does not return still working? What its process has used up tells a long computation from a dead one.

A rank answers from a thread beside the one that computes, unless its process is stopped, or native code holds the
interpreter's lock. So an observer on its node is asked as well. What counts as work: CPU time, bytes read or written, a
thread that waits for a disk.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import attrs

_BUSY = 0.05
"""CPU seconds per second: more than Ray's own threads use in a rank that waits (`tests/ray/test_failures.py`)."""
_BYTES_PER_S = 100_000
"""More than Ray's own messages."""
_TICKS_PER_S = 100.0
"""Unit of times in /proc/*/stat, on every Linux that Python supports."""


@attrs.frozen(kw_only=True)
class Pulse:
    """What a process has used up by now."""

    at_s: float
    """The reader's clock."""
    cpu_s: float
    """CPU time of all its threads."""
    num_bytes: int = 0
    """Read and written."""
    waits_for_disk: bool = False
    """A thread is in an uninterruptible wait."""

    def shows_work_since(self, earlier: Pulse) -> bool:
        """The process did more in between than a process does that waits."""
        seconds = max(self.at_s - earlier.at_s, 1e-3)
        has_computed = self.cpu_s - earlier.cpu_s > _BUSY * seconds
        return has_computed or self.waits_for_disk or self.num_bytes - earlier.num_bytes > _BYTES_PER_S * seconds


def pulse_of(pid: int) -> Pulse:
    """Of a process on this machine, which need not answer.

    Raises:
        OSError: it cannot be read; of another process than this one on other systems than Linux.
    """
    if not sys.platform.startswith("linux"):
        if pid != os.getpid():
            raise OSError(f"what process {pid} has used up cannot be read on {sys.platform}")
        return Pulse(at_s=time.monotonic(), cpu_s=time.process_time())
    root = Path(f"/proc/{pid}")
    counters = dict(line.split(": ") for line in (root / "io").read_text().splitlines())
    return Pulse(
        at_s=time.monotonic(),
        cpu_s=sum(map(int, _stat(root)[11:13])) / _TICKS_PER_S,
        num_bytes=int(counters["rchar"]) + int(counters["wchar"]),
        waits_for_disk=any(_stat(task)[0] == "D" for task in (root / "task").iterdir()),
    )


def _stat(path: Path) -> list[str]:
    """The fields from the state on; the name before it may hold blanks and brackets."""
    try:
        return (path / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        if path.parent.name != "task":
            raise
        return ["ended"]


class Heartbeats:
    """Which ranks of a call are dead, judged from pulse after pulse.

    A rank is frozen that neither answers nor works for `silence_s`. One that answers may wait for others, so ranks that
    answer are dead only where none of the call has worked for so long: a deadlock. Work shows only between two pulses,
    so the time before a rank's first one does not count: a busy machine may take longer than `silence_s` to read it.
    """

    def __init__(self, num_ranks: int, silence_s: float, now_s: float) -> None:
        self._silence_s = silence_s
        self._alive_at = [now_s] * num_ranks
        self._worked_at = [now_s] * num_ranks
        self._last: dict[int, Pulse] = {}

    def note(self, rank: int, pulse: Pulse | None, *, has_answered: bool, now_s: float) -> None:
        """What was seen of a rank at `now_s`; None: nobody can say."""
        last = self._last.get(rank)
        works = pulse is not None and (last is None or pulse.shows_work_since(last))
        if pulse is not None:
            self._last[rank] = pulse
        if works or has_answered:
            self._alive_at[rank] = now_s
        if works:
            self._worked_at[rank] = now_s

    def dead(self, now_s: float) -> Mapping[int, str]:
        """Ranks, and what is wrong with each; empty while the call may still end."""
        limit = now_s - self._silence_s
        frozen = {
            rank: "its process neither answers nor works: it is stopped, or deadlocked in native code"
            for rank, alive_at in enumerate(self._alive_at)
            if alive_at <= limit
        }
        if not frozen and max(self._worked_at) <= limit:
            return dict.fromkeys(range(len(self._alive_at)), "waits, as all others do")
        return frozen
