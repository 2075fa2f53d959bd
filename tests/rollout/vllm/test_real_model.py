"""SmolLM2-135M-Instruct in a real vLLM server: it scores real text as transformers does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rl_core.workers import MicroBatchLimits
from rl_fsdp import FsdpOptions, fsdp
from rl_transformers.testing.bfloat16 import is_scored
from rl_transformers.testing.parity import Measurement, write_down
from rl_transformers.testing.ranks import RankGroup
from tests.real_model.conftest import Reference, reference
from tests.real_model.real_text import plain_logprobs, real_batch
from tests.real_model.test_backends import spec_of
from tests.rollout.vllm.servers import RunningServer, connect, make_spec, start_servers, stop_servers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["reference"]
LIMITS = {"kv_cache_memory_bytes": 64 * 2**20, "max_model_len": 512}


@pytest.fixture(scope="module")
def server(
    reference: Reference, ray_for_servers: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A server that computes in float32."""
    spec = make_spec(reference.model, tmp_path_factory.mktemp("real"), engine_init_kwargs=LIMITS)
    running = start_servers(spec)
    yield running[0]
    stop_servers(running)


@pytest.fixture(scope="module")
def bf16_server(
    reference: Reference, ray_for_servers: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A server that computes in bfloat16."""
    spec = make_spec(
        reference.model, tmp_path_factory.mktemp("bf16"), engine_init_kwargs=LIMITS, model_dtype="bfloat16"
    )
    running = start_servers(spec)
    yield running[0]
    stop_servers(running)


async def logprobs_of(server: RunningServer, reference: Reference) -> Tensor:
    """[2000] log-probs of the scored tokens."""
    client = await connect(server)
    (logprobs,) = (await client.score(reference.sequences)).values()
    await client.close()
    return torch.tensor([value for sequence in logprobs for value in sequence[1:]])


@pytest.mark.parity
def test_a_bf16_engine_errs_by_little_more_than_plain_transformers(
    bf16_server: RunningServer, reference: Reference, tmp_path: Path
):
    engine_T = asyncio.run(logprobs_of(bf16_server, reference))
    batch = real_batch(reference.sequences)
    group = RankGroup(fsdp, spec_of(reference.model, FsdpOptions(), bf16=True), 1, directory=tmp_path, timeout_s=600)
    trainer_T = group.forward(batch, MicroBatchLimits(max_tokens=600), temperature=1.0)["logprobs"]
    group.close()
    plain_T = plain_logprobs(reference.model, reference.sequences, torch.bfloat16)
    plain = mean_difference(plain_T, reference.logprobs_T)
    both = mean_difference(engine_T, trainer_T[is_scored(batch)])
    for quantity, error, unit in (
        ("bf16 logprobs", mean_difference(engine_T, reference.logprobs_T), plain),
        ("bf16 engine and trainer", both, 2**0.5 * plain),
    ):
        require_within(quantity, error / unit, 1.5, mesh="SmolLM2-135M-Instruct, FSDP trains", unit=unit)


def mean_difference(a_T: Tensor, b_T: Tensor) -> float:
    return (a_T - b_T).abs().mean().item()


@pytest.fixture(scope="module")
def difference_T(server: RunningServer, reference: Reference) -> Tensor:
    """[2000] vLLM's log-probs minus those of transformers, in float32."""
    return asyncio.run(logprobs_of(server, reference)) - reference.logprobs_T


def test_real_text_scores_on_average_as_in_transformers(difference_T: Tensor):
    """The root mean square is 1.0e-5, and 5.8e-5 if a single matrix of the model is multiplied by 1.0001."""
    assert len(difference_T) == 2000
    require_within("log-probs, RMS", difference_T.square().mean().sqrt().item(), 2e-5)


@pytest.mark.xfail(
    torch.backends.cpu.get_cpu_capability() == "AVX2",
    reason="with vLLM's kernels for AVX2, rounding at the worst-conditioned of the 2,000 tokens gives 1.2e-4",
    raises=AssertionError,
    strict=False,
)
def test_real_text_scores_as_in_transformers(difference_T: Tensor):
    """The largest difference is decided by rounding at one token: 4.5e-5 with AVX-512."""
    require_within("log-probs", difference_T.abs().max().item(), 1e-4)


def require_within(
    quantity: str, difference: float, limit: float, *, mesh: str = "SmolLM2-135M-Instruct", unit: float | None = None
) -> None:
    """Writes a row of the parity table, and fails if the difference exceeds the limit."""
    measurement = Measurement(
        backend="vllm", mesh=mesh, quantity=quantity, difference=difference, limit=limit, unit=unit
    )
    write_down(measurement)
    print(f"\nvLLM: {quantity} {measurement}")
    assert difference <= limit, f"{quantity}: {measurement}"
