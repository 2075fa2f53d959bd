"""Coroutines that run together: all end before their caller goes on; the time in which none does; and what is made of
errors of others that would end them without a word."""

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
    """Their results, in order. The first error ends the others and is raised as itself.

    `asyncio.gather` would return at the first error or cancellation, while the others are still at work.
    """
    try:
        async with asyncio.TaskGroup() as together:
            tasks = [together.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
    return [task.result() for task in tasks]


def first_error(group: BaseExceptionGroup) -> BaseException:
    """The first leaf of a task group's errors: the one that ended the others."""
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error


class OwnThread(Generic[T]):
    """A function in a thread of its own, which may never return: unlike an executor's, the thread does not keep the
    process from ending."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._future: Future[T] = Future()
        self._future.set_running_or_notify_cancel()
        threading.Thread(target=self._run, args=(function,), daemon=True).start()

    def _run(self, function: Callable[[], T]) -> None:
        try:
            self._future.set_result(function())
        except BaseException as error:
            self._future.set_exception(error)

    @property
    def is_done(self) -> bool:
        """It returned or raised."""
        return self._future.done()

    async def within(self, timeout_s: float) -> T:
        """What it returns. Raises TimeoutError where it has not returned in time; it goes on."""
        waiting = asyncio.wrap_future(self._future)
        done, _ = await asyncio.wait({waiting}, timeout=timeout_s)
        if not done:
            raise TimeoutError
        return waiting.result()


@contextmanager
def code_of(whose: str) -> Iterator[None]:
    """Around code of others. What it raises that is no Exception would end a task, or the run, as if that was meant: it
    becomes a ForeignCodeError. KeyboardInterrupt and the cancellation of this task stay what they are."""
    task = current_task()
    try:
        yield
    except BaseException as error:
        if not is_foreign(error, task):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ForeignCodeError(
            f"{whose} raised {error!r} ({Path(frame.filename).name}:{frame.lineno}); code that fails must raise an "
            "Exception instead"
        ) from error


def is_foreign(error: BaseException, task: asyncio.Task[Any] | None) -> bool:
    """What was raised in the task, or outside of any, is neither an Exception nor asked for from outside."""
    if isinstance(error, asyncio.CancelledError):
        return task is None or not task.cancelling()
    # A coroutine that is thrown away gets a GeneratorExit too, while no task or another one runs.
    if isinstance(error, GeneratorExit):
        return task is not None and current_task() is task
    return not isinstance(error, (Exception, KeyboardInterrupt))


def current_task() -> asyncio.Task[Any] | None:
    """None also where no event loop runs."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


class IdleTime:
    """Seconds in which nothing of a kind was under way."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._num_busy = 0
        self._idle_since = clock()
        self._seconds = 0.0

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The block is under way; blocks may overlap."""
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
        """Idle seconds since the last lap."""
        if self._num_busy == 0:
            now = self._clock()
            self._seconds, self._idle_since = self._seconds + now - self._idle_since, now
        seconds, self._seconds = self._seconds, 0.0
        return seconds
