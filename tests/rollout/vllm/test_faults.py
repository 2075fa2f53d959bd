"""kill -9 of one of two servers: no sample is lost, none comes twice, and the server is back with the right weights."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from rl_core.interfaces import Completion, GenerateRequest, WeightTransport
from rl_rollout.transports.files import FilesTransport
from rl_rollout.vllm.client import RemoteInferenceClient
from rl_rollout.vllm.launch import create_client
from rl_rollout.vllm.pool import Member
from tests.rollout.vllm.servers import make_spec, publish, request, write_model

BACK_WITHIN_S = 900.0
"""A server starts in a minute on two free cores; a busy machine takes several times as long."""
TRANSPORT: WeightTransport = FilesTransport(timeout_s=120.0)


class Cluster:
    """Two servers of this run, and the weights that a trainer would publish."""

    def __init__(self, client: RemoteInferenceClient, model_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.client = client
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self._first = {name: tensor.detach() for name, tensor in model.named_parameters()}
        self.version = -1

    @property
    def members(self) -> list[Member]:
        return self.client._pool.members

    async def publish(self) -> None:
        """The next version, as a trainer does at the end of a step; different from all others."""
        self.version += 1
        await self.publish_again()

    async def publish_again(self) -> None:
        """The current version, as a trainer does when it is asked for it."""
        generator = torch.Generator().manual_seed(self.version)
        tensors = {name: t + 0.1 * torch.randn(t.shape, generator=generator) for name, t in self._first.items()}
        await publish(self.client, TRANSPORT, tensors, self.version)

    async def pid(self, member: Member) -> int:
        assert member.connection is not None
        return (await member.connection.call("health", timeout_s=60))["pid"]

    async def kill(self, member: Member) -> None:
        """As the kernel would, without a last word."""
        os.kill(await self.pid(member), signal.SIGKILL)

    async def whole_again(self) -> None:
        """Returns when both servers hold the current version, which is published again when they ask for it."""
        async with asyncio.timeout(BACK_WITHIN_S):
            while len(self.client._pool.serving) < 2:
                await self.client.needs_weights()
                await self.publish_again()
        for member in self.members:
            assert member.connection is not None
            health = await member.connection.call("health", timeout_s=60)
            assert (health["version"], health["quarantine"]) == (self.version, None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(ray_for_servers: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    directory = tmp_path_factory.mktemp("cluster")
    model_path = write_model(directory / "model")
    client = await create_client(make_spec(model_path, directory, num_engines=2))
    cluster = Cluster(client, model_path)
    await cluster.publish()
    yield cluster
    await client.close()


def batch_of_requests(name: str, count: int, longer_by: int = 0) -> list[GenerateRequest]:
    """`longer_by`: tokens that each has more than the one before, so that they do not end together."""
    return [
        request(f"{name}-{i}", (1, 2, 3 + i % 7), seed=i, max_tokens=60 + longer_by * i, ignore_eos=True)
        for i in range(count)
    ]


async def answered(client: RemoteInferenceClient, requests: Sequence[GenerateRequest]) -> list[Completion]:
    return [completion for (completion,) in await asyncio.gather(*(client.generate(each) for each in requests))]


async def kill_while_generating(cluster: Cluster, seed: int) -> None:
    """A server dies when some of its requests are done; all come back, with the tokens they have without a kill."""
    dice = random.Random(seed)
    expected = await answered(cluster.client, batch_of_requests(f"calm-{seed}", 48, longer_by=4))
    victim, kill_after = dice.choice(cluster.members), dice.randrange(1, 24)
    pid, is_killed = await cluster.pid(victim), False
    for number in range(20):
        requests = batch_of_requests(f"k{seed}-{number}", 48, longer_by=4)
        waiting = [asyncio.ensure_future(cluster.client.generate(each)) for each in requests]
        while sum(task.done() for task in waiting) < kill_after:
            await asyncio.sleep(0.001)
        # On a busy machine this loop may wake up when all is done: then with the next requests.
        if victim.load > 0:
            os.kill(pid, signal.SIGKILL)
            is_killed = True
        completions = [completion for (completion,) in await asyncio.gather(*waiting)]
        assert [completion.tokens for completion in completions] == [completion.tokens for completion in expected]
        assert {version for completion in completions for version in completion.policy_versions} == {cluster.version}
        if is_killed:
            break
    assert is_killed, "the server never had anything to do when it was to be killed: the test shows nothing"
    assert not any(member.load for member in cluster.members)


async def kill_during_a_sync(cluster: Cluster, seed: int) -> None:
    """A server dies while it receives; the other one gets the version and serves it."""
    dice = random.Random(seed)
    victim = dice.choice(cluster.members)
    pid = await cluster.pid(victim)
    waiting = [asyncio.ensure_future(cluster.client.generate(each)) for each in batch_of_requests(f"sync-{seed}", 16)]

    async def kill() -> None:
        while not cluster.client._pool.num_updates % 2:
            await asyncio.sleep(0.0005)
        await asyncio.sleep(dice.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)

    await asyncio.gather(cluster.publish(), kill())
    completions = [completion for (completion,) in await asyncio.gather(*waiting)]
    assert all(len(completion.tokens) == 60 for completion in completions)
    after = await answered(cluster.client, batch_of_requests(f"after-{seed}", 4))
    assert {version for completion in after for version in completion.policy_versions} == {cluster.version}


async def kill_while_idle(cluster: Cluster, seed: int) -> None:
    """The heartbeat finds out; meanwhile the other one serves, and training publishes on."""
    await cluster.kill(random.Random(seed).choice(cluster.members))
    await cluster.publish()
    completions = await answered(cluster.client, batch_of_requests(f"idle-{seed}", 8))
    assert {version for completion in completions for version in completion.policy_versions} == {cluster.version}


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_server_killed_while_it_generates_loses_nothing_and_comes_back(cluster: Cluster):
    await kill_while_generating(cluster, seed=0)
    await cluster.publish()  # training goes on while the server starts
    await cluster.whole_again()


@pytest.mark.soak
@pytest.mark.timeout(2400)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("kill", [kill_while_generating, kill_during_a_sync, kill_while_idle])
async def test_a_killed_server_loses_nothing_and_comes_back(cluster: Cluster, kill: Any, seed: int):
    await kill(cluster, seed)
    await cluster.whole_again()


@pytest.mark.soak
@pytest.mark.timeout(2400)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_hung_engine_is_noticed_and_started_again(cluster: Cluster):
    """The HTTP side lives, the engine's core process is stopped: only asking the engine itself shows it."""
    import psutil

    victim = cluster.members[0]
    pid = await cluster.pid(victim)
    cores = [child for child in psutil.Process(pid).children(recursive=True) if "EngineCore" in child.name()]
    waiting = [asyncio.ensure_future(cluster.client.generate(each)) for each in batch_of_requests("hung", 16)]
    cores[0].suspend()
    completions = [completion for (completion,) in await asyncio.gather(*waiting)]
    assert all(len(completion.tokens) == 60 for completion in completions)
    await cluster.whole_again()
    assert await cluster.pid(victim) != pid
