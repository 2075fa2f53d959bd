"""Training uses exactly the tokens that the engine sampled, over hundreds of episodes with tools.

A recorder around the engine logs each request and each answer; the trained batches are compared with this log.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import pytest
import torch

from rl_core.interfaces import Completion, GenerateRequest, GroupRequest, SamplingParams, Trajectory
from rl_core.testing.scripted_engine import Exchange
from rl_core.trainer.update.collate import collate, merged
from rl_environments.tools import BrokenCall, Call, CallFormat, ToolEnvironment, tool
from rl_rollout.chat import TokenCodec
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes
from rl_rollout.local.engine import LocalEngine
from rl_rollout.local.model import load_model
from tests.rollout.chat_templates import tokenizer_of

NUM_GROUPS, NUM_SAMPLES = 50, 4


class ReadsCallsEverywhere:
    """Derives calls from the checksum of any text, because a random model writes no real calls."""

    name = "anything"

    def read(self, text: str) -> Sequence[Call | BrokenCall]:
        number = zlib.crc32(text.encode())
        calls: list[Call | BrokenCall] = [
            Call(name="repeat", arguments={"text": text, "times": number % 3}),
            Call(name="repeat", arguments={"text": 1}),
            Call(name="reapet", arguments={}),
            BrokenCall(problem="unreadable: " + text[:20]),
            Call(name="divide", arguments={"by": number % 2}),
        ]
        return calls[number % 5 : number % 5 + number // 5 % 3]


class Echo(ToolEnvironment):
    """One of its tools repeats the policy's text, so any text may come between two turns."""

    call_format: ClassVar[CallFormat | None] = ReadsCallsEverywhere()

    @tool
    def repeat(self, text: str, times: int) -> str:
        """The text, repeated."""
        return text * times

    @tool
    async def divide(self, by: int) -> float:
        """One divided by a number."""
        return 1 / by

    async def judge(self, answer: str) -> float:
        return float(len(answer) % 2)


@attrs.define(eq=False)
class Recorder:
    """A Sampler that records each request to the engine and its answer."""

    engine: Any
    exchanges: list[Exchange] = attrs.field(factory=list)

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        (completion,) = await self.engine.generate(request)
        self.exchanges.append(Exchange(request, completion))
        return (completion,)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = tokenizer_of("tool_chatml")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=4096,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    path = tmp_path_factory.mktemp("exact") / "model"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


async def play(path: str, prompt: Any, *, step_wise: bool) -> tuple[list[Trajectory], list[Exchange]]:
    def load() -> Any:
        return load_model(path, dtype="float32", device="cpu", model_kwargs={}), None

    engine = await LocalEngine.start(load, max_num_seqs=64, timeout_s=240, num_threads=1)
    try:
        recorder = Recorder(engine)
        generator = EnvironmentGenerator(
            recorder,  # pyright: ignore[reportArgumentType]
            TokenCodec(tokenizer_of("tool_chatml"), chat_template_kwargs={}),
            Episodes(environment_of=lambda row: Echo, limits=Limits(max_turns=4), step_wise=step_wise),
        )
        groups = await asyncio.gather(
            *(
                generator.generate(
                    GroupRequest(
                        group_id=number,
                        row={"prompt": prompt(number)},
                        row_place=f"rows:{number}",
                        num_samples=NUM_SAMPLES,
                        params=SamplingParams(max_tokens=12),
                        seed=0,
                        start_version=0,
                    )
                )
                for number in range(NUM_GROUPS)
            )
        )
        await generator.aclose()
    finally:
        await engine.close()
    return [trajectory for group in groups for trajectory in group], recorder.exchanges


def differences(trajectories: Sequence[Trajectory], sessions: Mapping[int, Sequence[Exchange]]) -> list[int]:
    """Indices of the episodes whose trained tokens, mask or log-probs differ in any bit from the engine's log."""
    wrong = []
    for number, trajectory in enumerate(trajectories):
        batch, turns = merged(collate([trajectory]))[0], sessions[number]
        sampled = batch["sampled"]
        tokens = [token for turn in turns for token in turn.completion.tokens]
        logprobs = torch.tensor([each for turn in turns for each in turn.completion.logprobs], dtype=torch.float32)
        last = turns[-1].request.prompt_tokens + turns[-1].completion.tokens
        if (
            batch["tokens"][sampled].tolist() != tokens
            or not torch.equal(batch["loss_mask"], sampled)
            or not torch.equal(batch["rollout_logprobs"][sampled], logprobs)
            or batch["tokens"].tolist() != list(last)
        ):
            wrong.append(number)
    return wrong


@pytest.mark.parametrize("step_wise", [False, True], ids=["one sequence", "merged steps"])
@pytest.mark.parametrize("kind", ["messages", "text"])
async def test_the_tokens_trained_on_are_those_that_the_engine_sampled(model: str, kind: str, step_wise: bool):
    def prompt(number: int) -> Any:
        return f"Say {number}" if kind == "text" else [{"role": "user", "content": f"Say {number}"}]

    trajectories, exchanges = await play(model, prompt, step_wise=step_wise)
    assert [trajectory.failure for trajectory in trajectories] == [None] * NUM_GROUPS * NUM_SAMPLES
    by_session: dict[str, list[Exchange]] = {}
    for exchange in exchanges:
        by_session.setdefault(exchange.request.session_id or "", []).append(exchange)
    assert len(by_session) == len(trajectories) == 200
    # Session ids count episodes in the order in which they begin, which is also the order of the trajectories.
    in_order = sorted(by_session, key=lambda session: int(session.rpartition("-")[2]))
    sessions = {number: by_session[session] for number, session in enumerate(in_order)}
    assert differences(trajectories, sessions) == []

    # The comparison proves something only with several turns, wrong calls, and tokens that no text encodes to.
    assert {len(trajectory.turns) for trajectory in trajectories} == {1, 2, 3, 4}
    assert sum(trajectory.metrics["wrong_calls"] for trajectory in trajectories) > 50
    codec = TokenCodec(tokenizer_of("tool_chatml"), chat_template_kwargs={})
    odd = sum(codec.encode_text(codec.response_text(e.completion.tokens)) != e.completion.tokens for e in exchanges)
    assert odd > 100
    # Negative control: a log in which one token or the log-probs were changed is noticed.
    first = sessions[7][0]
    for field, value in (
        ("tokens", (3, *first.completion.tokens[1:])),
        ("logprobs", (-0.5,) * len(first.completion.logprobs)),
    ):
        changed = Exchange(first.request, attrs.evolve(first.completion, **{field: value}))
        assert differences(trajectories, {**sessions, 7: [changed, *sessions[7][1:]]}) == [7]
