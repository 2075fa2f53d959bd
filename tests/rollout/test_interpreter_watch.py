"""A run ends, with the function's name, if a thread of an environment holds the interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_rollout.held_interpreter import place_in

ROOT = Path(__file__).parents[2]
SCRIPT = """\
import asyncio, sys, time
from rl_core.interfaces import Action, Environment, StepResult
from rl_core.trainer.loop.interrupts import Interrupts
from rl_rollout import interpreter_watch
from rl_rollout.environment_pool import EnvironmentPool
from tests.rollout.odd_rewards import holds

interpreter_watch.GRACE_S = float(sys.argv[2])

class Holding(Environment):
    def __init__(self, row, options):
        self._what = row["what"]

    async def reset(self):
        return "x"

    async def step(self, action):
        if self._what == "wait":
            await asyncio.sleep(3600)
        if self._what == "compute":
            until = time.monotonic() + 6
            while time.monotonic() < until:
                pass
        return StepResult(reward=holds([""], [self._what])[0], done=True)

async def main():
    pool = EnvironmentPool(placement="thread")
    async def play(what):
        async with pool.opened(Holding, {"what": what}, {}, float(sys.argv[3])) as episode:
            await episode.reset()
            print("stepping", flush=True)
            await episode.step(Action(text="", tokens=(1,), stop_reason="stop"))
    await asyncio.gather(*(play(what) for what in sys.argv[1].split(",")))
    print("done", flush=True)

Interrupts().run(main)
"""


def started(what: str, *, grace_s: float, timeout_s: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, what, str(grace_s), str(timeout_s)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "stepping\n"
    return process


def test_a_thread_that_holds_the_interpreter_ends_the_run_with_the_name_of_its_function():
    process = started("wait,hold,wait", grace_s=2.0, timeout_s=1.0)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert "the interpreter has been held for" in errors
    assert "in a thread: holds (" in errors
    assert "odd_rewards.py" in errors
    assert "environment.placement=process" in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_whose_interpreter_is_held(number: signal.Signals):
    process = started("hold", grace_s=600.0, timeout_s=600.0)
    time.sleep(1.0)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert "the interpreter did not react to a signal for 10 s" in errors
    assert "holds (" in errors


def test_a_run_that_computes_in_its_threads_goes_on():
    """The negative control: code that uses the interpreter all the time, but does not hold it."""
    process = started("compute,compute", grace_s=2.0, timeout_s=30.0)
    assert process.stdout is not None
    # Not `communicate`, which would leave out the lines that reading the first one has buffered.
    assert process.stdout.read() == "stepping\ndone\n"
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


def test_ctrl_c_ends_a_run_whose_environment_waits_without_the_watch():
    process = started("wait", grace_s=600.0, timeout_s=600.0)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT or "KeyboardInterrupt" in errors
    assert "interpreter" not in errors


def test_only_functions_of_environments_outside_libraries_are_named():
    library = Path(os.__file__).parent
    dump = f"""\
Thread 0x01 (most recent call first):
  File "{library}/re/__init__.py", line 166 in match
  File "{library}/site-packages/parsing/tree.py", line 5 in parse
  File "/home_of_a_user/rewards.py", line 7 in reward
  File "/x/rl_rollout/reward_functions.py", line 120 in step
  File "/x/rl_rollout/environment_threads.py", line 150 in _run
Thread 0x02 (most recent call first):
  File "{library}/selectors.py", line 1 in select
  File "/x/rl_rollout/environment_threads.py", line 150 in _run
Current thread 0x03 (most recent call first):
  File "/x/train.py", line 3 in main
"""
    assert place_in(dump) == "reward (/home_of_a_user/rewards.py:7)"
