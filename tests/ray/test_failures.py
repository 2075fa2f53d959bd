"""A rank that dies, raises or hangs causes a single error, in time, and leaves nothing behind. Uses real signals."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl_core.errors import CheckpointError, DeadlineError, ForeignCodeError, WorkerError
from rl_core.interfaces import LossSpec
from rl_core.workers import MicroBatchLimits, WorkerGroup, ray_ranks
from tests.passing_time import pass_time
from tests.ray.conftest import IN_TIME_S, SLEEP_S, START_S, children_running, make_calls, ranks_running
from tests.ray.gloo_backend import GlooBackend, GlooWorker, spec_of
from tests.ray.test_dispatch import batch_of

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(900)]

PHASES = ("start", "forward", "backward", "optim_step", "save_state")
METHOD = {"backward": "forward_backward"}
"""Phase of a fault → the group's method, where the two names differ."""
LIMITS = MicroBatchLimits(max_sequences=1)


async def step(directory: Path, *, timeout_s: float = START_S, silence_s: float = 300.0, **options: Any) -> None:
    """Starts a group and runs one step with it: scoring, training, the optimizer step, and saving the state.
    `timeout_s` and `silence_s` apply to the optimizer step."""

    def calls(group: WorkerGroup) -> Iterator[Callable[[], Awaitable[Any]]]:
        batch, ranks = batch_of([3, 4, 5]), group._ranks
        yield lambda: group.forward(batch, LIMITS, temperature=1.0)
        yield lambda: group.forward_backward(batch, LIMITS, LossSpec(name="cross_entropy"), temperature=1.0)
        usual = ranks._timeout_s, ranks._silence_s
        # Only this call has short deadlines: on a busy machine, they might end another call first.
        ranks._timeout_s, ranks._silence_s = timeout_s, silence_s
        yield group.optim_step
        ranks._timeout_s, ranks._silence_s = usual
        yield lambda: group.save_state(directory)

    await make_calls(started(**options), calls)


def started(*, timeout_s: float = START_S, **options: Any) -> Awaitable[WorkerGroup]:
    """Starts a group of two ranks, each with a child process."""
    spec = spec_of(children=SLEEP_S, **options)
    return WorkerGroup.launch(GlooBackend(), spec, ranks_per_node=2, timeout_s=timeout_s, start_timeout_s=START_S)


def faults(seed: int) -> tuple[str, int]:
    """A random phase and a random rank for a fault."""
    choice = random.Random(seed)
    return choice.choice(PHASES[1:]), choice.randrange(2)


@pytest.mark.parametrize(
    ("phase", "rank"),
    [faults(int(os.environ.get("SEED", "0")))]
    + [pytest.param(phase, rank, marks=pytest.mark.soak) for phase in PHASES for rank in (0, 1)],
)
async def test_a_rank_killed_in_any_phase_ends_the_call_with_one_error_that_names_it(tmp_path, phase, rank, request):
    method = METHOD.get(phase, phase)
    if phase != "start":  # the other rank waits in its start, so it does not answer
        request.getfixturevalue("late_news_of_deaths")
    with pytest.raises(
        WorkerError, match=rf"^policy rank {rank} of 2 \(node [0-9.]+, pid \d+\) died in {method}: "
    ) as raised:
        await step(tmp_path, phase=phase, rank=rank, fault="kill")
    if phase != "start":
        assert raised.value.seconds < IN_TIME_S  # pyright: ignore[reportAttributeAccessIssue]


async def test_a_rank_that_raises_is_named_with_its_traceback_while_the_others_wait_for_it(tmp_path):
    with pytest.raises(WorkerError) as raised:
        await step(tmp_path, phase="backward", rank=1, fault="raise")
    message = str(raised.value)
    assert message.startswith("policy rank 1 of 2 (node 127.0.0.1, pid ")
    assert "failed in forward_backward: ValueError: told to fail in backward" in message
    assert 'self._fail_in("backward")' in message, "the message must contain the rank's own traceback"
    assert "Other ranks: policy rank 0 of 2" in message
    assert raised.value.seconds < IN_TIME_S  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("fault", "raises"), [("system_exit", "SystemExit(0)"), ("cancelled", "CancelledError()")])
async def test_an_exit_raised_in_a_rank_is_an_error_that_names_the_rank(tmp_path, fault, raises):
    message = rf"^policy rank 1 in optim_step raised {re.escape(raises)} \(gloo_backend\.py:"
    with pytest.raises(ForeignCodeError, match=message) as raised:
        await step(tmp_path, phase="optim_step", rank=1, fault=fault)
    assert raised.value.seconds < IN_TIME_S  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("fault", ["hang", pytest.param("stop", marks=pytest.mark.soak)])
