"""A weight sync waits only for the engines that are alive, and measures only the pause of sampling."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import rl_core.trainer.publishing.publish as publishing
from rl_core.interfaces import Manifest, Rendezvous
from rl_core.trainer.publishing.publish import publish_weights

MANIFEST = Manifest(version=1, tensors={})


class LosesAnEngine:
    """A client with two engines, one of which dies during `pause`. Each call takes one second of a scripted clock."""

    num_engines = 2
    now = 0.0

    def num_weight_receivers(self) -> int:
        return self.num_engines

    async def pause(self, mode: str = "keep") -> None:
        self.num_engines = 1
        self.now += 1

    async def update_weights(self, rendezvous: Rendezvous, version: int) -> Manifest:
        self.now += 1
        return MANIFEST

    async def resume(self) -> None:
        self.now += 1


async def test_a_sync_does_not_wait_for_an_engine_lost_while_pausing(monkeypatch: pytest.MonkeyPatch):
    expected: list[int] = []
    client: Any = LosesAnEngine()
    monkeypatch.setattr(publishing, "time", SimpleNamespace(monotonic=lambda: client.now))

    def open_sync(*, num_ranks: int, num_engines: int) -> Rendezvous:
        expected.append(num_engines)
        return Rendezvous(transport="scripted", receiver="", data={})

    async def publish(*_: object) -> Manifest:
        return MANIFEST

    def close(rendezvous: Rendezvous) -> None:
        client.now += 100

    transport: Any = SimpleNamespace(is_staged=False, open=open_sync, close=close)
    group: Any = SimpleNamespace(mesh=SimpleNamespace(world_size=1), adapter=None, publish=publish)
    published = await publish_weights(group, client, transport, 1, max_bucket_bytes=1)
    assert expected == [1]
    assert published.pause_s == 3.0
