"""Shows the progress of long work: as a live display on a terminal, as plain lines if the output is piped."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

SECONDS_BETWEEN_LINES = 2.0
"""Minimum time between two lines of piped output; the last line is always written."""
_PACE_UPDATES = 20
"""Number of recent updates from which the remaining time is estimated."""


class Progress:
    """Shows how much of `total` is done, the latest numbers, the current phase and the remaining time.

        with Progress("warm start", total=500, unit="steps") as progress:
            for step in range(500):
                ...
                progress.update(step + 1, loss=loss)

    By default, it writes to stderr, so that stdout remains free for results. A number is shown until it is updated, so
    the result of an evaluation every tenth step stays visible. If an exception ends the block, its class name is shown.
    """

    def __init__(
        self,
        title: str,
        total: int | None,
        unit: str = "steps",
        *,
        done: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            title: name of the work, in a word or two.
            total: number of units to do; None: unknown.
            unit: name of the unit, in the plural.
            done: number of units that a resumed run has already done.
            stream: where to write; stderr by default.
            clock: returns the time in seconds.
        """
        self._title, self._total, self._unit = title, total, unit
        self._done = done
        self._numbers: dict[str, float] = {}
        self._phase = ""
        self._clock = clock
        self._started = clock()
        self._pace = deque([(self._started, done)], maxlen=_PACE_UPDATES + 1)
        self._stream = stream or sys.stderr
        self._line_time = -float("inf")
        self._has_news = True
        self._is_closed = False
        console = Console(file=self._stream)
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(get_renderable=self._display, console=console, refresh_per_second=4)
            self._live.start()

    def update(self, done: int, **numbers: float) -> None:
        """Sets how many units are done, and the numbers to show. In names, underscores are shown as blanks, and
        `…_per_second` as `…/s`."""
        # A new dictionary, because the live display reads the old one from its own thread.
        self._numbers = {**self._numbers, **numbers}
        if done > self._done:
            self._pace.append((self._clock(), done))
        self._done = done
        self._has_news = True
        if self._live is None and self._clock() - self._line_time >= SECONDS_BETWEEN_LINES:
            self._print_line(self._time_left())

    def phase(self, name: str) -> None:
        """Sets the current phase, e.g. `generate`. Only the live display shows it."""
        self._phase = name

    def close(self, failure: str | None = None) -> None:
        """Shows the final state, and the failure if there is one. A plain line also says how long the work took. A
        second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        took = f"after {duration(self._clock() - self._started)}"
        self._phase = f"stopped: {failure}" if failure else ""
        if self._live is not None:
            with suppress(OSError):  # the terminal was closed
                self._live.stop()
        elif failure or self._has_news:
            self._print_line(f"stopped {took}: {failure}" if failure else took)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(kind.__name__ if kind else None)

    def _time_left(self) -> str:
        (start, first_done), (end, last_done) = self._pace[0], self._pace[-1]
        if self._total is None or last_done == first_done:
            return ""
        if self._done >= self._total:
            return f"after {duration(self._clock() - self._started)}"
        return f"{duration((end - start) / (last_done - first_done) * (self._total - self._done))} left"

    def _count(self) -> str:
        return f"{self._done:,} {self._unit}" if self._total is None else f"{self._done:,}/{self._total:,} {self._unit}"

    def _print_line(self, time_note: str) -> None:
        parts = [f"{self._title}: {self._count()}", *map(_number, self._numbers.items()), time_note]
        line = " · ".join(part for part in parts if part)
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        # Writing fails if Ctrl-C has ended a `tee` that reads this output, or if the log's disk is full. The work must
        # go on.
        with suppress(OSError):
            self._stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()
        self._line_time, self._has_news = self._clock(), False

    def _display(self) -> Group:
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self._total, completed=self._done, width=28, pulse=self._total is None)
        head.add_row(
            Text(self._title, "bold"), bar, self._count(), Text(self._time_left(), "cyan"), Text(self._phase, "dim")
        )
        numbers = Text("   ").join(
            Text.assemble((label, "dim"), " ", value) for label, value in map(_split, self._numbers.items())
        )
        return Group(head, numbers)


def duration(seconds: float) -> str:
    """A duration as text: `42 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def readable(value: float) -> str:
    """A number as short text: `12,431`, `0.913`, `0.0078`, `2.1e-05`."""
    size = abs(value)
    if isinstance(value, int) or size >= 100:
        return f"{value:,.0f}"
    if size >= 1:
        return f"{value:.1f}" if size >= 10 else f"{value:.2f}"
    if size >= 0.01 or size == 0:
        return f"{value:.3f}"
    return f"{value:.4f}" if size >= 0.001 else f"{value:.1e}"


def _split(number: tuple[str, float]) -> tuple[str, str]:
    name, value = number
    if name.endswith("_per_second"):
        return name.removesuffix("_per_second").replace("_", " ") + "/s", readable(value)
    return name.replace("_", " "), readable(value)


def _number(number: tuple[str, float]) -> str:
    return " ".join(_split(number))
