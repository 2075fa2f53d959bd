"""Engines with several workers, started as a run starts them: they compute what one worker would, and each worker
reports its own weights.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import attrs
import psutil
import pytest
import pytest_asyncio
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_core.errors import RLError, WeightSyncError
from rl_core.interfaces import Completion, WeightTransport
from rl_rollout.transports.broadcast import BroadcastTransport
from rl_rollout.transports.files import FilesTransport
from rl_rollout.transports.shared_memory import SharedMemoryTransport
from rl_rollout.vllm.client import RemoteInferenceClient
from rl_rollout.vllm.connection import open_session
from rl_rollout.vllm.served_engine import _fault
from tests.rollout.vllm.other_transport import Fault, OtherTransport
from tests.rollout.vllm.servers import (
    TOKENS,
    RunningServer,
    command_line,
    connect,
    make_spec,
    paused_under_way,
    publish,
    request,
    start_servers,
    stop_servers,
    write_model,
)
from tests.rollout.vllm.trainers import REFUSED, Trainer, policy_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LIMIT = 1e-4
"""The largest allowed error of a log-prob in float32; 1e-5 was measured."""
SEQUENCES = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0]]
TWO_ENGINES = {"vLLM server 0, data-parallel engine 0", "vLLM server 0, data-parallel engine 1"}


@attrs.frozen(kw_only=True)
class Split:
    """How a server splits its engines."""

    engine: Mapping[str, int]
    scoring: set[str]
    """The names of the engines that return scores."""
    first: str
    last: str
    """The first and the last worker, as errors name them."""


SPLITS = {
    "tensor": Split(engine={"tensor_parallel_size": 2}, scoring={"vLLM server 0"}, first="rank 0", last="rank 1"),
    "data": Split(
        engine={"data_parallel_size": 2},
        scoring=TWO_ENGINES,
        first="rank 0 of data-parallel engine 0",
        last="rank 0 of data-parallel engine 1",
    ),
    "both": Split(
        engine={"tensor_parallel_size": 2, "data_parallel_size": 2},
        scoring=TWO_ENGINES,
        first="rank 0 of data-parallel engine 0",
        last="rank 1 of data-parallel engine 1",
    ),
}
QUICK_SPLIT = "both"
_versions = itertools.count(1, 10)
"""Every version has a new number."""


@pytest.fixture(scope="module")
def servers(
    request: pytest.FixtureRequest, ray_for_servers: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, RunningServer]]:
    """Starts all servers that the selected tests need, at the same time, with the same tiny Qwen3 in float32."""
    directory = tmp_path_factory.mktemp("split")
    model_path = write_model(directory / "model")
    transport = OtherTransport().name
    here = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    wanted = {QUICK_SPLIT, *(item.callspec.params["split"] for item in here if "split" in item.fixturenames)}
    names = [name for name in SPLITS if name in wanted]
    running = start_servers(
        *(
            make_spec(model_path, directory / name, weight_sync_backend=transport, **SPLITS[name].engine)
            for name in names
        )
    )
    yield dict(zip(names, running, strict=True))
    stop_servers(running)


@pytest.fixture(params=[name if name == QUICK_SPLIT else pytest.param(name, marks=pytest.mark.soak) for name in SPLITS])
def split(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest_asyncio.fixture
async def client(servers: dict[str, RunningServer], split: str) -> AsyncIterator[RemoteInferenceClient]:
    client = await connect(servers[split])
    yield client
    await client.close()


class Model:
    """The servers' model in transformers; every version has different weights."""

    def __init__(self, model_path: str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self._first = {name: tensor.detach().clone() for name, tensor in self._model.named_parameters()}

    def tensors(self, version: int) -> dict[str, Tensor]:
        """The weights of a version, which the model uses from now on."""
        generator = torch.Generator().manual_seed(version)
        tensors = {name: t + 0.1 * torch.randn(t.shape, generator=generator) for name, t in self._first.items()}
        self._model.load_state_dict(tensors, strict=False)
        return tensors

    @torch.no_grad()
    def logprobs(self, tokens: list[int]) -> list[float]:
        """The log-prob of each token given the tokens before it; 0.0 for the first."""
        logprobs_TV = self._model(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        return [0.0, *logprobs_TV[range(len(tokens) - 1), tokens[1:]].tolist()]

    async def sync(self, client: RemoteInferenceClient, transport: WeightTransport) -> int:
        """Publishes the next version and returns its number."""
        version = next(_versions)
        tensors = self.tensors(version)
        manifest = await publish(client, transport, tensors, version)
        assert (manifest.version, manifest.tensors.keys()) == (version, tensors.keys())
        return version

    async def require_served(self, client: RemoteInferenceClient, split: str, version: int) -> None:
        """Requires that every engine scores with the model's weights, and answers requests with these weights and the
        version's number.
        """
        scores = await client.score(SEQUENCES)
        assert scores.keys() == SPLITS[split].scoring
        for found in scores.values():
            for of_engine, tokens in zip(found, SEQUENCES, strict=True):
                assert list(of_engine) == pytest.approx(self.logprobs(tokens), abs=LIMIT)
        asked = [request(f"{split}-{version}-{i}", (1, 2, 3 + i), seed=i, max_tokens=12) for i in range(8)]
        again = [attrs.evolve(one, sample_id=f"{one.sample_id}-again") for one in asked]
        answers = [
            *await asyncio.gather(*map(client.generate, asked)),
            *await asyncio.gather(*map(client.generate, again)),
        ]
        for (first,), (second,) in zip(answers[: len(asked)], answers[len(asked) :], strict=True):
            assert first.tokens == second.tokens, "a seed must determine the tokens, whichever engine answers"
        for of, (completion,) in zip([*asked, *again], answers, strict=True):
            tokens = [*of.prompt_tokens, *completion.tokens]
            assert list(completion.logprobs) == pytest.approx(self.logprobs(tokens)[len(of.prompt_tokens) :], abs=LIMIT)
            assert set(completion.policy_versions) == {version}


async def tokens_by_engine(server: RunningServer) -> list[float]:
    """The number of tokens that each data-parallel engine has sampled since its start, as vLLM counts them."""
    async with open_session(TOKENS.access) as session, session.get(f"{server.url}/metrics") as answer:
        counted = r'^vllm:generation_tokens_total\{engine="(\d)".*\} (\S+)$'
        return [float(count) for _, count in sorted(re.findall(counted, await answer.text(), re.MULTILINE))]


async def test_an_engine_of_several_workers_computes_like_one_worker(
    servers: dict[str, RunningServer], client: RemoteInferenceClient, split: str
):
    model = Model(servers[split].model_path)
    assert client.num_weight_receivers() == math.prod(SPLITS[split].engine.values())
    for transport in (FilesTransport(), SharedMemoryTransport(), BroadcastTransport(timeout_s=120.0)):
        version = await model.sync(client, transport)
        await model.require_served(client, split, version)
    counts = await tokens_by_engine(servers[split])
    assert len(counts) == len(SPLITS[split].scoring)
    assert min(counts) > 0


FAULTS: dict[Fault, str] = {
    "raises in every engine": "{last}: RuntimeError: this worker",
    "raises": "{last}: RuntimeError: this worker",
    "takes other weights": "{last} received other weights than {first}",
}


def test_a_missing_worker_makes_the_weights_unservable():
    taken = {"manifest": {"version": 3, "tensors": {}}, "error": None, "is_intact": True}
    failed = {"manifest": None, "error": "no memory", "is_intact": True}
    assert _fault({"rank 0": taken, "rank 1": taken}, 2) == (None, True)
    assert _fault({"rank 0": taken}, 2) == ("1 of 2 workers answered", False)
    assert _fault({"rank 0": failed}, 2) == ("1 of 2 workers answered", False)
    assert _fault({"rank 0": failed, "rank 1": failed}, 2) == ("rank 0: no memory; rank 1: no memory", True)
    assert _fault({"rank 0": failed, "rank 1": taken}, 2) == ("rank 0: no memory", False)
    assert _fault({"rank 0": {**failed, "is_intact": False}}, 1) == ("no memory", False)


@pytest.mark.parametrize("fault", FAULTS)
async def test_an_update_counts_only_if_every_worker_loads_the_same_weights(
    servers: dict[str, RunningServer], client: RemoteInferenceClient, split: str, fault: Fault
):
    message = FAULTS[fault].format(first=SPLITS[split].first, last=SPLITS[split].last)
    model = Model(servers[split].model_path)
    good = await model.sync(client, FilesTransport())
    with pytest.raises(WeightSyncError, match=message):
        await model.sync(client, OtherTransport(fault=fault))
    await client.resume()
    if fault == "raises in every engine" or (fault, split) == ("raises", "tensor"):
        # The ranks of an engine learn of the error before any of them loads a tensor.
        model.tensors(good)
        await model.require_served(client, split, good)
    else:
        with pytest.raises((RLError, TimeoutError)):
            async with asyncio.timeout(3.0):
                await client.generate(request(f"{split}-{fault}", max_tokens=3))
    await model.require_served(client, split, await model.sync(client, FilesTransport()))


async def test_the_probe_finds_an_engine_that_still_computes_with_old_weights(
    servers: dict[str, RunningServer],
):
    client = await connect(servers[QUICK_SPLIT])
    async with policy_of(servers[QUICK_SPLIT].model_path) as policy:
        trainer = Trainer(policy, client, OtherTransport(fault="keeps its old output layer"))
        trainer.version = next(_versions)
        await trainer.train()
        await trainer.publish()
        with pytest.raises(WeightSyncError, match=f"data-parallel engine 1 {REFUSED}"):
            await trainer.verification.probe(trainer.version)
        trainer.transport = OtherTransport()
        await trainer.publish()
        assert (await trainer.verification.probe(trainer.version))["weight_sync/logprob_diff_mean"] < LIMIT
    await client.close()


@pytest.mark.asyncio
async def test_a_dying_core_returns_no_partial_answers(servers: dict[str, RunningServer]):
    """Must be the last test, because it kills an engine core."""
    running = servers[QUICK_SPLIT]
    processes = psutil.Process(running.pid).children(recursive=True)
    core = next(process for process in processes if command_line(process).startswith("VLLM::EngineCore"))
    client = await connect(running)
    waiting: list[asyncio.Future[tuple[Completion, ...]]] = []

    def ask(number: int) -> Any:
        asked = [request(f"dying-{number}-{i}", (3, 1, 4), seed=i, max_tokens=400, ignore_eos=True) for i in range(16)]
        waiting[:] = [asyncio.ensure_future(client.generate(each)) for each in asked]
        return asyncio.gather(*waiting, return_exceptions=True)

    await paused_under_way(client, ask, num_running=16)
    await client.resume()
    core.kill()
    done, lost = await asyncio.wait(waiting, timeout=15)
    for task in lost:
        task.cancel()
    await asyncio.gather(*lost, return_exceptions=True)
    await client.close()
    assert lost, "the core must have requests when it dies"
    for task in done:
        assert task.exception() is not None or len(task.result()[0].tokens) == 400
