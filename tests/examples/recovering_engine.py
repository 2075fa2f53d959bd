"""A client that loses its local engine once, and then answers no request until it gets the same weights again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rl_core.interfaces import (
    Completion,
    EngineHealth,
    EnginePlugin,
    EngineSpec,
    GenerateRequest,
    InferenceClient,
    Manifest,
    Rendezvous,
)
from rl_rollout.local.plugin import local

LOST_AT_VERSION = 2
updates: list[int] = []
"""The versions that were published, in order."""


class RecoveringClient(InferenceClient):
    def __init__(self, engine: InferenceClient) -> None:
        self._engine = engine
        self._lost, self._serves = asyncio.Event(), asyncio.Event()
        self._was_lost = False
        self._serves.set()

    @property
    def lacks_weights(self) -> bool:
        return self._lost.is_set()

    async def needs_weights(self) -> None:
        await self._lost.wait()

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        if updates[-1] == LOST_AT_VERSION and not self._was_lost:
            self._was_lost = True
            self._serves.clear()
            self._lost.set()
        await self._serves.wait()
        return await self._engine.generate(request)

    async def update_weights(self, rendezvous: Rendezvous, version: int) -> Manifest:
        updates.append(version)
        manifest = await self._engine.update_weights(rendezvous, version)
        self._lost.clear()
        self._serves.set()
        return manifest

    async def pause(self, mode: Any = "keep") -> None:
        await self._engine.pause(mode)

    async def resume(self) -> None:
        await self._engine.resume()

    async def abort(self, sample_ids: Sequence[str] | None = None) -> None:
        await self._engine.abort(sample_ids)

    async def health(self) -> EngineHealth:
        return await self._engine.health()

    async def close(self) -> None:
        await self._engine.close()


class RecoveringPlugin(EnginePlugin):
    name = "recovering"

    def validate(self, spec: EngineSpec) -> None:
        local.validate(spec)

    async def create(self, spec: EngineSpec) -> InferenceClient:
        updates.clear()
        return RecoveringClient(await local.create(spec))


recovering = RecoveringPlugin()
