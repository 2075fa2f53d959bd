"""Two hundred episodes of several turns at a time, on an engine that is paused, aborted and updated meanwhile.

Each episode ends as exactly one trajectory or one stated failure, and every sampled token has the log-prob and the
version of the weights that sampled it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from rl_core.interfaces import Completion, GenerateRequest, GroupRequest, SamplingParams, StepResult, Trajectory
from rl_core.testing.inference import Bench, make_bench
from rl_core.testing.models import make_checkpoint
from rl_rollout.chat import TokenCodec
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes
from rl_rollout.local.engine import LocalEngine
from rl_rollout.local.model import load_model
from rl_rollout.transports.files import files

NUM_GROUPS, GROUP_SIZE = 40, 5
TOLERANCE = 1e-4
"""Nats, float32: batched decoding with a cache against one forward pass differs by rounding alone."""


class Chatters:
    """One to five turns, by the row; every seventh episode's judge is gone after its first turn."""

    num_started = 0

    def __init__(self, row: Any, options: Any) -> None:
        self.number = Chatters.num_started
        Chatters.num_started += 1
        self.left = 1 + self.number % 5

    async def reset(self) -> str:
        return f"{self.number}+"

    async def step(self, action: Any) -> StepResult:
        await asyncio.sleep(0.001 * (self.number % 3))
        if self.number % 7 == 6:
            raise ConnectionError("the judge is gone")
        self.left -= 1
        return StepResult(reward=1.0, done=not self.left, observation=f",{self.left}=" if self.left else None)

    async def close(self) -> None: ...


@attrs.define(eq=False)
class Watched:
    """The engine, and the requests that it works on."""

    engine: LocalEngine
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


async def disturb(bench: Bench, watched: Watched, weights: dict[int, dict[str, Tensor]], rng: random.Random) -> None:
    """Pauses, aborts and publishes at random, until cancelled."""
    engine = watched.engine
    while True:
        await asyncio.sleep(rng.uniform(0.0, 0.05))
        what = rng.choice(["keep", "abort", "wait", "some", "publish"])
        if what == "some":
            await engine.abort(rng.sample(sorted(watched.running), k=len(watched.running) // 4))
            continue
        await engine.pause("keep" if what == "publish" else what)  # pyright: ignore[reportArgumentType]
        if what == "publish":
            version = len(weights)
            weights[version] = bench.perturbed(version)
            await bench.publish(weights[version], version)
        await asyncio.sleep(rng.uniform(0.0, 0.02))
        await engine.resume()


async def play_all(generator: EnvironmentGenerator) -> list[Trajectory]:
    groups = [
        GroupRequest(
            group_id=group,
            row={},
            row_place=f"rows:{group}",
            num_samples=GROUP_SIZE,
            params=SamplingParams(max_tokens=12),
            seed=1,
            start_version=0,
        )
        for group in range(NUM_GROUPS)
    ]
    return [trajectory for group in await asyncio.gather(*map(generator.generate, groups)) for trajectory in group]


@torch.no_grad()
def require_own_logprobs(
    bench: Bench, weights: dict[int, dict[str, Tensor]], trajectories: Sequence[Trajectory]
) -> Counter[int]:
    """Compares every sampled token with a plain forward pass of the weights it names; the tokens of each version."""
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


@pytest.mark.slow
def test_two_hundred_episodes_are_accounted_for_whatever_happens_to_the_engine(tmp_path: Path):
    path = str(make_checkpoint(tmp_path / "model"))
    watched: Watched
    with asyncio.Runner() as runner:

        async def start() -> LocalEngine:
            def load() -> Any:
                return load_model(path, dtype="float32", device="cpu", model_kwargs={}), None

            return await LocalEngine.start(load, max_num_seqs=64, timeout_s=120, num_threads=1)

        engine = runner.run(start())
        bench = make_bench(engine, files, path, runner)
        weights = {0: {name: tensor.clone() for name, tensor in bench.model.named_parameters()}}
        watched = Watched(engine)

        async def run() -> list[Trajectory]:
            await bench.publish(weights[0], 0)
            generator = EnvironmentGenerator(
                watched,  # pyright: ignore[reportArgumentType]
                TokenCodec(bench.tokenizer, chat_template_kwargs={}),
                Episodes(environment_of=lambda row: Chatters, limits=Limits(max_turns=8)),
            )
            disturbing = asyncio.create_task(disturb(bench, watched, weights, random.Random(0)))
            trajectories = await play_all(generator)
            assert not disturbing.done(), "the disturbance ended before the episodes"
            disturbing.cancel()
            return trajectories

        trajectories = bench.run(run())
        runner.run(engine.close())

    names = [(trajectory.group_id, trajectory.sample_index) for trajectory in trajectories]
    assert names == [(group, index) for group in range(NUM_GROUPS) for index in range(GROUP_SIZE)]
    assert Chatters.num_started == len(names) == 200
    failed = [trajectory for trajectory in trajectories if trajectory.failure is not None]
    assert len(failed) == sum(number % 7 == 6 for number in range(200))
    assert all("ConnectionError: the judge is gone" in (trajectory.failure or "") for trajectory in failed)
    played = [trajectory for trajectory in trajectories if trajectory.failure is None]
    assert Counter(len(trajectory.turns) for trajectory in played) == Counter(
        1 + number % 5 for number in range(200) if number % 7 != 6
    )
    assert all(count == 1 for count in watched.seen.values()), "a sample was asked for twice"
    assert not watched.running
    assert watched.reasons["abort"] > 20, "the disturbance gave hardly a sample back"
    assert {turn.stop_reason for trajectory in played for turn in trajectory.turns} <= {"stop", "length"}
    counts = require_own_logprobs(bench, weights, played)
    assert len([version for version, count in counts.items() if count]) > 2
    assert sum(counts.values()) == sum(sum(step.sampled) for t in played for step in t.steps)
