"""Progress output: plain lines in a pipe, a live display on a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import sys

import pytest

from rl_core.reports.progress import Progress, duration, readable
from tests.core.unwritable import KINDS, unwritable


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def piped_lines(num_steps: int, seconds_per_step: float) -> list[str]:
    stream, clock = io.StringIO(), Clock()
    with Progress("warm start", num_steps, stream=stream, clock=clock) as progress:
        for step in range(1, num_steps + 1):
            clock.now += seconds_per_step
            progress.phase("train")
            progress.update(step, loss=1.0 / step)
    return stream.getvalue().splitlines()


def test_piped_output_is_one_plain_line_per_slow_step():
    assert piped_lines(3, seconds_per_step=5.0) == [
        "warm start: 1/3 steps · loss 1.00 · 10 s left",
        "warm start: 2/3 steps · loss 0.500 · 5 s left",
        "warm start: 3/3 steps · loss 0.333 · after 15 s",
    ]


def test_piped_output_is_bounded_for_fast_steps_and_has_the_first_and_the_last():
    lines = piped_lines(1000, seconds_per_step=0.01)
    assert len(lines) == 1 + 4 + 1
    assert lines[0].startswith("warm start: 1/1,000 steps")
    assert lines[-1] == "warm start: 1,000/1,000 steps · loss 0.0010 · after 10 s"


def test_work_of_unknown_length_shows_its_numbers_but_does_not_estimate_the_time_left():
    stream, clock = io.StringIO(), Clock()
    with Progress("warm start", None, "updates", stream=stream, clock=clock) as progress:
        for update in (5, 10):
            clock.now += 3.0
            progress.update(update, accuracy=update / 100, target=0.2)
    assert stream.getvalue().splitlines() == [
        "warm start: 5 updates · accuracy 0.050 · target 0.200",
        "warm start: 10 updates · accuracy 0.100 · target 0.200",
    ]


def test_piped_output_has_no_control_characters():
    text = "\n".join(piped_lines(50, seconds_per_step=1.0))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)


def test_a_stream_with_a_limited_encoding_still_gets_its_line():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    with Progress("Zahlen", 1, stream=stream) as progress:
        progress.update(1, größe=1.0)
    assert raw.getvalue().startswith(b"Zahlen: 1/1 steps ? gr??e 1.00")


@pytest.mark.parametrize("kind", KINDS)
def test_the_work_continues_if_its_output_cannot_be_written(kind: str):
    done, stream, clock = 0, unwritable(kind), Clock()
    with Progress("training", 3, stream=stream, clock=clock) as progress:
        for step in range(1, 4):
            clock.now += 5.0
            progress.update(step)
            done = step
    assert done == 3
    with pytest.raises(OSError, match=r"Broken pipe|No space left"):  # control: the lines could not be delivered
        stream.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # from rich's refresh thread
def test_the_work_continues_if_its_terminal_is_closed(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    main, side = pty.openpty()
    terminal, before = os.fdopen(side, "w"), sys.stderr
    with Progress("training", 1, stream=terminal) as progress:
        os.close(main)
        progress.update(1)
    assert sys.stderr is before
    with pytest.raises(OSError, match="Input/output error"):  # control: the display could not be delivered
        terminal.close()


def test_a_number_given_once_stays_in_the_display():
    stream, clock = io.StringIO(), Clock()
    with Progress("run", 9, stream=stream, clock=clock) as progress:
        clock.now += 3
        progress.update(1, reward=0.1, **{"held-out accuracy": 0.25})
        clock.now += 3
        progress.update(2, reward=0.2)
    assert stream.getvalue().splitlines()[1] == "run: 2/9 steps · reward 0.200 · held-out accuracy 0.250 · 21 s left"


def test_a_failure_is_the_last_line():
    stream = io.StringIO()

    def make_data():
        with Progress("making data", None, "rows", stream=stream, clock=Clock()) as progress:
            progress.update(7)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        make_data()
    assert stream.getvalue().splitlines() == [
        "making data: 7 rows",
        "making data: 7 rows · stopped after 0 s: RuntimeError",
    ]


def test_a_resumed_run_judges_the_time_left_by_its_own_pace():
    stream, clock = io.StringIO(), Clock()
    progress = Progress("run", 100, done=90, stream=stream, clock=clock)
    clock.now += 4.0
    progress.update(91)
    assert stream.getvalue() == "run: 91/100 steps · 36 s left\n"


def test_a_terminal_gets_a_live_display_with_the_phase(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    main, side = pty.openpty()
    with os.fdopen(side, "w", encoding="utf-8") as terminal, os.fdopen(main, "rb", buffering=0) as screen:
        progress = Progress("quickstart", 4, stream=terminal)
        progress.update(2, reward=0.5, tokens_per_second=12345.6)
        progress.phase("generate")
        raw = b""
        while b"generate" not in raw:
            raw += screen.read(4096)
        progress.close()
        terminal.write("END")
        terminal.flush()
        while not raw.endswith(b"END"):
            raw += screen.read(4096)
    shown = raw.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "\x1b[" in shown
    assert "quickstart" in text
    assert "2/4 steps" in text
    assert "generate" in text
    assert "tokens/s 12,346" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12431.2, "12,431"),
        (999.7, "1,000"),
        (99.94, "99.9"),
        (1.5, "1.50"),
        (0.9134, "0.913"),
        (0.0, "0.000"),
        (0.0078, "0.0078"),
        (2.1e-5, "2.1e-05"),
        (-0.25, "-0.250"),
        (7, "7"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_are_short(value, text):
    assert readable(value) == text


def test_durations_are_shown_in_their_two_largest_units():
    assert [duration(s) for s in (0.4, 59.6, 185, 7800)] == ["0 s", "1 min 00 s", "3 min 05 s", "2 h 10 min"]
