"""Of 1,000 concurrent episodes, some sleep, block, raise or hang: exactly those that raise or hang fail, once each."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.passing_time import pass_time

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "odd_episodes.py"


@pytest.fixture
def odd_episodes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark's module, which plays the episodes."""
    spec = importlib.util.spec_from_file_location("odd_episodes", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "odd_episodes", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
async def test_of_a_thousand_episodes_at_once_only_those_that_raise_or_hang_fail(odd_episodes, caplog, monkeypatch):
    """The test moves the event loop's clock past the deadline once all other episodes have ended, so healthy calls
    cannot time out on a slow machine.
    """
    timeout_s = 3600.0

    def pass_the_deadline(num_ended: int) -> None:
        if num_ended == 990:
            pass_time(monkeypatch, timeout_s)

    try:
        _, ended = await odd_episodes.play(1000, 1000, has_trouble=True, timeout_s=timeout_s, on_end=pass_the_deadline)
        assert ended == {"": 980, "ConnectionError": 10, "DeadlineError": 10}
        assert caplog.text.count("timed out or was cancelled; the thread is abandoned") == 10
        deadline = time.monotonic() + 60  # a thread ends a moment after its environment was closed
        while len(environment_threads()) > 10 and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        assert len(environment_threads()) == 10, "all other threads must have ended"
    finally:
        odd_episodes._NEVER.set()  # also after a failure: later tests in this process wait for such threads
        for thread in environment_threads():
            thread.join(timeout=30.0)
    assert environment_threads() == []


def environment_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "environment"]
