"""Where a step's time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseTimes:
    """Wall-clock seconds of a step's phases; what no phase accounts for is the controller's own time."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the block's time to `name`. Phases do not nest."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def lap(self) -> dict[str, float]:
        """`time/<phase>`, `time/controller` and `time/step` in seconds since the last lap; starts the next one."""
        now = time.perf_counter()
        step = now - self._started
        times = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        times |= {"time/controller": step - sum(self._seconds.values()), "time/step": step}
        self._started, self._seconds = now, {}
        return times
