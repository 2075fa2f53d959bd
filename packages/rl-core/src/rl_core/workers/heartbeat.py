"""Decides whether a rank that has not returned is still working. The resource use of its process distinguishes a long
computation from a dead rank.

While a rank computes, a second thread of its process answers the controller's requests for its resource use (a
`Pulse`). If the process is stopped or native code holds the GIL, no answer comes. Then an observer process on the
rank's node reads the resource use. CPU time, bytes read or written, and a thread in disk wait count as work.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import attrs

_BUSY = 0.05
"""CPU seconds per second above which a process counts as working. Ray's own threads use less in a waiting rank
(`tests/ray/test_failures.py`)."""
_BYTES_PER_S = 100_000
"""Bytes read and written per second above which a process counts as working. Ray's own messages cause fewer."""
_TICKS_PER_S = 100.0
"""Clock ticks per second in /proc/*/stat: 100 on Linux for x86-64 and aarch64."""


@attrs.frozen(kw_only=True)
class Pulse:
    """Resources that a process has used so far."""

    at_s: float
    """Time of the reading, on the reader's clock."""
    cpu_s: float
    """CPU time of all its threads."""
    num_bytes: int = 0
    """Bytes read and written."""
    waits_for_disk: bool = False
    """Whether a thread is in uninterruptible sleep."""

    def shows_work_since(self, earlier: Pulse) -> bool:
        """Whether the process used more since `earlier` than a waiting process would."""
        seconds = max(self.at_s - earlier.at_s, 1e-3)
        has_computed = self.cpu_s - earlier.cpu_s > _BUSY * seconds
        return has_computed or self.waits_for_disk or self.num_bytes - earlier.num_bytes > _BYTES_PER_S * seconds


def pulse_of(pid: int) -> Pulse:
    """Reads the pulse of a process on this machine. The process need not cooperate.

    Raises:
        OSError: the pulse cannot be read. Outside Linux, a process can read only its own pulse.
    """
    if not sys.platform.startswith("linux"):
        if pid != os.getpid():
            raise OSError(f"the resource use of process {pid} cannot be read on {sys.platform}")
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
    """The fields of the stat file from the state onward. The process name before them may contain blanks and
    parentheses. For a thread that has ended, the only field is `ended`."""
    try:
        return (path / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        if path.parent.name != "task":
            raise
        return ["ended"]


class Heartbeats:
    """Decides from successive pulses which ranks of a call are dead.

    A rank that neither answers nor works for `silence_s` is frozen. A rank that answers may be waiting for others, so
    it counts as dead only if no rank of the call has worked for `silence_s`: a deadlock. Work shows only in the
    difference of two pulses, so a rank's first pulse always counts as work. Otherwise a working rank whose first pulse
    arrives only after `silence_s`, on a busy machine, would count as frozen.
    """

    def __init__(self, num_ranks: int, silence_s: float, now_s: float) -> None:
        self._silence_s = silence_s
        self._alive_at = [now_s] * num_ranks
        self._worked_at = [now_s] * num_ranks
        self._last: dict[int, Pulse] = {}

    def note(self, rank: int, pulse: Pulse | None, *, has_answered: bool, now_s: float) -> None:
        """Records the pulse of a rank at `now_s`; None: it could not be read."""
        last = self._last.get(rank)
        works = pulse is not None and (last is None or pulse.shows_work_since(last))
        if pulse is not None:
            self._last[rank] = pulse
        if works or has_answered:
            self._alive_at[rank] = now_s
        if works:
            self._worked_at[rank] = now_s

    def dead(self, now_s: float) -> Mapping[int, str]:
        """Returns the dead ranks, each with what is wrong with it. Empty while the call may still return."""
        limit = now_s - self._silence_s
        frozen = {
            rank: "its process neither answers nor works: it is stopped, or deadlocked in native code"
            for rank, alive_at in enumerate(self._alive_at)
            if alive_at <= limit
        }
        if not frozen and max(self._worked_at) <= limit:
            reason = "answers but does no work, like all other ranks: a deadlock"
            return dict.fromkeys(range(len(self._alive_at)), reason)
        return frozen
