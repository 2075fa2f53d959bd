"""Measures the time of a step's phases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseTimes:
    """Measures wall-clock seconds of a step's phases. Time outside all phases is `time/controller`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = clock()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the duration of the block to phase `name`. Phases must not nest."""
        started = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - started

    def lap(self) -> dict[str, float]:
        """Returns the seconds since the last call (or the start) as `time/<phase>`, `time/controller` and `time/step`,
        and resets them."""
        now = self._clock()
        step = now - self._started
        times = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        times |= {"time/controller": step - sum(self._seconds.values()), "time/step": step}
        self._started, self._seconds = now, {}
        return times
