"""Coroutines that run together: all end before their caller goes on; and the time in which none does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

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
