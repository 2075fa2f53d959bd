"""Coroutines that run together: all end before their caller goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
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
