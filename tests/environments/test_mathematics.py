"""The environment `mathematics`: equal answers, answers that hang, and no process left behind."""

from __future__ import annotations

import asyncio
import math
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
from rl_core.errors import ConfigError, DataError, DeadlineError, Mistakes
from rl_core.testing.environments import EnvironmentConformance
from rl_core.trainer.before.environment_checks import gather_unplayable
from rl_core.trainer.groups import DataRow
from rl_environments import mathematics
from rl_environments.judge_pool import JudgeError, JudgePool, close_pools
from rl_environments.mathematics import MathematicsEnvironment, reference_answers
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


def test_an_unreadable_reference_is_an_error_before_the_run_with_its_row():
    answers = ["5", "\\frac{1}{2}", "\\boxed{}", "6"]
    rows = [DataRow({"prompt": "?", "answer": answer}, f"d.jsonl:{i}") for i, answer in enumerate(answers, start=1)]
    mistakes = Mistakes()
    gather_unplayable("mathematics", MathematicsEnvironment, {}, rows, mistakes)
    with pytest.raises(DataError, match=r"^d.jsonl:3: the reference answer '.*' cannot be used: .* leave the row out"):
        mistakes.raise_found()


def test_a_reference_that_takes_too_long_to_read_is_named(monkeypatch):
    monkeypatch.setattr("rl_environments.mathematics._PROOF_CPU_S", 1.0)
    with pytest.raises(DataError, match="reading it takes more than 1 s of CPU time"):
        MathematicsEnvironment.require_row({"prompt": "", "answer": "9^{9^{9^{9^{9}}}}+5^{4^{3^{7}}}"})


def test_references_are_tried_once_and_not_all_of_a_long_file(monkeypatch, caplog):
    monkeypatch.setattr("rl_environments.mathematics.MOST_TRIED", 1)
    proofs = mathematics._Proofs()
    assert proofs.problem("1,234.5") is None
    assert proofs.problem("\\boxed{}") == proofs.problem("\\boxed{}") is not None
    assert proofs.problem("\\frac{1}{") is None
    assert [record.getMessage() for record in caplog.records] == [
        "mathematics: tried 1 references; those of further rows are not tried before the run"
    ]


async def test_a_reference_that_was_not_tried_before_the_run_fails_its_sample():
    """Rows beyond the time for trying references must not earn a silent 0."""
    (trajectory,) = await played(
        MathematicsEnvironment, {"prompt": "?", "answer": "\\frac{1}{"}, ["\\boxed{1}"], OPTIONS
    )
    assert trajectory.failure_kind == "DataError"
    assert "cannot be read as expressions" in (trajectory.failure or "")


async def test_each_of_several_references_is_right():
    row = {"prompt": "", "reward_spec": {"ground_truth": '["34", "\\\\frac{1}{2}"]'}}
    for response, reward in (("\\boxed{34}", 1.0), ("\\boxed{0.5}", 1.0), ("\\boxed{35}", 0.0)):
        assert (await judged(MathematicsEnvironment, row, response, **OPTIONS)).reward == reward


async def test_a_process_killed_from_outside_fails_the_sample():
    pool = JudgePool(1)
    try:
        assert (await pool.verdict("2", ["2"], cpu_s=60.0, wait_s=WAIT_S)).is_right
        (pid,) = pool.pids()
        used_s = _cpu_seconds(pid)
        hanging = asyncio.create_task(pool.verdict(HANGS, ["2"], cpu_s=60.0, wait_s=WAIT_S))
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
            await pool.verdict("2", ["2"], cpu_s=60.0, wait_s=0.01)
    finally:
        pool.close()


async def test_closing_a_pool_leaves_no_process():
    pool = JudgePool(1)
    hanging = asyncio.create_task(pool.verdict(HANGS, ["2"], cpu_s=60.0, wait_s=WAIT_S))
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
    await pool.verdict("2", ["2"], cpu_s=60.0, wait_s=250.0)
    (pid,) = pool.pids()
    hanging = asyncio.create_task(pool.verdict({HANGS!r}, ["2"], cpu_s={cpu_s}, wait_s=250.0))
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
    assert reference_answers({"answer": "a\n#### 1,250 "}) == ("1,250",)
    assert reference_answers({"answer": 0.00001}) == ("0.00001",)
    assert reference_answers({"reward_spec": {"ground_truth": '["34"]'}}) == ("34",)
    assert reference_answers({"answer": "[ '34', '35']"}) == ("34", "35")
    assert reference_answers({"answer": "[1, 2]"}) == ("[1, 2]",)
    assert reference_answers({"solution": "So \\boxed{1} is wrong and $\\boxed{\\frac{1}{2}}$ right."}) == (
        "\\frac{1}{2}",
    )
    given = [{}, *({"answer": each} for each in (" ", True, "####", [], [1], ["1", ""], math.nan, math.inf, {"a": 1}))]
    for row in given:
        with pytest.raises(DataError, match=r"needs reward_spec.ground_truth or answer"):
            MathematicsEnvironment.require_row({"prompt": "", **row})


def test_options_are_checked():
    with pytest.raises(ConfigError, match=r"environment.options.cpu_s: got 0; expected a finite number above 0"):
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
