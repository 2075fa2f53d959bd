"""The environment `mathematics`: equal answers, answers that hang, and no process left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import psutil
import pytest

from rl_core import plugins
from rl_core.errors import ConfigError, DataError, DeadlineError
from rl_core.testing.environments import EnvironmentConformance
from rl_environments.judge_pool import JudgeError, JudgePool, close_pools
from rl_environments.mathematics import MathematicsEnvironment, reference_answer
from tests.environments.boxes import DEADLINE_S
from tests.environments.episodes import judged, played

HALF_ROW = {"prompt": "1/2?", "reward_spec": {"ground_truth": "\\frac{1}{2}"}}
HANGS = "\\boxed{9^{9^{9^{9^{9}}}} + 5^{4^{3^{7}}}}"
OPTIONS = {"processes": 1, "cpu_s": 60.0}
WAIT_S = 250.0


@pytest.fixture(autouse=True, scope="module")
def _processes() -> Iterator[None]:
    yield
    close_pools()


class TestMathematicsEnvironment(EnvironmentConformance):
    factory = MathematicsEnvironment
    row: ClassVar[dict[str, Any]] = HALF_ROW
    options: ClassVar[dict[str, Any]] = OPTIONS
    rewards: ClassVar[dict[Any, float]] = {"So \\boxed{0.5}": 1.0, "It is $\\frac{2}{4}$.": 1.0, "\\boxed{2}": 0.0}


async def test_answers_are_compared_as_expressions():
    cases = [
        ("18", "The answer is 18.", 1.0),
        ("18", "\\boxed{18.0}", 1.0),
        ("18", "<think>\\boxed{17}</think> \\boxed{18}", 1.0),
        ("18", "<think>\\boxed{18}</think> I forgot.", 0.0),
        ("18", "<think>Is it \\boxed{18}?", 0.0),
        ("$x^2+2x+1$", "$(x+1)^2$", 1.0),
        ("x^2+2x+1", "\\boxed{(x+1)^2}", 1.0),
        ("Half of 36 is 18.\n#### 18", "\\boxed{18}", 1.0),
        ("(1, 2]", "\\boxed{(1, 2]}", 1.0),
        ("18", "", 0.0),
        (7, "7", 1.0),
    ]
    for reference, response, reward in cases:
        result = await judged(MathematicsEnvironment, {"prompt": "", "answer": reference}, response, **OPTIONS)
        assert result.reward == reward, (reference, response)
    assert (await judged(MathematicsEnvironment, HALF_ROW, "no idea", **OPTIONS)).metrics["has_answer"] == 0.0


async def test_a_hanging_answer_is_wrong_and_the_next_answer_is_judged():
    options = {"processes": 1, "cpu_s": 1.0}
    hanging = await judged(MathematicsEnvironment, HALF_ROW, HANGS, **options)
    assert (hanging.reward, hanging.metrics["given_up"]) == (0.0, 1.0)
    assert (await judged(MathematicsEnvironment, HALF_ROW, "\\boxed{0.5}", **OPTIONS)).reward == 1.0


async def test_an_episode_runs_through_the_generator():
    responses = ["\\boxed{0.5}", "\\boxed{3}", "none"]
    trajectories = await played(MathematicsEnvironment, HALF_ROW, responses, OPTIONS)
    assert [trajectory.failure for trajectory in trajectories] == [None] * 3
    rewards = {trajectory.turns[0].response: trajectory.reward for trajectory in trajectories}
    assert rewards == {"\\boxed{0.5}": 1.0, "\\boxed{3}": 0.0, "none": 0.0}


async def test_an_unreadable_reference_fails_the_sample_with_a_data_error():
    with pytest.raises(DataError, match=r"the reference answer '.*' cannot be read"):
        await judged(MathematicsEnvironment, {"prompt": "", "answer": "\\boxed{}"}, "\\boxed{1}", **OPTIONS)
    (trajectory,) = await played(MathematicsEnvironment, {"prompt": "?", "answer": "\\boxed{}"}, ["1"], OPTIONS)
    assert trajectory.failure_kind == "DataError"


async def test_a_process_killed_from_outside_fails_the_sample():
    pool = JudgePool(1)
    try:
        assert (await pool.verdict("2", "2", cpu_s=60.0, wait_s=WAIT_S)).is_right
        (pid,) = pool.pids()
        used_s = _cpu_seconds(pid)
        hanging = asyncio.create_task(pool.verdict(HANGS, "2", cpu_s=60.0, wait_s=WAIT_S))
        async with asyncio.timeout(DEADLINE_S):
            # An idle process uses no CPU time, so this one has begun to compare.
            while _cpu_seconds(pid) < used_s + 0.1:
                await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(JudgeError, match="ended unexpectedly, with code -9"):
            await hanging
    finally:
        pool.close()


async def test_waiting_too_long_for_a_verdict_is_an_error():
    pool = JudgePool(1)
    try:
        with pytest.raises(DeadlineError, match=r"waited 0.01 s for one of 1 processes"):
            await pool.verdict("2", "2", cpu_s=60.0, wait_s=0.01)
    finally:
        pool.close()


async def test_closing_a_pool_leaves_no_process():
    pool = JudgePool(1)
    hanging = asyncio.create_task(pool.verdict(HANGS, "2", cpu_s=60.0, wait_s=WAIT_S))
    while not pool.pids():
        await asyncio.sleep(0.01)
    (pid,) = pool.pids()
    pool.close()
    assert not _exists(pid)
    with pytest.raises(JudgeError, match=r"ended (unexpectedly|at its start), with code -9"):
        await hanging


@pytest.mark.parametrize(
    ("ending", "cpu_s"), [("pass", 1.0), ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 600.0)]
)
def test_no_process_is_left_when_the_trainer_ends_or_is_killed(ending, cpu_s):
    script = f"""
import asyncio
from rl_environments.judge_pool import shared_pool
async def main():
    pool = shared_pool(1)
    await pool.verdict("2", "2", cpu_s=60.0, wait_s=250.0)
    (pid,) = pool.pids()
    hanging = asyncio.create_task(pool.verdict({HANGS!r}, "2", cpu_s={cpu_s}, wait_s=250.0))
    await asyncio.sleep(0.2)
    print(pid, flush=True)
    {ending}
    hanging.cancel()
asyncio.run(main())
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert run.stdout, run.stderr
    deadline = time.monotonic() + DEADLINE_S
    while _exists(int(run.stdout)):
        assert time.monotonic() < deadline, f"process {run.stdout} is still there"
        time.sleep(0.02)


def test_a_row_without_a_reference_is_refused_before_the_run():
    assert reference_answer({"answer": "a\n#### 1,250 "}) == "1,250"
    for row in ({}, {"answer": " "}, {"answer": True}, {"reward_spec": {"ground_truth": ["1"]}}, {"answer": "####"}):
        with pytest.raises(DataError, match=r"needs reward_spec.ground_truth or answer"):
            MathematicsEnvironment.require_row({"prompt": "", **row})


def test_options_are_checked():
    with pytest.raises(ConfigError, match=r"environment.options.cpu_s: got 0; expected above 0"):
        MathematicsEnvironment(HALF_ROW, {"cpu_s": 0})
    with pytest.raises(ConfigError, match=r"options.timeout_s: not an option of the environment 'mathematics'"):
        MathematicsEnvironment(HALF_ROW, {"timeout_s": 3})


def test_the_mathematics_environment_is_installed_under_its_name():
    assert plugins.load("rl_core.environments", "mathematics") is MathematicsEnvironment


def _cpu_seconds(pid: int) -> float:
    return psutil.Process(pid).cpu_times().user


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
