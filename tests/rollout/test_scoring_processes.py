"""Reward functions run in a few processes, so that none of them can stop the run."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import time
import tracemalloc
import types
from pathlib import Path
from typing import Any

import pytest

from rl_core.errors import ConfigError
from rl_core.interfaces import Action
from rl_rollout import scoring_processes
from rl_rollout.environment_calls import EnvironmentFailure
from rl_rollout.environment_pool import EnvironmentPool
from rl_rollout.reward_functions import RewardFunctionsEnvironment
from tests.rollout import odd_rewards

ACTION = Action(text="42", tokens=(4, 2), stop_reason="stop")


async def scored(
    pool: EnvironmentPool, what: str, *names: str, timeout_s: float = 60.0, row: dict[str, Any] | None = None
) -> Any:
    """The result of the functions for one row; an exception is returned."""
    paths = [name if ":" in name else f"{odd_rewards.__name__}:{name}" for name in names]
    row = row or {"prompt": "x", "what": what, "parent": os.getpid()}
    try:
        async with pool.opened(RewardFunctionsEnvironment, row, {"reward_functions": paths}, timeout_s) as episode:
            assert await episode.reset() == "x"
            return await episode.step(ACTION)
    except Exception as error:
        return error


async def all_scored(whats: list[str], name: str, *, timeout_s: float, **settings: Any) -> list[Any]:
    pool = EnvironmentPool(**settings)
    try:
        return await asyncio.gather(*(scored(pool, what, name, timeout_s=timeout_s) for what in whats))
    finally:
        await pool.aclose()


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring_processes, "GRACE_S", 1.0)


async def test_functions_run_in_a_few_other_processes():
    results = await all_scored([""] * 40, "where", timeout_s=60.0)
    processes = {result.reward for result in results}
    assert os.getpid() not in processes
    assert 1 <= len(processes) <= scoring_processes.MOST_PROCESSES


async def test_a_text_has_the_same_hash_in_all_processes():
    """As a function has it that takes a part of the texts by their hashes."""
    pools = [EnvironmentPool(), EnvironmentPool()]
    results = [await scored(pool, "", "hashes") for pool in pools]
    assert results[0].reward == results[1].reward
    await asyncio.gather(*(pool.aclose() for pool in pools))


_KILLED_RUN = """
import asyncio, os, signal
from rl_rollout.environment_pool import EnvironmentPool
from tests.rollout.test_scoring_processes import scored

