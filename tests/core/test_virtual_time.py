"""Virtual time, the clock of the training loop's tests: timers fire in order, at their times, without real waiting."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.core.virtual_time import Deadlock, run_virtually


def test_timers_fire_in_order_at_their_own_virtual_times():
    started, seen = time.monotonic(), []

    async def wait(seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((asyncio.get_running_loop().time(), seconds))

    async def work() -> None:
        await asyncio.gather(wait(3600.0), wait(0.5), wait(86_400.0 * 30))

    run_virtually(work())
    assert seen == [(0.5, 0.5), (3600.0, 3600.0), (86_400.0 * 30, 86_400.0 * 30)]
    assert time.monotonic() - started < 250


def test_a_deadline_fires_and_ready_tasks_run_before_any_timer():
    async def work() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        assert asyncio.get_running_loop().time() == 0.0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60.0):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtually(work()) == 60.0


def test_work_for_a_thread_runs_at_once_and_raises_its_error():
    async def work() -> None:
        timer = asyncio.create_task(asyncio.sleep(1.0))
        assert await asyncio.to_thread(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        assert asyncio.get_running_loop().time() == 0.0
        await timer

    run_virtually(work())


def test_a_loop_in_which_every_task_waits_forever_is_an_error():
    async def work() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run_virtually(work())
