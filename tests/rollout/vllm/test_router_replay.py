"""Router replay with the routes of real vLLM servers: how far Megatron's log-probs are from the engine's.

Rounding in bfloat16 changes some expert choices, so engine and trainer send some tokens to different experts. In
float32 they agree, and replay must not reduce the agreement. docs/performance.md has the figures; `-s` prints them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from rl_core.batch import Batch
from rl_core.interfaces import Completion, GenerateRequest
from rl_core.workers import MicroBatchLimits
from rl_megatron import MegatronOptions, megatron
from rl_transformers.testing.backend import PRELOADED
from rl_transformers.testing.bfloat16 import Bfloat16Worker
from rl_transformers.testing.parity import Measurement, write_down
from rl_transformers.testing.ranks import RankGroup
from rl_transformers.testing.reference_worker import ReferenceWorker
from tests.rollout.vllm.servers import (
    RunningServer,
    connect,
    make_spec,
    request,
    start_servers,
    stop_servers,
    write_model,
)
from tests.rollout.vllm.trainers import policy_spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PRELOADED["rl_megatron.rank.worker"] = None
NUM_SEQUENCES, RESPONSE_TOKENS = 64, 64
ROUTED = ("routed_experts", "routed")


@attrs.frozen(kw_only=True)
class Differences:
    """|engine − trainer| log-probs, in nats, over all sampled tokens."""

    mean: float
    largest: float


@pytest.fixture(scope="module")
def bf16_server(ray_for_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of a model like the float32 server's, stored and computed in bfloat16."""
    directory = tmp_path_factory.mktemp("bf16")
    spec = make_spec(
        write_model(directory / "model", num_experts=8, dtype="bfloat16"),
        directory,
        enable_return_routed_experts=True,
        model_dtype="bfloat16",
    )
    running = start_servers(spec)
    yield running[0]
    stop_servers(running)


def differences(
    server: RunningServer, directory: Path, *, bf16: bool, batch: Batch | None = None
) -> dict[str, Differences]:
    """The differences with and without replay."""
    batch = batch or asyncio.run(sampled_batch(server))
    return {
        "replay": scored(batch, server, MegatronOptions(moe_enable_routing_replay=True), directory, bf16=bf16),
        "own routers": scored(batch.without_columns(*ROUTED), server, MegatronOptions(), directory, bf16=bf16),
    }


async def sampled_batch(server: RunningServer) -> Batch:
    """Prompts with responses of the server, and its log-probs and routes."""
    client = await connect(server)
    dice = random.Random(0)
    prompts = [tuple(dice.randrange(40) for _ in range(dice.randint(4, 40))) for _ in range(NUM_SEQUENCES)]
    asked = [
        request(f"replay-{i}", prompt, seed=i, max_tokens=RESPONSE_TOKENS, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    try:
        answers = await asyncio.gather(*(client.generate(each) for each in asked))
    finally:
        await client.close()
    return Batch.from_sequences([sequence(each, answer) for each, (answer,) in zip(asked, answers, strict=True)])


def sequence(asked: GenerateRequest, answer: Completion) -> dict[str, Any]:
    assert answer.routed_experts is not None
    sampled = np.repeat([False, True], [len(asked.prompt_tokens), len(answer.tokens)])
    routes = answer.routed_experts
    return {
        "tokens": [*asked.prompt_tokens, *answer.tokens],
        "sampled": sampled,
        "loss_mask": sampled,
        "rollout_logprobs": [0.0] * len(asked.prompt_tokens) + list(answer.logprobs),
        "routed_experts": np.concatenate([routes, np.zeros_like(routes[:1])]),
        "routed": np.arange(len(sampled)) < len(routes),
    }


def scored(
    batch: Batch, server: RunningServer, options: MegatronOptions, directory: Path, *, bf16: bool
) -> Differences:
    spec = policy_spec(server.model_path, options, optimizer=None, bf16=bf16)
    group = RankGroup(megatron, spec, 1, directory=directory, timeout_s=300)
    logprobs_T = group.forward(batch, MicroBatchLimits(max_sequences=16), temperature=1.0)["logprobs"]
    group.close()
    difference_T = (logprobs_T - batch["rollout_logprobs"])[batch["sampled"]].abs()
    assert len(difference_T) == NUM_SEQUENCES * RESPONSE_TOKENS
    return Differences(mean=float(difference_T.mean()), largest=float(difference_T.max()))


def plain_error(server: RunningServer, batch: Batch) -> float:
    """The mean absolute difference between transformers' log-probs in bfloat16 and in float32, over the sampled tokens;
    with the batch's routes if it has any."""
    spec = policy_spec(server.model_path, None, optimizer=None, bf16=True)
    plan = [[i] for i in range(batch.num_sequences)]
    exact_T, rounded_T = (
        worker(spec).forward(batch, plan, temperature=1.0)["logprobs"] for worker in (ReferenceWorker, Bfloat16Worker)
    )
    return float((exact_T - rounded_T)[batch["sampled"]].abs().mean())


@pytest.mark.parity
def test_replay_brings_the_trainer_closer_to_a_bf16_engine(bf16_server: RunningServer, tmp_path: Path):
    batch = asyncio.run(sampled_batch(bf16_server))
    found = differences(bf16_server, tmp_path, bf16=True, batch=batch)
    print("\nbfloat16", found)
    rows = {
        "bf16 engine and trainer": (found["own routers"], batch.without_columns(*ROUTED)),
        "bf16 engine and replaying trainer": (found["replay"], batch),
    }
    for quantity, (difference, scored_batch) in rows.items():
        unit = 2**0.5 * plain_error(bf16_server, scored_batch)
        measurement = Measurement(
            backend="vllm",
            mesh="Qwen3-MoE, Megatron trains",
            quantity=quantity,
            difference=difference.mean / unit,
            limit=1.5,
            unit=unit,
        )
        write_down(measurement)
        print(quantity, measurement)
        assert measurement.difference <= 1.5, "expected at most 1.5 times the error of two plain bfloat16 computations"
    assert found["replay"].mean < found["own routers"].mean
    assert found["replay"].largest < found["own routers"].largest


def test_replay_is_as_close_to_a_float32_engine_as_the_routers_own_choices(moe_server: RunningServer, tmp_path: Path):
    found = differences(moe_server, tmp_path, bf16=False)
    print("\nfloat32", found)
    assert found["replay"].mean <= found["own routers"].mean + 1e-6, "replay may differ only by float32 rounding"
    assert found["replay"].largest < 1e-4