async def main():
    print(int((await scored(EnvironmentPool(), "", "starts_another")).reward), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_what_functions_started_ends_with_a_run_that_is_killed():
    run = subprocess.run([sys.executable, "-c", _KILLED_RUN], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == -signal.SIGKILL
    started = Path(f"/proc/{int(run.stdout)}/cmdline")
    until = time.monotonic() + 20
    while started.exists() and b"sleep" in started.read_bytes():
        assert time.monotonic() < until, "it still runs"
        time.sleep(0.1)


async def test_nothing_is_reported_if_a_run_ends_while_functions_are_imported(caplog: pytest.LogCaptureFixture):
    pool = EnvironmentPool()
    waiting = asyncio.create_task(scored(pool, "", "odd"))
    while not pool._scoring._all:
        await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await pool.aclose()
    del pool
    gc.collect()
    await asyncio.sleep(0)
    assert not [record.message for record in caplog.records if record.name == "asyncio"]


async def test_rows_of_megabytes_wait_outside_the_memory_of_the_run():
    pool, size, count = EnvironmentPool(), 1 << 20, 64
    await scored(pool, "", "odd")
    tracemalloc.start()
    row = {"prompt": "x", "what": "", "tests": "x" * size}
    results = await asyncio.gather(*(scored(pool, "", "odd", row=row) for _ in range(count)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    await pool.aclose()
    assert [result.reward for result in results] == [1.0] * count
    assert peak < count * size / 2


async def test_a_function_that_holds_the_interpreter_fails_only_its_own_sample(short_grace: None):
    begun = time.monotonic()
    *others, held = await all_scored([*[""] * 20, "hold"], "holds", timeout_s=3.0)
    assert [result.reward for result in others] == [1.0] * 20
    assert "waited 3 s (environment.timeout_s)" in str(held)
    assert "in holds (" in str(held)
    assert "odd_rewards.py" in str(held)
    assert time.monotonic() - begun < 30.0


@pytest.mark.parametrize(
    ("what", "kind", "said"),
    [
        ("spin", "DeadlineError", "in odd ("),
        ("print", "DeadlineError", "in odd ("),
        ("exit", "EnvironmentEnded", "ended with code 3, in the reward function tests.rollout.odd_rewards:odd"),
        ("raise", "SystemExit", "2 (odd_rewards.py"),
        ("nan", "DataError", "the reward function odd returned nan"),
        ("text", "DataError", "the reward function odd returned ['good']"),
        ("none", "DataError", "no reward function gives this completion a reward: odd returned None"),
    ],
)
async def test_a_function_that_misbehaves_fails_only_its_own_sample(short_grace: None, what: str, kind: str, said: str):
    *others, failed = await all_scored([*["sleep"] * 6, what], "odd", timeout_s=3.0)
    assert [result.reward for result in others] == [1.0] * 6
    assert isinstance(failed, EnvironmentFailure)
    assert failed.kind == kind
    assert said in str(failed)


async def test_a_function_that_forks_is_scored_and_its_child_ends_with_the_process():
    (result,) = await all_scored(["fork"], "odd", timeout_s=60.0)
    assert result.reward == 1.0


async def test_functions_that_wait_run_side_by_side():
    pool = EnvironmentPool()
    await scored(pool, "", "slow")
    begun = time.monotonic()
    results = await asyncio.gather(*(scored(pool, "", name) for name in ["slow"] * 100 + ["odd"] * 100))
    assert [result.reward for result in results] == [1.0] * 200
    assert time.monotonic() - begun < 10.0, "one after another, they would wait for 20 s"
    await pool.aclose()


async def test_an_async_function_that_waits_for_ever_fails_at_its_deadline():
    *others, failed = await all_scored([*[""] * 6, "never"], "slow", timeout_s=2.0)
    assert [result.reward for result in others] == [1.0] * 6
    assert "waited 2 s (environment.timeout_s)" in str(failed)
    assert "in the reward function tests.rollout.odd_rewards:slow" in str(failed)


async def test_num_workers_limits_how_many_are_scored_at_a_time():
    pool = EnvironmentPool(num_workers=2)
    await scored(pool, "", "slow")
    begun = time.monotonic()
    await asyncio.gather(*(scored(pool, "", "slow") for _ in range(6)))
    assert time.monotonic() - begun > 0.5, "three rounds of 0.2 s"
    await pool.aclose()


async def test_functions_that_only_this_process_knows_run_in_threads_with_a_note(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    module = types.ModuleType("made_in_a_notebook")
    module.reward = odd_rewards.is_in_main_process  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "made_in_a_notebook", module)
    pool = EnvironmentPool()
    with caplog.at_level(logging.WARNING):
        results = [await scored(pool, "", "made_in_a_notebook:reward") for _ in range(2)]
    assert [result.reward for result in results] == [1.0, 1.0]
    (note,) = [record.message for record in caplog.records if "made_in_a_notebook" in record.message]
    assert "made_in_a_notebook:reward cannot be imported in another process" in note
    assert "so it runs in threads" in note
    await pool.aclose()
    asked = EnvironmentPool(placement="process")
    refused = await scored(asked, "", "made_in_a_notebook:reward")
    assert isinstance(refused, ConfigError)
    assert "choose the placement thread" in str(refused)
    await asked.aclose()


async def test_the_configuration_can_choose_threads():
    pool = EnvironmentPool(placement="thread")
    result = await scored(pool, "", "is_in_main_process")
    assert result.reward == 1.0
    await pool.aclose()
