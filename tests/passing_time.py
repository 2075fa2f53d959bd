"""Lets deadlines pass at once. If a test had a short real deadline and the machine paused, the deadline could end a
call that precedes the tested call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

LIMIT_S = 60.0
"""Longest wait for something that takes a moment on a free machine."""


def pass_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Moves the clock of the running event loop forward, until the end of the test. Real time does not pass."""
    loop = asyncio.get_running_loop()
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + seconds)


async def until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Waits until the condition is true. Raises TimeoutError if it stays false for `limit_s`."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)