async def test_the_error_of_a_hanging_rank_comes_soon_after_the_deadline_with_its_stack(
    fault: str, monkeypatch: pytest.MonkeyPatch
):
    """The deadline passes when rank 1 hangs and rank 0 waits for it."""
    timeout_s, passed_at = 3600.0, []
    if fault == "hang":  # both ranks say what they are doing
        monkeypatch.setattr(ray_ranks, "_DOING_S", 60.0)

    def calls(group: WorkerGroup) -> Iterator[Callable[[], Awaitable[Any]]]:
        async def optim_step() -> None:
            group._ranks._silence_s = 2 * timeout_s
            call = asyncio.ensure_future(group.optim_step())
            await until_stuck(group)
            pass_time(monkeypatch, timeout_s)
            passed_at.append(time.monotonic())
            await call

        yield optim_step

    with pytest.raises(DeadlineError) as raised:
        await make_calls(started(timeout_s=timeout_s, phase="optim_step", rank=1, fault=fault), calls)
    assert time.monotonic() - passed_at[0] < IN_TIME_S
    message = str(raised.value)
    assert "2 of 2 ranks did not finish optim_step within 3600 s (trainer.worker_timeout_s)" in message
    assert "policy rank 0 of 2 (node 127.0.0.1, pid " in message
    assert "in all_reduce" in message, "the message must say that rank 0 waits in all_reduce, for rank 1"
    detail = "in _fail_in (gloo_backend.py" if fault == "hang" else "did not answer when asked what it was doing"
    assert detail in message


async def until_stuck(group: WorkerGroup) -> None:
    """Waits until rank 1 hangs or is stopped, and rank 0 waits for it in a collective call."""
    ranks, seen = group._ranks, 0
    process = psutil.Process(ranks._addresses[1].pid)
    async with asyncio.timeout(START_S):
        while seen < 2:  # once is not enough: rank 0 may still be in an earlier collective call
            doing = await ranks._asked("doing", range(2), 2.0)
            hangs = "in _fail_in (" in str(doing.get(1)) or process.status() == psutil.STATUS_STOPPED
            seen = seen + 1 if hangs and "in all_reduce (" in str(doing.get(0)) else 0


async def test_a_worker_that_hangs_in_its_constructor_misses_the_start_deadline():
    spec = spec_of(phase="start", rank=1, fault="hang")
    message = r"of 2 ranks did not finish start within 20 s \(trainer\.worker_start_timeout_s\)"
    with pytest.raises(DeadlineError, match=message):
        await WorkerGroup.launch(GlooBackend(), spec, ranks_per_node=2, timeout_s=600, start_timeout_s=20)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("stop", "1 of 2 ranks showed no sign of work in optim_step for 4 s (trainer.worker_silence_s), and all were"),
        ("hang", "2 of 2 ranks showed no sign of work in optim_step for 4 s"),
    ],
)
async def test_a_frozen_rank_and_a_deadlock_are_found_long_before_the_deadline(tmp_path, fault, message, monkeypatch):
    if fault == "hang":  # both ranks say what they are doing
        monkeypatch.setattr(ray_ranks, "_DOING_S", 60.0)
    with pytest.raises(WorkerError) as raised:
        await step(tmp_path, phase="optim_step", rank=1, fault=fault, timeout_s=600, silence_s=4.0)
    assert message in str(raised.value)
    assert "policy rank 1 of 2 (node 127.0.0.1, pid " in str(raised.value)
    assert "in all_reduce" in str(raised.value), "the message must say in which call rank 0 waits"
    assert raised.value.seconds < 300  # pyright: ignore[reportAttributeAccessIssue]


async def test_a_long_unresponsive_computation_is_waited_for(tmp_path):
    await step(tmp_path, phase="optim_step", rank=1, fault="compute", silence_s=4.0)


@pytest.mark.soak
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", ["raise", "exit", "user"])
async def test_exceptions_exits_and_users_mistakes_in_any_phase_end_the_call(tmp_path, phase, fault):
    expected = CheckpointError if fault == "user" else WorkerError
    with pytest.raises(expected) as raised:
        await step(tmp_path, phase=phase, rank=1, fault=fault)
    assert "policy rank 1 of 2" in "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])


async def test_a_group_whose_ranks_have_ended_reports_this_and_closes(tmp_path, late_news_of_deaths):
    group = await started()
    pids = [answer["pid"] for answer in await group._ranks.call(GlooWorker.describe)]
    assert set(pids) <= set(ranks_running()), (
        "ranks_running must find live ranks, or the check for leftovers proves nothing"
    )
    assert len(children_running()) == 2
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"policy rank 1 of 2 .* died in optim_step"):
        await group.optim_step()
    with pytest.raises(WorkerError, match="cannot run save_state, because the ranks have ended: policy rank 1 of 2"):
        await group.save_state(tmp_path)
    await group.close()
    await group.close()


async def test_a_cancelled_call_does_not_keep_the_group_from_closing_at_once():
    group = await WorkerGroup.launch(GlooBackend(), spec_of(delay_s=600), ranks_per_node=2, timeout_s=START_S)
    call = asyncio.create_task(group.forward(batch_of([3, 4]), LIMITS, temperature=1.0))
    await asyncio.sleep(0.5)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    began = time.monotonic()
    await group.close()
    assert time.monotonic() - began < IN_TIME_S
