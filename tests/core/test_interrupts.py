"""Signals during a coroutine: the first asks to stop, a second SIGINT or SIGTERM cancels, and only a clean-up that
hangs can be interrupted."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from rl_core.trainer.loop import interrupts as module
from rl_core.trainer.loop.interrupts import Interrupts


@pytest.fixture(autouse=True)
def hangups_are_handled(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Restores the default for SIGHUP, which is ignored under `nohup`. Needs `capfd`, because handling a SIGHUP
    discards all later output to a terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def press(number: int = signal.SIGINT) -> None:
    """Sends the signal to this thread. The kernel may deliver a signal for the whole process to any thread, and the
    handler then runs later."""
    signal.raise_signal(number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_requests_one_stop_and_its_immediate_repeats_are_ignored(
    number: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "_BOUNCE_S", 600.0)  # on a busy machine, more than 1 s may pass between two signals
    interrupts, stops = Interrupts(), []

    async def work() -> str:
        with interrupts.stops(lambda: stops.append(1)):
            for _ in range(3):
                press(number)
                await asyncio.sleep(0.01)
        return "whole"

    assert interrupts.run(work) == "whole"
    assert stops == [1]


def test_a_second_hangup_is_ignored_even_before_the_first_is_handled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_BOUNCE_S", 0.05)
    interrupts, stops = Interrupts(), []

    async def work() -> str:
        with interrupts.stops(lambda: stops.append(1)):
            press(signal.SIGHUP)
            time.sleep(0.1)
            press(signal.SIGHUP)
            await asyncio.sleep(0.01)
        return "whole"

    assert interrupts.run(work) == "whole"
    assert stops == [1]


def test_a_later_second_signal_cancels_the_work_and_its_clean_up_completes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "CLOSE_S", 600.0)  # on a busy machine, the clean-up must not count as hanging
    interrupts, events = Interrupts(), []

    async def work() -> None:
        try:
            with interrupts.stops(lambda: events.append("stop")):
                press()
                time.sleep(1.05)  # within 1 s, a second signal counts as a bounce
                press()
                await asyncio.sleep(60)
        finally:
            press()
            await asyncio.sleep(0.01)
            events.append("closed")

    with pytest.raises(KeyboardInterrupt):
        interrupts.run(work)
    assert events == ["stop", "closed"]


def test_closing_the_terminal_stops_the_work_once_and_discards_its_output():
    """The child's terminal is closed while the child works. A second SIGHUP comes too late to count as a bounce."""
    child, terminal = pty.fork()
    if child == 0:
        interrupts, stops = Interrupts(), []

        async def work() -> None:
            with interrupts.stops(lambda: stops.append(1)):
                os.write(1, b"working")
                async with asyncio.timeout(200):
                    while not stops:
                        await asyncio.sleep(0.01)
                await asyncio.sleep(1.05)
                press(signal.SIGHUP)
                await asyncio.sleep(0.01)
                os.write(1, b"this raises OSError on a closed terminal")

        try:
            interrupts.run(work)
            os._exit(len(stops))
        finally:
            os._exit(9)
    while b"working" not in os.read(terminal, 1000):
        pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_after_a_hangup_output_is_discarded_even_before_the_terminal_closes():
    child, terminal = pty.fork()
    if child == 0:
        interrupts, stops = Interrupts(), []

        async def work() -> None:
            with interrupts.stops(lambda: stops.append(1)):
                os.write(1, b"before")
                press(signal.SIGHUP)
                await asyncio.sleep(0.01)
                os.write(1, b"after")

        try:
            interrupts.run(work)
            os._exit(len(stops))
        finally:
            os._exit(9)
    shown = b""
    with suppress(OSError):  # the child has ended
        while piece := os.read(terminal, 1000):
            shown += piece
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert shown == b"before"


def test_a_hangup_that_is_ignored_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does

    async def work() -> str:
        press(signal.SIGHUP)
        await asyncio.sleep(0.01)
        return "whole"

    assert Interrupts().run(work) == "whole"


def test_a_signal_outside_a_stops_block_ends_the_work_at_once():
    started = time.monotonic()

    async def work() -> None:
        press()
        await asyncio.sleep(250)

    with pytest.raises(KeyboardInterrupt):
        Interrupts().run(work)
    assert time.monotonic() - started < 200


def test_a_signal_that_another_thread_gets_is_answered_while_the_loop_waits():
    started = time.monotonic()

    def press_here() -> None:
        time.sleep(0.5)  # by now the loop waits
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    async def work() -> None:
        thread = threading.Thread(target=press_here)
        thread.start()
        await asyncio.sleep(250)

    with pytest.raises(KeyboardInterrupt):
        Interrupts().run(work)
    assert time.monotonic() - started < 200


def test_a_clean_up_that_hangs_can_be_interrupted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "CLOSE_S", 0.05)
    events = []

    async def work() -> None:
        try:
            press()
            await asyncio.sleep(60)
        finally:
            time.sleep(0.2)
            press()
            await asyncio.sleep(0.01)
            events.append("closed")

    with pytest.raises(KeyboardInterrupt):
        Interrupts().run(work)
    assert not events


def test_handlers_are_put_back():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]

    async def work() -> None:
        assert signal.getsignal(signal.SIGINT) is not before[0]

    Interrupts().run(work)
    assert [signal.getsignal(number) for number in numbers] == before


def test_work_in_another_thread_leaves_the_signals_alone():
    results = []

    async def work() -> object:
        return signal.getsignal(signal.SIGINT)

    thread = threading.Thread(target=lambda: results.append(Interrupts().run(work)))
    thread.start()
    thread.join(200)
    assert results == [signal.getsignal(signal.SIGINT)]


async def test_a_running_event_loop_is_refused_and_the_error_names_the_alternative():
    async def work() -> int:
        return 1

    with pytest.raises(RuntimeError, match=r"await asyncio\.to_thread"):
        Interrupts().run(work)
    assert await asyncio.to_thread(Interrupts().run, work) == 1
