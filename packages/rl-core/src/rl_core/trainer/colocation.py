"""Engine and models on the same devices, in turns (`trainer.placement.colocate_all`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rl_core.interfaces import InferenceClient, Sleepable
from rl_core.workers import WorkerGroup


async def begin_with_models(client: InferenceClient, *, colocate_all: bool, pipeline_depth: int) -> bool:
    """Puts a new engine to sleep where it shares devices with the models that are loaded next; whether it does.

    It must be `Sleepable`, and have nothing to do while models compute: with `pipeline_depth` above 0 it generates
    while the policy trains, so neither ever leaves.
    """
    if not (colocate_all and pipeline_depth == 0 and isinstance(client, Sleepable)):
        return False
    await client.sleep()
    return True


class EngineTurns:
    """Whose turn it is on devices that engine and models share.

    The models leave by `WorkerGroup.offload`, come back with their next call, and take turns among themselves
    (`rl_core.workers.devices`). The engine loses its weights when it sleeps, so after that they are published again.
    Where they share nothing, nobody ever moves.
    """

    def __init__(self, client: InferenceClient, policy: WorkerGroup, *, are_shared: bool):
        """`are_shared` as `begin_with_models` says: the engine is asleep."""
        self._client = client
        self._policy = policy
        self.are_shared = are_shared
        self.engine_sleeps = are_shared

    async def to_models(self) -> None:
        """Before any model computes, with no request under way: the engine sleeps."""
        if self.are_shared and not self.engine_sleeps:
            await self._sleepable.sleep()
            self.engine_sleeps = True

    @asynccontextmanager
    async def handover(self) -> AsyncIterator[None]:
        """Around a weight sync: outside it one side is on the devices, inside the engine's weights and the policy's
        parameters, without the policy's optimizer state and the engine's cache."""
        if not self.are_shared:
            yield
            return
        await self._policy.offload()
        if self.engine_sleeps:
            await self._sleepable.wake(("weights",))
        yield
        await self.to_engine()

    async def to_engine(self) -> None:
        """After a weight sync, and after the policy was asked for something beside the awake engine."""
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
