"""Plays 200 episodes at once, while the engine is paused, aborts requests and gets new weights.

Used for the local engine and for a server. Each episode must end as exactly one trajectory or one recorded failure, and
every sampled token must have the version and the log-prob of the weights that sampled it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from rl_core.interfaces import (
    Completion,
    Environment,
    GenerateRequest,
    GroupRequest,
    InferenceClient,
    SamplingParams,
    StepResult,
    Trajectory,
)
from rl_rollout.chat import TokenCodec
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes
from rl_transformers.testing.inference import Bench

NUM_GROUPS, GROUP_SIZE = 40, 5
TOLERANCE = 1e-4
"""In nats. In float32, batched decoding with a cache and one forward pass differ only by rounding."""


class Chatter(Environment):
    """Takes one to five turns, depending on the episode's number. In every seventh episode the first step raises. Some
    episodes of five turns wait in each step for the next weights, so that several versions sample on any machine.
    """

    numbers: ClassVar[Iterator[int]]
    weights: ClassVar[dict[int, dict[str, Tensor]]]
    """Version → published weights; grows during the test."""

    def __init__(self, row: Any, options: Any) -> None:
        self.number = next(self.numbers)
        self.left = 1 + self.number % 5
        self.num_versions = len(self.weights)

    async def reset(self) -> str:
        return f"{self.number}+"

    async def step(self, action: Any) -> StepResult:
        await asyncio.sleep(0.001 * (self.number % 3))
        while self.number % 50 == 4 and len(self.weights) == self.num_versions:
            await asyncio.sleep(0.01)
        self.num_versions = len(self.weights)
        if self.number % 7 == 6:
            raise ConnectionError("the judge is gone")
        self.left -= 1
        return StepResult(reward=1.0, done=not self.left, observation=f",{self.left}=" if self.left else None)


@attrs.define(eq=False)
class WatchedEngine:
    """Wraps the engine; records the requests under way and the stop reasons of responses."""

    engine: InferenceClient
    running: set[str] = attrs.field(factory=set)
    seen: Counter[str] = attrs.field(factory=Counter)
    reasons: Counter[str] = attrs.field(factory=Counter)

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        self.seen[request.sample_id] += 1
        self.running.add(request.sample_id)
        try:
            completions = await self.engine.generate(request)
        finally:
            self.running.discard(request.sample_id)
        self.reasons.update(completion.stop_reason for completion in completions)
        return completions


@attrs.define(eq=False)
class Disturbance:
    """Pauses, aborts and publishes at random times until `ended` is set."""

    bench: Bench
    watched: WatchedEngine
    weights: dict[int, dict[str, Tensor]]
    ended: bool = False

    async def run(self, seed: int) -> None:
        rng, engine = random.Random(seed), self.watched.engine
        took = 0.0
        while not self.ended:
            await asyncio.sleep(max(took / 2, rng.uniform(0.0, 0.05)))  # the engine runs a third of the time or more
            began = time.monotonic()
            what = rng.choice(["keep", "abort", "wait", "some", "publish", "publish"])
            if what == "some":
                await engine.abort(rng.sample(sorted(self.watched.running), k=len(self.watched.running) // 4))
                continue
            await engine.pause("keep" if what == "publish" else what)  # pyright: ignore[reportArgumentType]
            if what == "publish":
                await self.publish(max(self.weights) + 1)
            await asyncio.sleep(rng.uniform(0.0, 0.02))
            await engine.resume()
            took = time.monotonic() - began

    async def publish(self, version: int) -> None:
        self.weights[version] = self.bench.perturbed(version)
        await self.bench.publish(self.weights[version], version)


async def play_disturbed(bench: Bench, first_version: int) -> tuple[list[Trajectory], WatchedEngine, Disturbance]:
    """Publishes the model's own weights as `first_version`, then plays all episodes."""
    own = {name: tensor.detach().clone() for name, tensor in bench.model.named_parameters()}
    watched = WatchedEngine(bench.client)
    disturbance = Disturbance(bench, watched, {first_version: own})
    await bench.client.pause("keep")
    await bench.publish(own, first_version)
    await bench.client.resume()
    Chatter.numbers, Chatter.weights = itertools.count(), disturbance.weights
    generator = EnvironmentGenerator(
        watched,  # pyright: ignore[reportArgumentType]
        TokenCodec(bench.tokenizer, chat_template_kwargs={}),
        Episodes(environment_of=lambda row: Chatter, limits=Limits(max_turns=8)),
    )
    async with asyncio.TaskGroup() as together:  # if one task fails, the other is cancelled
        together.create_task(disturbance.run(seed=0))
        trajectories = await play_all(generator, first_version)
        disturbance.ended = True
    return trajectories, watched, disturbance


