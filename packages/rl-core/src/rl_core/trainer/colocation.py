"""Engine and models on the same devices, in turns (`trainer.placement.colocate_all`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rl_core.interfaces import InferenceClient, Sleepable
from rl_core.workers import WorkerGroup


async def begin_with_models(client: InferenceClient, *, colocate_all: bool, pipeline_depth: int) -> bool:
    """Puts a new engine to sleep if it takes turns on the devices with the models, which are loaded next. Returns
    whether engine and models take turns.

    They do if they share devices, and the engine is `Sleepable` and idle while models compute. With `pipeline_depth`
    above 0 the engine generates while the policy trains, so both always stay on the devices.
    """
    if not (colocate_all and pipeline_depth == 0 and isinstance(client, Sleepable)):
        return False
    await client.sleep()
    return True


class EngineTurns:
    """Moves engine and models on and off the devices that they share.

    `WorkerGroup.offload` moves a model off the devices; the model's next call moves it back. Models also take turns
    among themselves (`rl_core.workers.devices`). An engine that sleeps loses its weights, which must then be published
    again. If the devices are not shared, nothing moves.
    """

    def __init__(self, client: InferenceClient, policy: WorkerGroup, *, are_shared: bool):
        """`are_shared`: the result of `begin_with_models`. If true, the engine is asleep."""
        self._client = client
        self._policy = policy
        self.are_shared = are_shared
        self.engine_sleeps = are_shared

    async def to_models(self) -> None:
        """Puts the engine to sleep. Call before any model computes, when no request is running."""
        if self.are_shared and not self.engine_sleeps:
            await self._sleepable.sleep()
            self.engine_sleeps = True

    @asynccontextmanager
    async def handover(self) -> AsyncIterator[None]:
        """Context of a weight sync. Inside, the devices hold the engine's weights and the policy's parameters, but
        neither the policy's optimizer state nor the engine's cache. Outside, they hold either the engine or models."""
        if not self.are_shared:
            yield
            return
        await self._policy.offload()
        if self.engine_sleeps:
            await self._sleepable.wake(("weights",))
        yield
        await self.to_engine()

    async def to_engine(self) -> None:
        """Gives the devices to the engine. Call after a weight sync, and after the policy computed while the engine was
        awake."""
        if not self.are_shared:
            return
        await self._policy.offload()
        if self.engine_sleeps:
            await self._sleepable.wake(("kv_cache",))
            self.engine_sleeps = False

    @property
    def _sleepable(self) -> Sleepable:
        assert isinstance(self._client, Sleepable)
        return self._client
