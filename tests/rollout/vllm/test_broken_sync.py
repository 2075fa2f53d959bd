"""A sync that breaks off: which servers are given up, and which error its participants get."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rl_core.errors import DeadlineError, WeightSyncError
from rl_core.interfaces import Manifest, Rendezvous
from rl_core.trainer.publishing.publish import publish_weights
from rl_rollout.vllm import wire
from rl_rollout.vllm.client import RemoteInferenceClient
from rl_rollout.vllm.connection import LostUnderRequest
from rl_rollout.vllm.pool import EngineFacts, Member, Pool
from tests.core.virtual_time import run_virtually


class Scripted:
    """A server that answers an update with the result of a function."""

    def __init__(self, name: str, update: Callable[[], Awaitable[Any]]) -> None:
        self.name = name
        self._update = update

    async def call(self, method: str, arguments: Any = None, *, timeout_s: float) -> Any:
        if method == "update_weights":
            return await self._update()
        return {}


async def refuses() -> Any:
    raise WeightSyncError("vLLM server 0, update_weights: it does not fit")


async def is_gone() -> Any:
    raise LostUnderRequest("vLLM server 0: its connection broke")


async def never_answers() -> Any:
    await asyncio.Event().wait()


class Closable:
    """A transport that transfers nothing: ranks and engines wait until it is closed."""

    name = "closable"

    def __init__(self, *, is_staged: bool = False) -> None:
        self.is_staged = is_staged
        self.is_closed = asyncio.Event()

    def open(self, *, num_ranks: int, num_engines: int) -> Rendezvous:
        return Rendezvous(transport=self.name, receiver="", data={})

    def close(self, rendezvous: Rendezvous) -> None:
        self.is_closed.set()

    async def taken(self) -> Any:
        await self.is_closed.wait()
        raise WeightSyncError("the sync was closed")

    async def publish(self, rendezvous: Rendezvous, version: int, max_bucket_bytes: int) -> Manifest:
        return await self.taken()


async def broken(transport: Closable, *updates: Callable[[], Awaitable[Any]]) -> tuple[str, float, list[Member]]:
    """Breaks a sync of these servers. Returns the error, the seconds until it was raised, and the members reported as
    failed.
    """
    pool, failed = Pool(len(updates)), []
    for member, update in zip(pool.members, updates, strict=True):
        scripted: Any = Scripted(str(member), update)
        await pool.joined(member, scripted, 0, is_quarantined=False)
    pool.version, pool.facts = 0, EngineFacts(vocab_size=8, num_workers=1)
    client = RemoteInferenceClient(pool, timeout_s=1000.0, on_failure=failed.append)
    policy: Any = SimpleNamespace(mesh=SimpleNamespace(world_size=1), adapter=None, publish=transport.publish)
    clock = asyncio.get_running_loop()
    with pytest.raises(WeightSyncError) as raised:
        await publish_weights(policy, client, transport, 1, max_bucket_bytes=1)
    took_s = clock.time()
    await asyncio.sleep(60.0)
    return str(raised.value), took_s, failed


@pytest.mark.parametrize("first", [refuses, is_gone])
def test_a_failing_server_ends_the_sync_at_once_for_the_others(first: Any):
    async def work() -> None:
        transport = Closable()
        message, took_s, failed = await broken(transport, first, transport.taken)
        assert message.startswith("vLLM server 0")
        assert message.endswith("; vLLM server 1 had not finished its part of the sync")
        assert took_s == 0.0
        assert [member.index for member in failed] == [0, 1]
        assert [member.hung for member in failed] == [None, None]

    run_virtually(work())


def test_a_server_that_stays_in_a_broken_sync_is_given_up_as_hung():
    async def work() -> None:
        _, took_s, failed = await broken(Closable(), refuses, never_answers)
        assert took_s == 0.0
        assert [member.index for member in failed] == [0, 1]
        assert failed[1].hung is not None
        assert "30 s after update_weights failed" in failed[1].hung

    run_virtually(work())


def test_a_single_hung_server_is_given_up_after_the_ranks_have_failed():
    class Unjoined(Closable):
        async def publish(self, rendezvous: Rendezvous, version: int, max_bucket_bytes: int) -> Manifest:
            await asyncio.sleep(30.0)
            raise WeightSyncError("waited 30 s for 1 receivers to join the sync; 0 have joined")

    async def work() -> None:
        message, took_s, failed = await broken(Unjoined(), never_answers)
        assert "; 0 have joined" in message
        assert took_s == 40.0
        assert [member.hung is not None for member in failed] == [True]

    run_virtually(work())


def test_a_staged_version_is_waited_for_on_every_server():
    """Negative control: in a staged sync, the failure of one server does not end the others' part."""

    async def work() -> None:
        async def slowly() -> Any:
            await asyncio.sleep(100.0)
            return wire.manifest_record(Manifest(version=1, tensors={}))

        class Sent(Closable):
            async def publish(self, rendezvous: Rendezvous, version: int, max_bucket_bytes: int) -> Manifest:
                return Manifest(version=version, tensors={})

        _, took_s, failed = await broken(Sent(is_staged=True), refuses, slowly)
        assert took_s == 100.0
        assert [member.index for member in failed] == [0]

    run_virtually(work())


