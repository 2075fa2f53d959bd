"""An event loop whose clock jumps to the next timer when nothing is ready, so waiting takes no real time.

Tasks may only await timers and other tasks: virtual time cannot wait for a socket, a process or a thread. Work for a
thread (`asyncio.to_thread`) is therefore done immediately. If no task is ready and no timer is set, the loop raises
`Deadlock`, where a real loop would wait for ever.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class Deadlock(AssertionError):
    """Every task waits, and no timer is set."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose virtual time starts at 0 s."""

    def __init__(self, *, on_turn: Callable[[int], None] = lambda turn: None) -> None:
        """`on_turn` is called before each turn of the loop, with the turn's number."""
        self._now = 0.0
        super().__init__(_JumpingSelector(self._advance, on_turn))

    def time(self) -> float:
        return self._now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _advance(self, seconds: float) -> None:
        self._now += seconds


class _JumpingSelector(selectors.SelectSelector):
    """Advances the clock by `timeout` instead of waiting. The loop calls `select` once per turn; `timeout` is the time
    until the next timer (a day at most), 0 if something is ready, None if nothing is ready and no timer is set."""

    def __init__(self, advance: Callable[[float], None], on_turn: Callable[[int], None]) -> None:
        super().__init__()
        self._advance = advance
        self._on_turn = on_turn
        self._turn = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._on_turn(self._turn)
        self._turn += 1
        events = super().select(0)
        if not events:
            if timeout is None:
                raise Deadlock("every task waits, and no timer is set")
            self._advance(timeout)
        return events


def virtual_now() -> float:
    """The virtual time in seconds; 0 outside of a loop."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return 0.0


def run_virtually(work: Coroutine[Any, Any, _Result], *, on_turn: Callable[[int], None] = lambda turn: None) -> _Result:
    """The result of `work`, run in a new virtual-time loop."""
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(on_turn=on_turn)) as runner:
        return runner.run(work)