async def play_all(generator: EnvironmentGenerator, first_version: int) -> list[Trajectory]:
    groups = [
        GroupRequest(
            group_id=group,
            row={},
            row_place=f"rows:{group}",
            num_samples=GROUP_SIZE,
            params=SamplingParams(max_tokens=12),
            seed=1,
            start_version=first_version,
        )
        for group in range(NUM_GROUPS)
    ]
    return [trajectory for group in await asyncio.gather(*map(generator.generate, groups)) for trajectory in group]


@torch.no_grad()
def require_own_logprobs(
    bench: Bench, weights: dict[int, dict[str, Tensor]], trajectories: Sequence[Trajectory]
) -> Counter[int]:
    """Compares every sampled token's log-prob with a plain forward pass by the weight version that sampled it. Returns
    the number of tokens of each version.
    """
    counts: Counter[int] = Counter()
    for version, tensors in weights.items():
        bench.now_serving(tensors, version)
        model: Any = bench.model
        for trajectory in trajectories:
            for step in trajectory.steps:
                tokens_T, versions_T = torch.tensor(step.tokens), torch.tensor(step.policy_version)
                own_TV = model(input_ids=tokens_T[None], use_cache=False).logits[0, :-1].double().log_softmax(-1)
                own_T = own_TV.gather(1, tokens_T[1:, None])[:, 0]
                here_T = versions_T[1:] == version
                difference_T = (own_T - torch.tensor(step.rollout_logprobs[1:]).double()).abs()[here_T]
                counts[version] += len(difference_T)
                assert not len(difference_T) or float(difference_T.max()) < TOLERANCE
    return counts


def require_exact_accounting(
    bench: Bench, trajectories: Sequence[Trajectory], watched: WatchedEngine, disturbance: Disturbance
) -> None:
    """Requires that every episode has one result, that every request was sent once, and that every sampled token has
    the log-prob of its version's weights.
    """
    names = [(trajectory.group_id, trajectory.sample_index) for trajectory in trajectories]
    assert names == [(group, index) for group in range(NUM_GROUPS) for index in range(GROUP_SIZE)]
    assert len(names) == 200
    failed = [trajectory for trajectory in trajectories if trajectory.failure is not None]
    assert len(failed) == sum(number % 7 == 6 for number in range(200))
    assert all("ConnectionError: the judge is gone" in (trajectory.failure or "") for trajectory in failed)
    played = [trajectory for trajectory in trajectories if trajectory.failure is None]
    assert Counter(len(trajectory.turns) for trajectory in played) == Counter(
        1 + number % 5 for number in range(200) if number % 7 != 6
    )
    assert all(count == 1 for count in watched.seen.values()), "a request was sent twice"
    assert not watched.running
    assert watched.reasons["abort"] > 20, "too few requests were aborted for this test to show anything"
    assert {turn.stop_reason for trajectory in played for turn in trajectory.turns} <= {"stop", "length"}
    counts = require_own_logprobs(bench, disturbance.weights, played)
    assert len([version for version, count in counts.items() if count]) > 2
    assert sum(counts.values()) == sum(sum(step.sampled) for t in played for step in t.steps)
