"""A program that ends a run whose interpreter is held by a thread. It runs as a process of its own, outside the run.

A thread that never leaves a C function without releasing the interpreter lock (a regular expression that backtracks for
days) stops all threads of its process: deadlines, Ctrl-C and checkpoints. Only another process can see and end this.

consumes     lines of the run on standard input: `1` while code of environments runs in threads, else `0`, and the
             longest wait; and, on the file descriptor that the run names, what faulthandler writes at a signal
produces     an error message on standard error, and the end of the run
waits for    a line, at least every second
unblocked by the end of the run, which closes standard input
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import time
from pathlib import Path

_AFTER_SIGNAL_S = 10.0
"""Longest wait for a sign of life after a signal such as Ctrl-C."""
_DUMP_S = 0.5
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_ENVIRONMENT_CODE = ("rl_rollout/environment_threads.py", "rl_rollout/environment_process.py")
_OWN = ("/rl_rollout/", "/rl_core/")


def place_in(dump: str) -> str:
    """Returns the functions in which environments run, from faulthandler's stacks of all threads: of each stack, the
    innermost function outside libraries, as `reward (my_rewards.py:5)`. Empty if there is none."""
    library = str(Path(os.__file__).parent)
    found = []
    for thread in re.split(r"^(?:Current t|T)hread 0x", dump, flags=re.MULTILINE):
        frames = _FRAME.findall(thread)
        if not any(file.endswith(_ENVIRONMENT_CODE) for file, _, _ in frames):
            continue
        others = [one for one in frames if not any(own in one[0] for own in _OWN) and not one[0].startswith("<")]
        users = [one for one in others if "site-packages" not in one[0] and not one[0].startswith(library)]
        installed = [one for one in others if "site-packages" in one[0]]
        for file, line, function in [*users, *installed][:1]:
            found.append(f"{function} ({file}:{line})")
    return ", ".join(dict.fromkeys(found))


class _Watch:
    def __init__(self, run: int, dumps: int) -> None:
        self._run, self._dumps = run, dumps
        self._is_active, self._limit_s = False, 0.0
        self._silent_s = 0.0
        self._since_signal_s: float | None = None
        self._dump = b""

    def watch(self) -> None:
        """Returns when the run has ended."""
        before = time.monotonic()
        while os.getppid() == self._run:
            ready, _, _ = select.select([0, self._dumps], [], [], 0.5)
            now = time.monotonic()
            # At most 1 s counts: this process may itself have been stopped, or have got no processor.
            passed, before = min(now - before, 1.0), now
            if 0 in ready and not self._heard(os.read(0, 65536)):
                return
            if self._dumps in ready:
                self._dump += os.read(self._dumps, 65536)
                self._since_signal_s = self._since_signal_s or 0.0
            if self._is_active and not self._is_stopped():
                self._silent_s += passed
                if self._since_signal_s is not None:
                    self._since_signal_s += passed
                self._judge()

    def _heard(self, lines: bytes) -> bool:
        if lines:
            active, limit = lines.split(b"\n")[-2].split()
            self._is_active, self._limit_s = active == b"1", float(limit)
            self._silent_s, self._since_signal_s, self._dump = 0.0, None, b""
        return bool(lines)

    def _judge(self) -> None:
        if self._since_signal_s is not None and self._since_signal_s > _AFTER_SIGNAL_S:
            self._end(f"did not react to a signal for {_AFTER_SIGNAL_S:g} s")
        elif self._silent_s > self._limit_s:
            self._end(f"has been held for {self._silent_s:.0f} s")

    def _end(self, what: str) -> None:
        if not self._dump:
            os.kill(self._run, signal.SIGINT)  # at which faulthandler writes the stacks
            until = time.monotonic() + _DUMP_S
            while select.select([self._dumps], [], [], max(0.0, until - time.monotonic()))[0]:
                self._dump += os.read(self._dumps, 65536)
        os.kill(self._run, signal.SIGKILL)
        place = place_in(self._dump.decode(errors="replace")) or "unknown"
        print(
            f"error: the interpreter {what}, by code of an environment that runs in a thread: {place}. Nothing else in "
            "the run could go on, not even deadlines or Ctrl-C, so the run was killed. Mend the function, or set "
            "environment.placement=process, where such a call misses environment.timeout_s and only its sample fails. "
            "The same command continues from the last checkpoint, if there is one",
            file=sys.stderr,
            flush=True,
        )

    def _is_stopped(self) -> bool:
        """Whether the run was stopped, as by Ctrl-Z or a debugger."""
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{self._run}/stat").read_text().rpartition(")")[2].split()[0]
            return state in ("T", "t")
        return False


if __name__ == "__main__":
    for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(_number, signal.SIG_IGN)
    _Watch(int(sys.argv[1]), int(sys.argv[2])).watch()
