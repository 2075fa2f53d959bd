"""Servers die, hang and receive damaged weights at any moment. No sample is lost or returned twice, every token was
generated with the weight version recorded for it, and afterwards all servers serve the right weights.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from rl_core.errors import WeightSyncError
from rl_core.interfaces import Completion, GenerateRequest
from rl_rollout.transports.files import FilesTransport
from rl_rollout.vllm.client import RemoteInferenceClient
from rl_rollout.vllm.connection import ServerGone
from rl_rollout.vllm.launch import create_client
from tests.rollout.vllm.faults import (
    HUNG_AFTER_S,
    SYNC_PHASES,
    TIMEOUT_S,
    TRANSPORTS,
    Cluster,
    Fault,
    Model,
    ServerResources,
    batch_of_requests,
    faults_of_shard,
)
from tests.rollout.vllm.servers import IN_CORE, make_spec, write_model

CLUSTERS: Mapping[str, Mapping[str, Any]] = {
    "two engines": {"num_engines": 2},
    "two engines without workers": {"num_engines": 2, "engine_init_kwargs": IN_CORE},
    "tensor parallel": {"tensor_parallel_size": 2},
    "data parallel": {"data_parallel_size": 2},
}
SHARDS = [("two engines", 0), ("two engines", 1), ("two engines", 2), ("tensor parallel", 3), ("data parallel", 4)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    request: pytest.FixtureRequest, ray_for_servers: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    """A cluster of the kind that the test's parameter names. At the end, no process, socket or segment may be left."""
    directory = tmp_path_factory.mktemp("cluster")
    model_path = write_model(directory / "model")
    spec = make_spec(
        model_path,
        directory,
        timeout_s=TIMEOUT_S,
        hung_after_s=HUNG_AFTER_S,
        **CLUSTERS[request.param],
    )
    client = await create_client(spec)
    cluster = Cluster(client, Model(model_path))
    try:
        await cluster.publish()
        yield cluster
        left = ServerResources.by(await cluster.all_processes())
    finally:
        await client.close()
    await left.require_nothing()


async def pid(cluster: Cluster, index: int) -> int:
    connection = cluster.members[index].connection
    assert connection is not None
    return (await connection.call("health", timeout_s=60))["pid"]


async def answered(client: RemoteInferenceClient, requests: Sequence[GenerateRequest]) -> list[Completion]:
    return [completion for (completion,) in await asyncio.gather(*(client.generate(each) for each in requests))]


def test_a_hundred_faults_cover_every_phase_of_every_transport_with_every_kind_of_engine():
    by_cluster = {kind: [fault for k, i in SHARDS if k == kind for fault in faults_of_shard(i)] for kind, _ in SHARDS}
    assert sum(map(len, by_cluster.values())) == 100
    phases = {*itertools.product(SYNC_PHASES, TRANSPORTS)}
    for faults in by_cluster.values():
        assert {(fault.when, fault.transport) for fault in faults if fault.is_in_sync} == phases
        assert {fault.when for fault in faults} == {"generating", "idle", *SYNC_PHASES}
        assert {f.transport for f in faults if f.what == "kill" and f.is_in_sync} == {*TRANSPORTS}
        assert {f.whom for f in faults if f.what == "kill" and f.is_in_sync} == {"server", "core", "worker"}
        for what in ("flip a byte", "stop sending"):
            assert {fault.transport for fault in faults if fault.what == what} == {*TRANSPORTS}
    assert {(f.when, f.transport) for f in by_cluster["two engines"] if f.what == "kill"} >= phases


@pytest.mark.parametrize(
    ("within_s", "given_up_s", "error"),
    [(0.2, 200.0, r"a sync took \d+ s; its limit is 0\.2 s"), (200.0, 0.2, None)],
)
async def test_a_sync_that_hangs_is_ended(within_s: float, given_up_s: float, error: str | None):
    """Either the sync exceeds its limit, which the error names, or the loop that publishes again gives up first."""
    has_ended = asyncio.Event()

    async def hangs() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            has_ended.set()

    client: Any = SimpleNamespace(_pool=SimpleNamespace(up=["a server"]))
    model: Any = None
    with pytest.raises(TimeoutError if error is None else AssertionError, match=error):
        async with asyncio.timeout(given_up_s):
            await Cluster(client, model)._in_time(hangs(), within_s)
    await asyncio.wait_for(has_ended.wait(), 60)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("cluster", ["two engines without workers"], indirect=True)
