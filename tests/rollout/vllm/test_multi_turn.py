"""Conversations of several turns with a real server: exact tokens, the model's own log-probs, and its own expert
choices.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_core.interfaces import (
    Completion,
    Environment,
    GenerateRequest,
    GroupRequest,
    SamplingParams,
    StepResult,
    Trajectory,
)
from rl_core.testing.scripted_engine import Exchange
from rl_core.trainer.update.collate import collate
from rl_rollout.chat import TokenCodec
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes
from rl_rollout.transports.files import files
from rl_rollout.vllm.client import RemoteInferenceClient
from tests.environments.test_exact_tokens import Echo
from tests.rollout.vllm.servers import RunningServer, connect, publish, weights_of

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
"""Nats, float32: paged attention and one forward pass differ only by rounding."""
SHARED = "a long beginning that every conversation has, so that its tokens lie in the prefix cache. " * 3


class Chatters(Environment):
    """Answers with random text for 2 to 4 turns; as messages in every second row, as text in the others."""

    def __init__(self, row: Any, options: Any) -> None:
        self._rng = random.Random(row["seed"])
        self._is_chat = row["seed"] % 2 == 0
        self._left = self._rng.randint(2, 4)

    async def reset(self) -> Any:
        return self._said(SHARED)

    async def step(self, action: Any) -> StepResult:
        self._left -= 1
        observation = self._said("".join(self._rng.choices("0123456789+-= abc", k=self._rng.randint(1, 20))))
        return StepResult(reward=1.0, done=not self._left, observation=observation if self._left else None)

    def _said(self, text: str) -> Any:
        return [{"role": "user", "content": text}] if self._is_chat else text


@attrs.define(eq=False)
class RecordingClient:
    """A client that records requests and answers. It sends some requests twice, as in a retry."""

    client: RemoteInferenceClient
    exchanges: list[Exchange] = attrs.field(factory=list)

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        if len(self.exchanges) % 3 == 0:
            (completion,), _ = await asyncio.gather(self.client.generate(request), self.client.generate(request))
        else:
            (completion,) = await self.client.generate(request)
        self.exchanges.append(Exchange(request, completion))
        return (completion,)


async def play(
    running: RunningServer,
    model: Any,
    *,
    num_episodes: int,
    step_wise: bool,
    environment: type[Environment] = Chatters,
    max_turns: int = 8,
    asks_again: bool = False,
) -> tuple[list[Trajectory], list[Exchange]]:
    """Plays the episodes; returns them with the recorded requests and answers. With `asks_again`, repeats each request
    at the end and returns the answers to these repetitions instead. The server keeps finished answers and computes none
    again.
    """
    client = await connect(running)
    try:
        version = (await client.health()).version + 1
        await publish(client, files, weights_of(model), version)
        watched = RecordingClient(client)
        generator = EnvironmentGenerator(
            watched,  # pyright: ignore[reportArgumentType]
            TokenCodec(AutoTokenizer.from_pretrained(running.model_path), chat_template_kwargs={}),
            Episodes(environment_of=lambda row: environment, limits=Limits(max_turns=max_turns), step_wise=step_wise),
        )
        requests = [
            GroupRequest(
                group_id=number,
                row={"seed": number, "prompt": f"Say {number}."},
                row_place=f"rows:{number}",
                num_samples=2,
                params=SamplingParams(max_tokens=16, stop=("7", "z")),
                seed=3,
                start_version=version,
            )
            for number in range(num_episodes // 2)
        ]
        groups = await asyncio.gather(*map(generator.generate, requests))
        exchanges = watched.exchanges
        if asks_again:
            asked = await asyncio.gather(*(client.generate(each.request) for each in exchanges))
            exchanges = [Exchange(each.request, kept) for each, (kept,) in zip(exchanges, asked, strict=True)]
    finally:
        await client.close()
    trajectories = [trajectory for group in groups for trajectory in group]
    assert [trajectory.failure for trajectory in trajectories] == [None] * num_episodes
    assert all(
        set(np.array(step.policy_version)[np.array(step.sampled)]) == {version}
        for t in trajectories
        for step in t.steps
    )
    return trajectories, exchanges


def require_the_engines_tokens(trajectories: Sequence[Trajectory], exchanges: Sequence[Exchange]) -> None:
    """Requires that each trajectory has exactly the tokens of one session: those sent as prompts and those sampled."""
    sessions: dict[str, list[Exchange]] = {}
    for exchange in exchanges:
        sessions.setdefault(exchange.request.session_id or "", []).append(exchange)
    by_tokens = {
        tuple(turns[-1].request.prompt_tokens + turns[-1].completion.tokens): turns for turns in sessions.values()
    }
    assert len(sessions) == len(trajectories)
    for trajectory in trajectories:
        turns = by_tokens[tuple(trajectory.steps[-1].tokens)]
        batch = collate([trajectory])
        sampled = batch["sampled"]
        assert batch["tokens"][sampled].tolist() == [token for turn in turns for token in turn.completion.tokens]
        logprobs = [logprob for turn in turns for logprob in turn.completion.logprobs]
        assert batch["rollout_logprobs"][sampled].tolist() == pytest.approx(logprobs, abs=1e-7)
        for turn, following in itertools.pairwise(turns):
            have = turn.request.prompt_tokens + turn.completion.tokens
            assert following.request.prompt_tokens[: len(have)] == have


@torch.no_grad()
def own_scores(model: Any, tokens: Sequence[int]) -> tuple[Any, Any]:
    """The log-prob of each token from the second on and, for a MoE model, the router's choices [tokens, layers, 2]."""
    tokens_T = torch.tensor(tokens)
    is_moe = getattr(model.config, "num_experts", 0) > 0
    output = model(input_ids=tokens_T[None], use_cache=False, **({"output_router_logits": True} if is_moe else {}))
    logprobs_T = output.logits[0, :-1].double().log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0]
    routes = torch.stack([logits.topk(2, dim=-1).indices for logits in output.router_logits], 1) if is_moe else None
    return logprobs_T, routes


