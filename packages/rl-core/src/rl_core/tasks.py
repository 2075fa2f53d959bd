"""Runs coroutines concurrently until all have ended, runs functions that may never return, converts errors of foreign
code that would end a task silently, and measures idle time."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from rl_core.errors import ForeignCodeError

T = TypeVar("T")


async def all_of(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs coroutines concurrently and returns their results in order. The first error cancels the other coroutines;
    once they have ended, it is raised unchanged.

    `asyncio.gather` would raise the first error or cancellation while the other coroutines are still running.
    """
    try:
        async with asyncio.TaskGroup() as together:
            tasks = [together.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
    return [task.result() for task in tasks]


def first_error(group: BaseExceptionGroup) -> BaseException:
    """Returns the error that cancelled the other tasks: the first error of a task group, whose errors may be nested."""
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error


class OwnThread(Generic[T]):
    """Runs a function that may never return in a daemon thread. Unlike an executor's thread, a daemon thread does not
    prevent the process from exiting."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._future: Future[T] = Future()
        # A future that is marked as running cannot be cancelled. After a cancellation, `set_result` would raise.
        self._future.set_running_or_notify_cancel()
        threading.Thread(target=self._run, args=(function,), daemon=True).start()

    def _run(self, function: Callable[[], T]) -> None:
        try:
            self._future.set_result(function())
        except BaseException as error:
            self._future.set_exception(error)

    @property
    def is_done(self) -> bool:
        """Whether the function has returned or raised."""
        return self._future.done()

    async def within(self, timeout_s: float) -> T:
        """Returns the function's result or raises its error. Raises TimeoutError if the function has not returned in
        time; it then continues to run."""
        waiting = asyncio.wrap_future(self._future)
        try:
            done, _ = await asyncio.wait({waiting}, timeout=timeout_s)
        finally:
            waiting.cancel()  # no effect if done; otherwise asyncio would log an error that the function raises later
        if not done:
            raise TimeoutError
        return waiting.result()


@contextmanager
def code_of(whose: str) -> Iterator[None]:
    """Context for calling foreign code. Converts a BaseException that is not an Exception, such as SystemExit, into a
    ForeignCodeError, because it would end a task or the run as if on purpose. KeyboardInterrupt and cancellation of
    this task are not converted."""
    task = current_task()
    try:
        yield
    except BaseException as error:
        if not is_foreign(error, task):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        # Trackers may wrap `sys.exit` (wandb's ExitHooks); name the frame that called the wrapper.
        frame = next((frame for frame in reversed(frames) if frame.name != "exit"), frames[-1])
        raise ForeignCodeError(
            f"{whose} raised {error!r} ({Path(frame.filename).name}:{frame.lineno}); code that fails must raise an "
            "Exception instead"
        ) from error


def is_foreign(error: BaseException, task: asyncio.Task[Any] | None) -> bool:
    """Whether the error is not an Exception, but was raised by the task's own code. False if its cause is outside the
    task: Ctrl-C, or code that cancels or discards the task.

    Args:
        task: the task in which the error was raised; None: it was raised outside any task.
    """
    if isinstance(error, asyncio.CancelledError):
        return task is None or not task.cancelling()
    # A coroutine that is discarded gets a GeneratorExit, too; at that time its own task is not the current one.
    if isinstance(error, GeneratorExit):
        return task is not None and current_task() is task
    return not isinstance(error, (Exception, KeyboardInterrupt))


def current_task() -> asyncio.Task[Any] | None:
    """The current task; None outside a task or without a running event loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


class IdleTime:
    """Measures the seconds in which no block of `busy` was running."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._num_busy = 0
        self._idle_since = clock()
        self._seconds = 0.0

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Context whose duration counts as busy. Several contexts may overlap."""
        if self._num_busy == 0:
            self._seconds += self._clock() - self._idle_since
        self._num_busy += 1
        try:
            yield
        finally:
            self._num_busy -= 1
            if self._num_busy == 0:
                self._idle_since = self._clock()

    def lap(self) -> float:
        """Returns the idle seconds since the previous call of `lap` or, in the first call, since the object was
        created."""
        if self._num_busy == 0:
            now = self._clock()
            self._seconds, self._idle_since = self._seconds + now - self._idle_since, now
        seconds, self._seconds = self._seconds, 0.0
        return seconds
