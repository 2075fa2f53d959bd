"""Episodes per second, with and without faulty environments: 1 % sleep, 1 % block, 1 % raise and 1 % hang.

Runs with and without these faulty environments alternate; the ratio shows what the faults cost the other episodes.

A thousand episodes run concurrently, each in its own thread; a new one begins when another ends. An environment has two
turns and blocks for 0.2 s in each. In their first turn, the faulty ones also sleep or block for 1 s, raise, or hang
until the deadline of 10 s. There is no model: the engine takes 4 s for a response. The rate counts the first nine
tenths of the episodes. The whole time also includes the wait for the deadline at the end of the batch.

    python benchmarks/odd_episodes.py [--episodes 5000] [--at-once 1000] [--turns 3]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from rl_core.interfaces import Completion, Environment, GenerateRequest, GroupRequest, SamplingParams, StepResult
from rl_rollout.chat import TokenCodec
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes
from rl_transformers.testing.models import character_tokenizer

TURN_S, RESPONSE_S, DEADLINE_S = 0.2, 4.0, 10.0
TROUBLE = {7: "sleeps", 31: "blocks", 57: "raises", 83: "hangs"}
"""Fault by the episode's number modulo 100."""
_NEVER = threading.Event()


class Odd(Environment):
    """A two-turn environment; a fault happens in the first turn."""

    def __init__(self, row: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._trouble = TROUBLE.get(row["number"] % 100) if row["has_trouble"] else None
        self._turns = 0

    async def reset(self) -> str:
        return "1+1="

    async def step(self, action: object) -> StepResult:
        self._turns += 1
        trouble, self._trouble = self._trouble, None
        if trouble == "sleeps":
            await asyncio.sleep(5 * TURN_S)
        elif trouble == "blocks":
            time.sleep(5 * TURN_S)
        elif trouble == "raises":
            raise ConnectionError("the judge is gone")
        elif trouble == "hangs":
            _NEVER.wait()
        time.sleep(TURN_S)
        return StepResult(reward=1.0, done=self._turns == 2, observation="2" if self._turns < 2 else None)


class Answers:
    """An engine that returns the same completion after `RESPONSE_S` seconds."""

    def __init__(self, end_token: int) -> None:
        self._end_token = end_token

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        await asyncio.sleep(RESPONSE_S)
        return (
            Completion(tokens=(5, self._end_token), logprobs=(-1.0, -1.0), policy_versions=(0, 0), stop_reason="stop"),
        )


async def play(
    num_episodes: int,
    at_once: int,
    *,
    has_trouble: bool,
    timeout_s: float,
    on_end: Callable[[int], None] = lambda num_ended: None,
) -> tuple[list[float], Counter[str]]:
    """The times in seconds at which episodes ended, and the number of episodes by kind of failure (`""`: none)."""
    tokenizer: Any = character_tokenizer()
    generator = EnvironmentGenerator(
        Answers(tokenizer.eos_token_id),
        TokenCodec(tokenizer, chat_template_kwargs={}),
        Episodes(
            environment_of=lambda row: Odd,
            limits=Limits(max_turns=2, environment_timeout_s=timeout_s),
            max_concurrency=at_once,
        ),
    )
    requests = (
        GroupRequest(
            group_id=number,
            row={"prompt": "1+1=", "number": number, "has_trouble": has_trouble},
            row_place=f"rows:{number}",
            num_samples=1,
            params=SamplingParams(max_tokens=4),
            seed=0,
            start_version=0,
        )
        for number in range(num_episodes)
    )
    started = time.monotonic()
    ended_s: list[float] = []

    async def ended(request: GroupRequest) -> str:
        (trajectory,) = await generator.generate(request)
        ended_s.append(time.monotonic() - started)
        on_end(len(ended_s))
        return "" if trajectory.failure is None else trajectory.failure_kind

    kinds = Counter(await asyncio.gather(*map(ended, requests)))
    await generator.aclose()
    return ended_s, kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=5000)
    parser.add_argument("--at-once", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3, help="measurements with and without faults")
    arguments = parser.parse_args()
    ratios, whole = [], []
    for turn in range(arguments.turns):
        sides = [
            asyncio.run(play(arguments.episodes, arguments.at_once, has_trouble=trouble, timeout_s=DEADLINE_S))
            for trouble in (False, True)
        ]
        (calm_s, _), (odd_s, kinds) = sides
        most = arguments.episodes * 9 // 10
        ratios.append(calm_s[most - 1] / odd_s[most - 1])
        whole.append(calm_s[-1] / odd_s[-1])
        print(
            f"turn {turn}, without and with faults: "
            f"{most / calm_s[most - 1]:.0f} and {most / odd_s[most - 1]:.0f} episodes/s, {dict(kinds)}"
        )
    print(
        f"rate with faults over rate without: {statistics.median(ratios):.2f}, "
        f"for the whole time {statistics.median(whole):.2f}"
    )


if __name__ == "__main__":
    main()
