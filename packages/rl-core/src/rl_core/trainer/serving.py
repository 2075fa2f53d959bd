"""The loop's side of the engines: brings them each version, proves that it arrived, brings back those that were lost.

A run whose groups come from data has none: `NoEngines` stands in their place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs

from rl_core.errors import DeadlineError, DiskFullError, WeightSyncError
from rl_core.interfaces import (
    IdleMeasuring,
    InferenceClient,
    LossDetecting,
    Recovering,
    WeightReceivers,
    WeightTransport,
)
from rl_core.stored_files import is_disk_full
from rl_core.trainer.colocation import EngineTurns
from rl_core.trainer.delta_syncs import DeltaSyncs, sent_share
from rl_core.trainer.publish import PauseMode, Publication, publish_weights
from rl_core.trainer.verification import VerificationSettings, verification_of
from rl_core.workers import WorkerGroup

logger = logging.getLogger(__name__)

_MOST_ENGINES = 32
_ROOM_S, _ROOM_POLL_S = 600.0, 5.0
"""So long a weight sync waits for room on a full disk, and so often it tries again."""
_MAKE_ROOM = "Make room there, or start the run with TMPDIR=… in which there is more"
"""That have a metric of their own."""
_MOST_LOST = 3
"""Tries to publish a version in which an engine may be lost: it may be the sync that ends them."""


@attrs.frozen(kw_only=True)
class ServingSettings:
    """How versions travel to the engines, and how it is verified."""

    max_bucket_bytes: int
    num_engines: int
    pause_mode: PauseMode
    delta_interval: int | None = None
    """One sync in so many sends whole weights, the others what changed; None: all are whole."""
    verification: VerificationSettings


class Engines(Protocol):
    """Whoever samples from the policy."""

    @property
    def is_sampled_from(self) -> bool:
        """The samples are an engine's, so its log-probs are there to be compared with the trainer's."""
        ...

    @property
    def are_shared(self) -> bool:
        """Engine and models take turns on the devices."""
        ...

    @property
    def are_asleep(self) -> bool:
        """They lost their weights, and need them again before they sample."""
        ...

    async def publish(self, version: int) -> dict[str, float]:
        """Brings them to the policy's weights, as `version`; metrics of the verification, where it was time for one."""
        ...

    async def prove(self) -> None:
        """Proves at the start that every weight arrives, where the settings ask for it."""
        ...

    async def bring_back(self, version: Callable[[], int], between_versions: asyncio.Lock) -> None:
        """Publishes the current version again whenever an engine that was started again needs it; never returns, or at
        once where none can be lost. `between_versions` is held while weights change."""
        ...

    async def to_models(self) -> None:
        """Before any model computes, with no request under way: a shared engine sleeps."""
        ...

    def idle_lap(self) -> dict[str, float]:
        """`time/engine_idle…`, since the last call."""
        ...


class NoEngines:
    """Groups come from data: nothing is published, and the devices are the models' own."""

    is_sampled_from = False
    are_shared = False
    are_asleep = False

    async def publish(self, version: int) -> dict[str, float]:
        return {}

    async def prove(self) -> None:
        pass

    async def bring_back(self, version: Callable[[], int], between_versions: asyncio.Lock) -> None:
        pass

    async def to_models(self) -> None:
        pass

    def idle_lap(self) -> dict[str, float]:
        return {}