@pytest.mark.parametrize(("comes_back_s", "expected_s"), [(0.0, 0.5), (40.0, 40.5), (None, 130.5)])
def test_a_lost_server_is_reported_as_soon_as_a_server_is_up_again(comes_back_s: float | None, expected_s: float):
    """Half a second after the server has refused the update, it is reported dead, as if its core had been killed."""

    async def work() -> None:
        pool = Pool(1)
        (member,) = pool.members
        scripted: Any = Scripted("vLLM server 0", refuses)
        client = RemoteInferenceClient(pool, timeout_s=1000.0, start_timeout_s=100.0)
        clock = asyncio.get_running_loop()

        async def supervise() -> None:
            await asyncio.sleep(0.5)
            await pool.left(member, "its core process is dead")
            if comes_back_s is not None:
                await asyncio.sleep(comes_back_s)
                await pool.joined(member, scripted, -1, is_quarantined=False)

        await pool.joined(member, scripted, 0, is_quarantined=False)
        with pytest.raises(WeightSyncError, match="does not fit"):
            await client.update_weights(Rendezvous(transport="", receiver="", data={}), 1)
        supervising = asyncio.ensure_future(supervise())
        if comes_back_s is None:
            with pytest.raises(DeadlineError, match=r"to be started again; .* is down \(its core process is dead\)"):
                await client.has_lost_engines()
        else:
            assert await client.has_lost_engines()
            assert pool.up == [member]
        assert clock.time() == expected_s
        await supervising

    run_virtually(work())


def test_an_update_whose_connection_breaks_may_be_repeated_though_the_server_lives():
    """The update's connection breaks although no server is lost. A failing proxy has this effect."""

    async def work() -> None:
        async def is_gone_once() -> Any:
            scripted._update = succeeds
            return await is_gone()

        async def succeeds() -> Any:
            return wire.manifest_record(Manifest(version=1, tensors={}))

        pool, rendezvous = Pool(1), Rendezvous(transport="", receiver="", data={}, is_staged=True)
        scripted: Any = Scripted("vLLM server 0", is_gone_once)
        await pool.joined(pool.members[0], scripted, 0, is_quarantined=False)
        client = RemoteInferenceClient(pool, timeout_s=1000.0)
        message = r"no server completed the update: update_weights: vLLM server 0: its connection broke; .*server 0"
        with pytest.raises(WeightSyncError, match=message):
            await client.update_weights(rendezvous, 1)
        assert await client.has_lost_engines()
        assert asyncio.get_running_loop().time() == 10.0
        await client.update_weights(rendezvous, 1)
        assert pool.version == 1
        assert not await client.has_lost_engines()

    run_virtually(work())


def test_no_server_counts_as_lost_if_none_is_given_up_within_seconds():
    async def work() -> None:
        pool = Pool(2)
        refusing: Any = Scripted("vLLM server 0", refuses)
        await pool.left(pool.members[1], "it was lost before")
        await pool.joined(pool.members[0], refusing, 0, is_quarantined=False)
        client = RemoteInferenceClient(pool, timeout_s=1000.0)
        with pytest.raises(WeightSyncError, match="does not fit"):
            await client.update_weights(Rendezvous(transport="", receiver="", data={}), 1)
        assert not await client.has_lost_engines()
        assert asyncio.get_running_loop().time() == 10.0

    run_virtually(work())