async def test_killing_a_generating_server_changes_no_sample(cluster: Cluster):
    """The server dies when some requests are done. All requests return the same tokens as without the kill."""
    dice = random.Random(0)
    expected = await answered(cluster.client, batch_of_requests("calm", 48))
    index, kill_after = dice.randrange(2), dice.randrange(1, 24)
    victim, is_killed = await pid(cluster, index), False
    for number in range(20):
        requests = batch_of_requests(f"killed-{number}", 48)
        waiting = [asyncio.ensure_future(cluster.client.generate(each)) for each in requests]
        while sum(task.done() for task in waiting) < kill_after:
            await asyncio.sleep(0.001)
        # On a busy machine all requests may be done before this loop wakes up; then the next batch is tried.
        if cluster.members[index].load > 0:
            os.kill(victim, signal.SIGKILL)
            is_killed = True
        completions = [completion for (completion,) in await asyncio.gather(*waiting)]
        assert [completion.tokens for completion in completions] == [completion.tokens for completion in expected]
        assert {version for completion in completions for version in completion.policy_versions} == {cluster.version}
        if is_killed:
            break
    assert is_killed, "the server was idle at every attempt to kill it, so the test shows nothing"
    assert not any(member.load for member in cluster.members)
    await cluster.publish()  # training continues while the server restarts
    await cluster.whole_again()


FIVE = [
    Fault(what="flip a byte", when="receiving", transport="files", moment=0.3),
    Fault(what="flip a byte", when="receiving", transport="broadcast", moment=0.9),
    Fault(what="pause", when="swapping", whom="core", transport="shared_memory"),
    Fault(what="stop sending", when="receiving", transport="shared_memory", moment=0.6),
    Fault(what="kill", when="receiving", whom="core", transport="broadcast"),
]


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("cluster", ["two engines without workers"], indirect=True)
async def test_five_faults_lose_no_sample_and_serve_no_wrong_weights(cluster: Cluster):
    for number, fault in enumerate(FIVE):
        await cluster.survives(fault, f"five-{number}")


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("cluster", ["two engines without workers"], indirect=True)
async def test_a_server_whose_core_hangs_in_an_update_is_started_again(cluster: Cluster):
    """During an update the core is busy and gets no heartbeats, so only the update's deadline notices the hang."""
    member, before = cluster.members[0], await pid(cluster, 0)
    files = FilesTransport()
    rendezvous = files.open(num_ranks=1, num_engines=1)
    asked = {"receiver": rendezvous.receiver, "data": dict(rendezvous.data), "adapter": None, "timeout_s": 3.0}
    (core,) = (await cluster.processes(member))["core"]
    connection = member.connection
    assert connection is not None
    core.suspend()
    try:
        with pytest.raises(WeightSyncError, match="did not end within 3 s"):
            await connection.call("update_weights", {**asked, "version": cluster.version + 1}, timeout_s=60.0)
    finally:
        files.close(rendezvous)
    async with asyncio.timeout(TIMEOUT_S):
        while member.connection is connection:
            await asyncio.sleep(0.1)
    await cluster.whole_again()
    assert await pid(cluster, 0) != before


@pytest.mark.soak
@pytest.mark.timeout(2400)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("cluster", ["two engines"], indirect=True)
async def test_a_core_that_dies_during_a_health_check_is_noticed(cluster: Cluster):
    """vLLM itself never answers a health request if the engine core dies meanwhile."""
    member = cluster.members[0]
    connection = member.connection
    assert connection is not None
    (core,) = (await cluster.processes(member))["core"]
    core.suspend()
    asking = asyncio.ensure_future(connection.call("health", timeout_s=60.0))
    await asyncio.sleep(0.5)
    assert not asking.done()
    core.kill()
    with pytest.raises(ServerGone):
        await asyncio.wait_for(asking, 60)
    while member.connection is connection:
        await asyncio.sleep(0.1)
    await cluster.whole_again()


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("cluster", "shard"), SHARDS, indirect=["cluster"])
async def test_random_faults_lose_no_sample_and_serve_no_wrong_weights(cluster: Cluster, shard: int):
    for number, fault in enumerate(faults_of_shard(shard)):
        print(f"{shard}.{number}: {fault}", flush=True)
        await cluster.survives(fault, f"random-{shard}-{number}")
