"""Runs a program's tests, one after another, each in its own confined process. Before it reports a test's outcome, it
ends all processes that the test started.

consumes     a message about the program, then one per test (stdin)
produces     one message per outcome (stdout)
waits for    the test's process, at most `wall_s`; the next test (no deadline)
unblocked by the end of stdin, which also occurs if the writer is killed

With bubblewrap, the supervisor is process 1 of its namespace, so no process in the namespace can end it. With Landlock,
it stays root, so the slot's user cannot end it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import time
import traceback
from typing import Any

from rl_environments.sandbox.inside import confinement, frames, program
from rl_environments.sandbox.inside.ending import end_all
from rl_environments.sandbox.inside.processes import descendants_of, memory_of
from rl_environments.sandbox.inside.work import empty_work, prepare_work

_TICK_S = 0.02
_WATCHED_SHARE = 10
"""The supervisor spends at most a tenth of its time on checks, however many processes the machine has."""
_PIECE = 1 << 16
_CONFINEMENT_FAILED = 70
_RECORD_FD = 3
_RECORD_BYTES = 128
"""More than the bytes of a record's token and keys, which do not count as output."""
_MOST_FILES = 1 << 20
"""Above every file descriptor that the supervisor has open, so that one system call can close all of them."""


def main() -> None:
    """Runs one test per message until stdin ends. If the first message has `clear`, only ends the processes that an
    earlier supervisor has left."""
    box = frames.receive(0)
    if box is None:
        return
    _prepare(box)
    try:
        frames.send(1, {"ready": True, "work": box["work"]})
        while not box.get("clear"):
            test = frames.receive(0)
            if test is None:
                break
            frames.send(1, _outcome(box, test))
    except BrokenPipeError:
        pass
    finally:
        end_all(box)


def _prepare(box: dict[str, Any]) -> None:
    """Makes this process adopt all later orphans, and ends the processes that an earlier supervisor of this slot may
    have left."""
    # Process 1 receives from its namespace only signals that it handles. Python handles SIGINT by default, so
    # ignore it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    confinement.adopt_orphans()
    confinement.hide_memory()
    end_all(box)
    prepare_work(box)
    # Exclude all existing objects from garbage collection, so that children continue to share their memory pages.
    gc.collect()
    gc.freeze()


def _outcome(box: dict[str, Any], test: dict[str, Any]) -> dict[str, Any]:
    try:
        empty_work(box)
    except (OSError, RecursionError) as error:
        # For example, directories may be nested too deep to be removed. The program made them, so the program fails.
        blame = {"stdout": "", "stderr": f"files of an earlier test cannot be removed: {error!r:.200}", "record": ""}
        return {"end": "disk_limit", "status": None, "cpu_s": 0.0, "wall_s": 0.0, **blame}
    return _TestRun(box, test).played()


