"""A rank in a long computation is distinguished from a dead one by its CPU time and I/O."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from rl_core.workers.heartbeat import Heartbeats, Pulse, pulse_of


def pulse(at_s: float, cpu_s: float = 0.0, **fields: object) -> Pulse:
    return Pulse(at_s=at_s, cpu_s=cpu_s, **fields)  # pyright: ignore[reportArgumentType]


def watched(seconds: int, pulse_at: list[object], *, answers: list[bool]) -> Heartbeats:
    """Notes one heartbeat of each rank per second. For each rank, `pulse_at` has a function from the second to the
    rank's pulse, and `answers` says whether the rank answers."""
    heartbeats = Heartbeats(len(pulse_at), silence_s=10.0, now_s=0.0)
    for second in range(1, seconds + 1):
        for rank, (seen, answers_itself) in enumerate(zip(pulse_at, answers, strict=True)):
            heartbeats.note(rank, seen(second), has_answered=answers_itself, now_s=float(second))  # pyright: ignore[reportCallIssue]
    return heartbeats


def computes(second: int) -> Pulse:
    return pulse(second, cpu_s=0.9 * second)


def idles(second: int) -> Pulse:
    return pulse(second, cpu_s=0.02 * second, num_bytes=2000 * second)


def writes(second: int) -> Pulse:
    return pulse(second, num_bytes=10_000_000 * second)


def waits_for_disk(second: int) -> Pulse:
    return pulse(second, waits_for_disk=True)


def unseen(second: int) -> None:
    return None


@pytest.mark.parametrize("works", [computes, writes, waits_for_disk])
@pytest.mark.parametrize("answers", [True, False])
def test_ranks_are_alive_while_one_works_and_the_others_answer(works, answers):
    assert not watched(60, [works, idles], answers=[answers, True]).dead(60.0)


@pytest.mark.parametrize("frozen", [idles, unseen])
def test_a_rank_that_neither_answers_nor_works_is_frozen_while_others_work(frozen):
    heartbeats = watched(9, [computes, frozen], answers=[True, False])
    assert not heartbeats.dead(9.5)
    assert list(watched(11, [computes, frozen], answers=[True, False]).dead(11.0)) == [1], (
        "ten seconds after its last sign of work, at second 1 or earlier"
    )


def test_a_slow_first_pulse_does_not_mean_that_a_rank_is_frozen():
    heartbeats = Heartbeats(1, silence_s=4.0, now_s=0.0)
    heartbeats.note(0, computes(6), has_answered=False, now_s=6.0)
    assert not heartbeats.dead(6.0), "a single pulse has nothing to compare with"
    heartbeats.note(0, computes(9), has_answered=False, now_s=9.0)
    assert not heartbeats.dead(12.5)
    heartbeats.note(0, computes(9), has_answered=False, now_s=13.0)
    assert list(heartbeats.dead(13.0)) == [0]


def test_ranks_that_all_wait_are_a_deadlock_although_all_answer():
    assert not watched(9, [idles, idles], answers=[True, True]).dead(9.5)
    assert list(watched(30, [idles, idles], answers=[True, True]).dead(30.0)) == [0, 1]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\nwhile sys.stdin.readline(): sum(range(60_000_000)); print('.', flush=True)",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def test_the_pulse_of_a_real_process_tells_computing_from_waiting_and_from_being_stopped(child):
    assert child.stdin is not None
    assert child.stdout is not None

    def work() -> None:
        print(file=child.stdin, flush=True)

    work()
    child.stdout.readline()
    before = pulse_of(child.pid)
    time.sleep(0.5)
    assert not pulse_of(child.pid).shows_work_since(before), "a waiting process shows no work"
    deadline, has_worked = time.monotonic() + 200, False
    while not has_worked:  # on a busy machine, the child may get the processor for less than 5 % of one computation
        assert time.monotonic() < deadline, "a computing process shows no work"
        before = pulse_of(child.pid)
        work()
        child.stdout.readline()
        has_worked = pulse_of(child.pid).shows_work_since(before)
    os.kill(child.pid, signal.SIGSTOP)
    work()
    before = pulse_of(child.pid)
    time.sleep(0.5)
    assert not pulse_of(child.pid).shows_work_since(before), "a stopped process shows no work"
    os.kill(child.pid, signal.SIGCONT)


def test_outside_linux_a_process_can_read_only_its_own_pulse(monkeypatch, child):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert pulse_of(os.getpid()).cpu_s > 0
    with pytest.raises(OSError, match=f"process {child.pid} cannot be read on darwin"):
        pulse_of(child.pid)


def test_a_process_that_is_gone_has_no_pulse():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(OSError, match=str(process.pid)):
        pulse_of(process.pid)
