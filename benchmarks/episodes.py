"""Processor time that the event loop spends on a one-turn episode, apart from its environment and its engine.

Groups of 16 samples run concurrently; environment and engine answer immediately.

Run: python benchmarks/episodes.py [--groups 64] [--rounds 9]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Mapping
from typing import Any

from rl_core.interfaces import Completion, Environment, GenerateRequest, GroupRequest, SamplingParams, StepResult
from rl_rollout.chat import TokenCodec
from rl_rollout.generator import EnvironmentGenerator, Episodes
from rl_transformers.testing.models import character_tokenizer

SAMPLES = 16


class OneTurn(Environment):
    """An environment that ends after the first response."""

    placement = "in_process"

    def __init__(self, row: Mapping[str, Any], options: Mapping[str, Any]) -> None: ...

    async def reset(self) -> str:
        return "1+1="

    async def step(self, action: object) -> StepResult:
        return StepResult(reward=1.0, done=True)


class Answers:
    """An engine that returns the same completion in the next iteration of the event loop."""

    def __init__(self, end_token: int) -> None:
        self._end_token = end_token

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        await asyncio.sleep(0)
        return (
            Completion(tokens=(5, self._end_token), logprobs=(-1.0, -1.0), policy_versions=(0, 0), stop_reason="stop"),
        )


async def measured(num_groups: int, rounds: int) -> list[float]:
    """Milliseconds of processor time per episode in each round but the first, which warms up."""
    tokenizer: Any = character_tokenizer()
    generator = EnvironmentGenerator(
        Answers(tokenizer.eos_token_id),
        TokenCodec(tokenizer, chat_template_kwargs={}),
        Episodes(environment_of=lambda row: OneTurn),
    )
    requests = [
        GroupRequest(
            group_id=number,
            row={"prompt": "1+1="},
            row_place=f"rows:{number}",
            num_samples=SAMPLES,
            params=SamplingParams(max_tokens=4),
            seed=0,
            start_version=0,
        )
        for number in range(num_groups)
    ]
    taken_ms = []
    for _ in range(1 + rounds):
        started = time.process_time()
        await asyncio.gather(*map(generator.generate, requests))
        taken_ms.append((time.process_time() - started) / num_groups / SAMPLES * 1e3)
    await generator.aclose()
    return taken_ms[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    taken_ms = asyncio.run(measured(arguments.groups, arguments.rounds))
    print(f"ms of processor time per episode: median {statistics.median(taken_ms):.3f}, least {min(taken_ms):.3f}")


if __name__ == "__main__":
    main()