class _TestRun:
    """Runs one test: starts its process, serves its pipes, and enforces the limits that the kernel does not enforce."""

    def __init__(self, box: dict[str, Any], test: dict[str, Any]) -> None:
        self._box, self._limits = box, box["limits"]
        self._end: str | None = None
        self._status: int | None = None
        self._cpu_s = 0.0
        self._seen: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray(), "record": bytearray()}
        self._stdin = memoryview(test["stdin"].encode("utf-8", "surrogatepass"))
        self._selector = selectors.DefaultSelector()
        self._started = time.monotonic()
        self._pid, pipes = _started(box, test)
        self._stdin_fd = pipes.pop("stdin")
        for name, fd in pipes.items():
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, name)
        os.set_blocking(self._stdin_fd, False)
        self._selector.register(self._stdin_fd, selectors.EVENT_WRITE, "stdin")
        # Before Python 3.9 or Linux 5.3, the process's end is noticed only at the next check.
        with contextlib.suppress(AttributeError, OSError):
            self._selector.register(os.pidfd_open(self._pid), selectors.EVENT_READ, "process")
        # No message arrives while a test runs, so stdin becomes readable only when the writer closes it.
        self._selector.register(0, selectors.EVENT_READ, "user")

    def played(self) -> dict[str, Any]:
        """Waits for the test's end and returns its outcome."""
        try:
            self._watch()
        finally:
            wall_s = time.monotonic() - self._started
            self._note(end_all(self._box, self._pid))
            self._selector.unregister(0)
            self._drain()
        return {
            "end": self._end,
            "status": self._status,
            "cpu_s": self._cpu_s,
            "wall_s": wall_s,
            **{name: bytes(seen).decode("utf-8", "replace") for name, seen in self._seen.items()},
        }

    def _watch(self) -> None:
        next_look = time.monotonic() + _TICK_S
        while self._status is None and self._end is None:
            now = time.monotonic()
            if now >= next_look:
                self._look(now)
                next_look = time.monotonic() + max(_TICK_S, _WATCHED_SHARE * (time.monotonic() - now))
            for key, _ in self._selector.select(max(0.0, next_look - time.monotonic())):
                self._serve(key.fd, key.data)
            self._note(_reaped(self._pid))

    def _look(self, now: float) -> None:
        """Checks the limits that the kernel does not enforce."""
        if now - self._started > self._limits["wall_s"]:
            self._end = "wall_limit"
        elif memory_of(descendants_of(os.getpid()), self._limits["memory_bytes"]) > self._limits["memory_bytes"]:
            self._end = "memory_limit"
        elif self._box["work"] and self._box["mechanism"] == "bubblewrap":
            disk = os.statvfs(self._box["work"])
            if disk.f_files - disk.f_ffree > self._limits["files"] + 1:
                self._end = "disk_limit"

    def _serve(self, fd: int, name: str) -> None:
        if name == "user":
            self._end = "abandoned"
        elif name == "stdin":
            self._feed(fd)
        elif name == "process":
            self._close(fd)
        else:
            self._take(fd, name)

    def _feed(self, fd: int) -> None:
        try:
            self._stdin = self._stdin[os.write(fd, self._stdin[:_PIECE]) :] if self._stdin else self._stdin
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._stdin = self._stdin[:0]
        if not self._stdin:
            self._close(fd)

    def _take(self, fd: int, name: str) -> bool:
        """Reads once from a pipe; returns whether it held any data."""
        try:
            piece = os.read(fd, _PIECE)
        except BlockingIOError:
            return False
        seen, most = self._seen[name], self._limits["output_bytes"] + (_RECORD_BYTES if name == "record" else 0)
        if len(seen) + len(piece) > most:
            self._end = self._end or "output_limit"
        seen += piece[: most - len(seen)]
        if not piece:
            self._close(fd)
        return bool(piece)

    def _drain(self) -> None:
        """Reads the rest of the pipes; all writers have ended."""
        for key in list(self._selector.get_map().values()):
            while key.data in self._seen and self._take(key.fd, key.data):
                pass
        for key in list(self._selector.get_map().values()):
            self._close(key.fd)
        self._selector.close()

    def _close(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)

    def _note(self, reaped: tuple[int, float] | None) -> None:
        if reaped is None or self._status is not None:
            return
        self._status, self._cpu_s = reaped
        if self._end is None and os.WIFSIGNALED(self._status):
            ended_by = os.WTERMSIG(self._status)
            is_over = ended_by == signal.SIGKILL and self._cpu_s >= self._limits["cpu_s"]
            self._end = "cpu_limit" if ended_by == signal.SIGXCPU or is_over else None


def _started(box: dict[str, Any], test: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """Starts a process that runs the test; returns its pid, and the supervisor's ends of its pipes."""
    if test["has_imports"]:
        program.imported()  # so that each test finds the modules loaded, which takes about 50 ms
    stdin, stdout, stderr, record = (os.pipe() for _ in range(4))
    pid = os.fork()
    if pid == 0:
        _become_test(box, test, (stdin[0], stdout[1], stderr[1], record[1]))
    for fd in (stdin[0], stdout[1], stderr[1], record[1]):
        os.close(fd)
    return pid, {"stdin": stdin[1], "stdout": stdout[0], "stderr": stderr[0], "record": record[0]}


def _become_test(box: dict[str, Any], test: dict[str, Any], ends: tuple[int, ...]) -> None:
    """Confines the forked child and runs the test in it; does not return."""
    code = _CONFINEMENT_FAILED
    try:
        # Duplicated above their final numbers, so that none is overwritten before it is moved.
        moved = [os.dup(fd) for fd in ends]
        for number, fd in enumerate(moved):
            os.dup2(fd, number)
        os.closerange(_RECORD_FD + 1, _MOST_FILES)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        os.chdir(box["work"] or "/")
        try:
            confinement.confine(box)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            os.write(_RECORD_FD, b'{"token": "%s", "end": "broken"}' % box["token"].encode())
            return
        os.environ["HOME"] = os.environ["TMPDIR"] = box["work"] or "/"
        code = program.run(box["program"], test, _RECORD_FD, box["token"])
    finally:
        os._exit(code & 0xFF)


def _reaped(pid: int) -> tuple[int, float] | None:
    """Returns the status and CPU time of a child that has ended; None while it runs."""
    ended, status, usage = os.wait4(pid, os.WNOHANG)
    return (status, usage.ru_utime + usage.ru_stime) if ended else None
