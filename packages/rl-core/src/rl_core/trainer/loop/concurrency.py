"""Runs a coroutine while a block runs, or until a stop is requested. The functions leave no task behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from rl_core.tasks import code_of

_Result = TypeVar("_Result")


@contextlib.asynccontextmanager
async def alongside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Context during which `work` runs as a separate task. At the end, cancels the task and waits for it; an error of
    `work` is raised there."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        try:
            # `await task` would raise CancelledError even if only `work` was cancelled and not this task.
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise
        if not task.cancelled():
            task.result()


async def unless_set(stop: asyncio.Event, work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """Runs `work` and returns its result. If `stop` is set before `work` is done, cancels `work` and returns None.

    Raises:
        ForeignCodeError: something else cancelled `work`, or `work` raised SystemExit or similar.
    """
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        working.cancel()  # has no effect if the work ended together with the stop; its result then counts
        await asyncio.wait({working})
        if working.cancelled() and stop.is_set():
            return None
        with code_of(f"{work.__qualname__}: code that it calls"):
            return working.result()
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.wait({working, stopping})
