"""Watches, from another process, that threads of environments do not hold the interpreter (`held_interpreter`)."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

from rl_rollout import held_interpreter

_BEAT_S = 1.0
GRACE_S = 30.0
"""Seconds beyond the deadline of a call for which the interpreter may be held. Code that holds it for some seconds on
purpose, such as reading a large file, must not end a run."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterpreterWatch:
    """The watch of this process. Its watching process starts with the first call of an environment in a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[int, float] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._stacks = -1

    @contextlib.contextmanager
    def calling(self, timeout_s: float) -> Iterator[None]:
        """Context of a call that may take `timeout_s`. While it is open, the run is ended if no thread gets the
        interpreter for `timeout_s` and another `GRACE_S`, or for 10 s after a signal."""
        call = object()
        with self._lock:
            self._calls[id(call)] = timeout_s
            if len(self._calls) == 1:
                self._begin()
        try:
            yield
        finally:
            with self._lock:
                del self._calls[id(call)]
                if not self._calls:
                    self._end()

    def _begin(self) -> None:
        if self._process is None or self._process.poll() is not None:
            reading, self._stacks = os.pipe()
            os.set_blocking(self._stacks, False)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", held_interpreter.__file__, str(os.getpid()), str(reading)],
                stdin=subprocess.PIPE,
                pass_fds=[reading],
            )
            os.close(reading)
            atexit.register(_closed, self._process)
            threading.Thread(target=self._beat_always, args=(self._process,), name="beat", daemon=True).start()
        self._beat()
        for number in _SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
                # C code, so it works while the interpreter is held; then Python's own handler follows.
                faulthandler.register(number, file=self._stacks, all_threads=True, chain=True)

    def _end(self) -> None:
        for number in _SIGNALS:
            faulthandler.unregister(number)
        self._beat()

    def _beat(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        limit_s = max(self._calls.values(), default=0.0) + GRACE_S
        with contextlib.suppress(OSError):  # the watching process was killed
            os.write(self._process.stdin.fileno(), f"{int(bool(self._calls))} {limit_s}\n".encode())

    def _beat_always(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None:
            with self._lock:
                self._beat()
            threading.Event().wait(_BEAT_S)


def _closed(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=2.0)


WATCH = InterpreterWatch()
