"""Lets engine and models take turns on the same devices (`trainer.placement.colocate_all`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rl_core.interfaces import InferenceClient
from rl_core.workers import WorkerGroup


async def begin_with_models(client: InferenceClient, *, colocate_all: bool, pipeline_depth: int) -> bool:
    """Decides whether engine and models take turns on the devices, and returns the answer. If they do, puts the new
    engine to sleep, because the models are loaded next.

    They take turns if they share devices, the engine `can_sleep`, and `pipeline_depth` is 0. With a larger depth the
    engine generates while the policy trains, so both always stay on the devices.
    """
    if not (colocate_all and pipeline_depth == 0 and client.can_sleep):
        return False
    await client.sleep()
    return True


class EngineTurns:
    """Moves engine and models on and off the devices that they share.

    `WorkerGroup.offload` moves the policy, and all models on the same devices, off these devices; a model's next call
    moves it back. Models also take turns among themselves (`rl_core.workers.devices`). An engine that sleeps loses its
    weights, which must then be published again. If `are_shared` is false, all methods do nothing.
    """

    def __init__(self, client: InferenceClient, policy: WorkerGroup, *, are_shared: bool):
        """`are_shared`: the result of `begin_with_models`. If true, the engine is asleep."""
        self._client = client
        self._policy = policy
        self.are_shared = are_shared
        self.engine_sleeps = are_shared

    async def to_models(self) -> None:
        """Puts the engine to sleep. Must be called before a model computes, when no request is running."""
        if self.are_shared and not self.engine_sleeps:
            await self._client.sleep()
            self.engine_sleeps = True

    @asynccontextmanager
    async def handover(self) -> AsyncIterator[None]:
        """Context of a weight sync. On entry, moves all models off the shared devices, and allocates a sleeping
        engine's weights. Sending then moves the policy's parameters back, but not its optimizer state. After a
        successful sync, calls `to_engine`."""
        if not self.are_shared:
            yield
            return
        await self._policy.offload()
        if self.engine_sleeps:
            await self._client.wake(("weights",))
        yield
        await self.to_engine()

    async def to_engine(self) -> None:
        """Moves all models off the shared devices, and allocates a sleeping engine's cache, so that it can sample. Must
        be called after a weight sync, and after the policy has computed while the engine was awake."""
        if not self.are_shared:
            return
        await self._policy.offload()
        if self.engine_sleeps:
            await self._client.wake(("kv_cache",))
            self.engine_sleeps = False
