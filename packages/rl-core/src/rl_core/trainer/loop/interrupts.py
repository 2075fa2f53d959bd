"""Handles SIGINT (Ctrl-C), SIGTERM and SIGHUP (a closed terminal): the first signal stops a run at a step boundary, a
later one ends it at once."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from rl_core.tasks import code_of

_Result = TypeVar("_Result")
logger = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Longest time, in seconds, that each engine, model and generator may take to close if the run is ended at once."""
_BOUNCE_S = 1.0
"""A second signal within this many seconds counts as the same key press."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Handles the signals of a process while it runs one coroutine.

    The handlers stay installed until the clean-up in `run` has ended, so a signal interrupts the clean-up only if it
    hangs. Python handles signals only in the main thread, so in other threads `run` installs no handlers.

    | the work                   | a signal                                                    |
    |----------------------------|-------------------------------------------------------------|
    | is not in a `stops` block  | cancels it                                                  |
    | is in a `stops` block      | the first calls `stop`; one at least 1 s later cancels it   |
    | was cancelled or has ended | does nothing, or after 10 s raises KeyboardInterrupt        |

    A shell may send SIGHUP several times when its terminal is closed, so a SIGHUP that is not the first signal does
    nothing. After a SIGHUP, output to a terminal is discarded. A process that ignores SIGHUP (`nohup`) continues to
    ignore it.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._stop: Callable[[], None] | None = None
        self._is_signalled = False
        self._asked_at: float | None = None
        self._ended_at: float | None = None
        self._is_cancelled = False

    def run(self, work: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        """Runs `work()` in a new event loop and returns its result.

        Raises:
            KeyboardInterrupt: a signal cancelled the work, and its clean-up is complete; or a signal interrupted a
                clean-up that took more than 10 s.
            ForeignCodeError: code that the work calls raised SystemExit, CancelledError or similar.
            RuntimeError: this thread already has a running event loop.
        """
        _require_no_loop()

        async def main() -> _Result:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            _wake_by_signals(self._loop)
            try:
                return await work()
            finally:
                self._task = None
                self._ended_at = self._ended_at or time.monotonic()

        with _handling(self._received), code_of("code that the run calls"):
            try:
                return _run(main())
            except asyncio.CancelledError:
                if self._is_cancelled:
                    raise KeyboardInterrupt from None
                raise

    @contextmanager
    def stops(self, stop: Callable[[], None]) -> Iterator[None]:
        """Context in which the first signal calls `stop`, in the event loop."""
        self._stop = stop
        try:
            yield
        finally:
            self._stop = None

    def _received(self, number: int, _: object) -> None:
        """The signal handler. It may run between any two instructions, so it defers the reaction to the event loop."""
        if number == signal.SIGHUP:
            _discard_output_to_terminal()
            if self._is_signalled or self._ended_at is not None:
                return
        self._is_signalled = True  # noted here, because the event loop may be blocked until after the next signal
        now = time.monotonic()
        if self._loop is None or (self._ended_at is not None and now - self._ended_at > 2 * CLOSE_S):
            raise KeyboardInterrupt
        if self._ended_at is None:
            self._loop.call_soon_threadsafe(self._answer, now)

    def _answer(self, now: float) -> None:
        if self._task is None or self._ended_at is not None:
            return
        if self._stop is not None and self._asked_at is None:
            self._asked_at = now
            logger.warning(
                "stopping at the next step boundary, with a checkpoint if a step was trained; press Ctrl-C again to "
                "stop at once"
            )
            self._stop()
        elif self._asked_at is None or now - self._asked_at >= _BOUNCE_S:
            self._ended_at, self._is_cancelled = now, True
            self._task.cancel()


def _run(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Runs `work` like `asyncio.run`, but continues the event loop after a SystemExit in another task. The task that
    awaits the failed one gets the exception. `asyncio.run` would leave the event loop at once."""
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        task = loop.create_task(work)
        while True:
            try:
                return loop.run_until_complete(task)
            except SystemExit as error:
                if task.done():
                    raise
                logger.warning("code that the run calls raised %r in a separate task", error)


@contextmanager
def _handling(handler: Callable[..., None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in _handled()}
    try:
        yield
    finally:
        for number, earlier in before.items():
            # None: the handler was not installed from Python and cannot be restored.
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)


def _handled() -> list[signal.Signals]:
    ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in _SIGNALS if number != signal.SIGHUP or not ignores_hangup]


def _discard_output_to_terminal() -> None:
    """Sends standard output and standard error to /dev/null if they are a terminal, because writing to a closed
    terminal raises an error. SIGHUP may arrive shortly before the terminal is closed."""
    for descriptor in (1, 2):
        with suppress(OSError):  # the descriptor itself may be closed
            # `os.isatty` is false for a closed terminal, which is still a character device.
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, descriptor)
                os.close(null)


def _wake_by_signals(loop: asyncio.AbstractEventLoop) -> None:
    """Makes every signal wake the waiting event loop. The kernel may deliver a signal to any thread, but the
    Python handler runs only when the main thread next executes."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in _handled():
        handler = signal.getsignal(number)
        loop.add_signal_handler(number, lambda: None)  # from now on, signal numbers are written to the loop's pipe
        signal.signal(number, handler)


def _require_no_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        "an event loop is running in this thread, as in a notebook; start the run in another thread: "
        "await asyncio.to_thread(run_training, config)"
    )
