"""Compares reward functions in threads with reward functions in processes.

Run: python benchmarks/reward_processes.py
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from rl_core.interfaces import Action
from rl_rollout.environment_pool import EnvironmentPool
from rl_rollout.reward_functions import RewardFunctionsEnvironment

NUM_RESPONSES, NUM_SEQUENTIAL = 1000, 200
ACTION = Action(text="abc " * 500, tokens=tuple(range(1000)), stop_reason="stop")
ROW = {"prompt": "x" * 1000, "answer": "5"}


def compares(completions: list[str], answer: list[str]) -> list[float]:
    return [float(completions[0] == answer[0])]


def computes(completions: list[str], **_: Any) -> list[float]:
    begun = time.thread_time()
    while time.thread_time() - begun < 0.002:
        pass
    return [1.0]


def waits(completions: list[str], **_: Any) -> list[float]:
    time.sleep(0.2)
    return [1.0]


async def measure(placement: Any, function: str) -> str:
    pool = EnvironmentPool(placement=placement)
    options = {"reward_functions": [f"{Path(__file__).stem}:{function}"]}

    async def score() -> None:
        async with pool.opened(RewardFunctionsEnvironment, ROW, options, 300.0) as episode:
            await episode.reset()
            await episode.step(ACTION)

    begun = time.monotonic()
    await score()
    first_s = time.monotonic() - begun
    begun, begun_cpu = time.monotonic(), time.process_time()
    await asyncio.gather(*(score() for _ in range(NUM_RESPONSES)))
    at_once_s, cpu_s = time.monotonic() - begun, time.process_time() - begun_cpu
    begun = time.monotonic()
    for _ in range(NUM_SEQUENTIAL):
        await score()
    each_s = (time.monotonic() - begun) / NUM_SEQUENTIAL
    await pool.aclose()
    return (
        f"{function}, {placement}: first {first_s:.2f} s, {NUM_RESPONSES} at once {at_once_s:.2f} s, one after another "
        f"{each_s * 1e3:.2f} ms each, controller {cpu_s / NUM_RESPONSES * 1e3:.2f} ms each"
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    for function in ("compares", "computes", "waits"):
        for placement in ("thread", "process"):
            print(asyncio.run(measure(placement, function)), flush=True)
