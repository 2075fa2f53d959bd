"""A weight sync waits only for the engines that are alive."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rl_core.interfaces import Manifest, Rendezvous
from rl_core.trainer.publish import publish_weights

MANIFEST = Manifest(version=1, tensors={})


class LosesAnEngine:
    """A client with two engines, one of which dies during `pause`."""

    num_engines = 2

    def num_weight_receivers(self) -> int:
        return self.num_engines

    async def pause(self, mode: str = "keep") -> None:
        self.num_engines = 1

    async def update_weights(self, rendezvous: Rendezvous, version: int) -> Manifest:
        return MANIFEST

    async def resume(self) -> None: ...


async def test_a_sync_does_not_wait_for_an_engine_lost_while_pausing():
    expected: list[int] = []

    def open_sync(*, num_ranks: int, num_engines: int) -> Rendezvous:
        expected.append(num_engines)
        return Rendezvous(transport="scripted", receiver="", data={})

    async def publish(*_: object) -> Manifest:
        return MANIFEST

    transport: Any = SimpleNamespace(is_staged=False, open=open_sync, close=lambda rendezvous: None)
    group: Any = SimpleNamespace(mesh=SimpleNamespace(world_size=1), adapter=None, publish=publish)
    client: Any = LosesAnEngine()
    await publish_weights(group, client, transport, 1, max_bucket_bytes=1)
    assert expected == [1]