def load(running: RunningServer) -> Any:
    return AutoModelForCausalLM.from_pretrained(running.model_path, dtype=torch.float32).eval()


@pytest.mark.parametrize("step_wise", [False, True])
async def test_dozens_of_conversations_have_exactly_the_servers_tokens(dense_server: RunningServer, step_wise: bool):
    model = load(dense_server)
    trajectories, exchanges = await play(dense_server, model, num_episodes=48, step_wise=step_wise)
    require_the_engines_tokens(trajectories, exchanges)
    assert {len(trajectory.turns) for trajectory in trajectories} == {2, 3, 4}
    for trajectory in trajectories:
        for step in trajectory.steps:
            own_T, _ = own_scores(model, step.tokens)
            sampled_T = torch.tensor(step.sampled[1:])
            difference_T = (own_T - torch.tensor(step.rollout_logprobs[1:]).double())[sampled_T].abs()
            assert float(difference_T.max()) < TOLERANCE


async def test_two_hundred_episodes_with_tools_have_exactly_the_servers_tokens(dense_server: RunningServer):
    model, tools = load(dense_server), {"environment": Echo, "max_turns": 3, "asks_again": True}
    trajectories, kept = await play(dense_server, model, num_episodes=200, step_wise=False, **tools)
    require_the_engines_tokens(trajectories, kept)
    assert len({len(trajectory.turns) for trajectory in trajectories}) > 2
    assert sum(trajectory.metrics["wrong_calls"] for trajectory in trajectories) > 50
    # Negative control: one changed token in the record is noticed.
    changed = attrs.evolve(kept[7].completion, tokens=(3, *kept[7].completion.tokens[1:]))
    with pytest.raises((AssertionError, KeyError)):
        require_the_engines_tokens(trajectories, [*kept[:7], Exchange(kept[7].request, changed), *kept[8:]])


async def test_routed_experts_of_several_turns_are_the_routers_own_choices(moe_server: RunningServer):
    model = load(moe_server)
    trajectories, exchanges = await play(moe_server, model, num_episodes=24, step_wise=False)
    require_the_engines_tokens(trajectories, exchanges)
    for trajectory in trajectories:
        batch = collate([trajectory])
        assert batch["routed"].tolist() == [True] * (batch.num_tokens - 1) + [False]
        _, own_TLK = own_scores(model, trajectory.steps[0].tokens)
        routed_TLK = batch["routed_experts"].numpy()
        np.testing.assert_array_equal(np.sort(routed_TLK[:-1], -1), np.sort(own_TLK.numpy()[:-1], -1))