class ServedEngines:
    """Engines behind an `InferenceClient`."""

    is_sampled_from = True

    def __init__(
        self,
        settings: ServingSettings,
        *,
        policy: WorkerGroup,
        client: InferenceClient,
        transport: WeightTransport,
        turns: EngineTurns,
    ):
        self._settings = settings
        self._policy = policy
        self._client = client
        self._transport = transport
        self._turns = turns
        self._version = 0
        self._deltas = None if settings.delta_interval is None else DeltaSyncs(settings.delta_interval)
        self._verification = verification_of(settings.verification, policy, client, self._publish)
        self.idle_lap()  # from now on

    @property
    def are_shared(self) -> bool:
        return self._turns.are_shared

    @property
    def are_asleep(self) -> bool:
        return self._turns.engine_sleeps

    async def publish(self, version: int) -> dict[str, float]:
        self._version = version
        published = await self._publish()
        metrics = {"time/pause": published.pause_s, **sent_share(published.sent)}
        if self._verification is not None:
            metrics |= await self._verification.after_sync(version)
            await self._turns.to_engine()
        return metrics

    async def prove(self) -> None:
        if self._verification is not None and self._settings.verification.prove_at_start:
            await self._verification.prove()
            await self._turns.to_engine()

    async def bring_back(self, version: Callable[[], int], between_versions: asyncio.Lock) -> None:
        """It waits for the weights to be a whole version: while a step changes them, its own publishing serves as
        well."""
        if not isinstance(self._client, Recovering):
            return
        while True:
            await self._client.needs_weights()
            async with between_versions:
                if self._client.lacks_weights:
                    self._version = version()
                    await self._publish()
                    if self._verification is not None:
                        await self._verification.probe(self._version)
                        await self._turns.to_engine()

    async def to_models(self) -> None:
        await self._turns.to_models()

    def idle_lap(self) -> dict[str, float]:
        """Where there are several engines: the mean over them, and each of the first ones."""
        idle = self._client.idle_lap() if isinstance(self._client, IdleMeasuring) else {}
        if len(idle) < 2:
            return {}
        each = {f"time/engine_idle/{engine}": seconds for engine, seconds in [*idle.items()][:_MOST_ENGINES]}
        return {"time/engine_idle": sum(idle.values()) / len(idle), **each}

    async def _publish(self) -> Publication:
        """Once; again, to the engines that are left or were started again, if one was lost under way and broke the sync
        for all; with whole weights, if changes were refused; and while a disk is full, until there is room.

        Raises:
            WeightSyncError, DeadlineError: it failed with all engines alive, or engines were lost in every try.
            DiskFullError: there was no room for too long.
        """
        num_lost, clock = 0, asyncio.get_running_loop().time
        deadline = clock() + _ROOM_S
        while True:
            num_receivers, delta = self._num_receivers(), self._next_delta()
            try:
                async with self._turns.handover():
                    published = await publish_weights(
                        self._policy,
                        self._client,
                        self._transport,
                        self._version,
                        max_bucket_bytes=self._settings.max_bucket_bytes,
                        num_engines=self._settings.num_engines,
                        pause_mode=self._settings.pause_mode,
                        delta=delta,
                    )
            except (WeightSyncError, OSError) as error:
                is_delta = delta is not None and delta["base"] is not None
                if is_disk_full(error):
                    await self._room(error, is_late=clock() > deadline)
                elif not isinstance(error, (WeightSyncError, DeadlineError)):
                    raise
                elif is_delta and isinstance(error, WeightSyncError):
                    logger.warning("publishing again with whole weights because the delta was refused: %s", error)
                elif self._num_receivers() != num_receivers or await self._has_lost_engines():
                    num_lost += 1
                    if num_lost == _MOST_LOST:
                        raise WeightSyncError(
                            f"weight version {self._version}: engines were lost in each of {num_lost} tries to publish "
                            f"it; why they ended is in their logs. The last error: {error}"
                        ) from error
                    logger.warning("publishing again because an engine was lost: %s", error)
                else:
                    raise
            else:
                if self._deltas is not None and delta is not None:
                    self._deltas.succeeded(delta)
                return published

    async def _room(self, error: Exception, *, is_late: bool) -> None:
        """Waits a while for it; the engines are paused. Raises DiskFullError where that was in vain."""
        if is_late:
            raise DiskFullError(
                f"disk full: weight version {self._version} found no room within {_ROOM_S:g} s ({error}). {_MAKE_ROOM}"
            ) from error
        told = "disk full: weight version %d is sent again in %g s (%s). %s"
        logger.warning(told, self._version, _ROOM_POLL_S, error, _MAKE_ROOM)
        await asyncio.sleep(_ROOM_POLL_S)

    def _next_delta(self) -> Mapping[str, Any] | None:
        if self._deltas is None:
            return None
        lacks_weights = isinstance(self._client, Recovering) and self._client.lacks_weights
        return self._deltas.next(self._version, must_be_whole=lacks_weights)

    async def _has_lost_engines(self) -> bool:
        return isinstance(self._client, LossDetecting) and await self._client.has_lost_engines()

    def _num_receivers(self) -> int:
        return self._client.num_weight_receivers() if isinstance(self._client, WeightReceivers) else 1
