"""Coroutines that run while the body of an `async with` statement runs."""

from __future__ import annotations

import asyncio

import pytest

from rl_core.trainer.loop.concurrency import alongside


async def test_a_task_stays_cancelled_if_it_was_cancelled_while_the_other_task_ended():
    """This happens if Ctrl-C is pressed again while the groups of a stopped run end."""
    ending, may_end, events = asyncio.Event(), asyncio.Event(), list[str]()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await may_end.wait()

    async def run() -> None:
        async with alongside(work()):
            await asyncio.sleep(0)
        events.append("went on")

    running = asyncio.create_task(run())
    await ending.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert events == []
    assert asyncio.all_tasks() == {asyncio.current_task()}, "a task was left behind"


async def test_an_error_of_the_other_task_is_raised_at_the_end_of_the_block():
    async def work() -> None:
        raise ValueError("no more groups")

    with pytest.raises(ValueError, match="no more groups"):
        async with alongside(work()):
            await asyncio.sleep(0)
