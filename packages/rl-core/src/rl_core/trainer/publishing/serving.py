"""The loop's interface to the engines: publishes and verifies versions, and returns restarted engines to service.

A run whose responses come from its data has no engines and uses `NoEngines`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs

from rl_core.errors import DeadlineError, DiskFullError, WeightSyncError
from rl_core.interfaces import InferenceClient, PauseMode, WeightTransport
from rl_core.stored_files import is_disk_full
from rl_core.trainer.publishing.colocation import EngineTurns
from rl_core.trainer.publishing.delta_syncs import DeltaSyncs, sent_share
from rl_core.trainer.publishing.publish import Publication, publish_weights
from rl_core.trainer.publishing.verification import VerificationSettings, verification_of
from rl_core.workers import WorkerGroup

logger = logging.getLogger(__name__)

_MOST_ENGINES = 32
"""Largest number of engines for which separate idle times are reported."""
_ROOM_S, _ROOM_POLL_S = 600.0, 5.0
"""Seconds that a weight sync waits for space on a full disk, and seconds between tries."""
_MAKE_ROOM = "Make room there, or start the run with TMPDIR set to a directory that has more space"
_MOST_LOST = 3
"""The run ends if an engine was lost in this many tries to publish a version, because the sync itself may be what
crashes the engines."""


@attrs.frozen(kw_only=True)
class ServingSettings:
    """Settings of weight syncs and of their verification."""

    max_bucket_bytes: int
    pause_mode: PauseMode
    delta_interval: int | None = None
    """Every `delta_interval`-th sync sends whole weights; if the engines have the previous version, the others
    send only changes. None: all syncs send whole weights, unless `only_trained`."""
    only_trained: bool = False
    """Whether a sync sends only trained tensors to engines that have the previous version. Not with
    `delta_interval`."""
    verification: VerificationSettings


class Engines(Protocol):
    """The loop's interface to the engines that sample from the policy."""

    @property
    def is_sampled_from(self) -> bool:
        """Whether samples come from an engine, so that its log-probs can be compared with the trainer's."""
        ...

    @property
    def are_shared(self) -> bool:
        """Whether engine and models take turns on the devices."""
        ...

    @property
    def are_asleep(self) -> bool:
        """Whether the engines sleep. Sleeping engines have lost their weights, so they cannot sample before the next
        `publish`."""
        ...

    async def publish(self, version: int) -> dict[str, float]:
        """Publishes the policy's weights as `version`. Returns metrics of the sync and, if one was due, of the
        verification."""
        ...

    async def prove(self) -> None:
        """Proves at the start of the run that every tensor reaches the engines, if the settings enable the proof."""
        ...

    async def bring_back(self, version: Callable[[], int], between_versions: asyncio.Lock) -> None:
        """Publishes the current version again whenever a restarted engine needs it. Runs until it is cancelled.

        Args:
            version: returns the current version.
            between_versions: the loop holds this lock while a step changes the weights, and while models compute on
                devices that they share with the engines.
        """
        ...

    async def to_models(self) -> None:
        """Puts the engines to sleep if they share devices with the models. Must be called before a model computes, when
        no request is running."""
        ...

    def idle_lap(self) -> dict[str, float]:
        """Returns metrics `time/engine_idle…`: seconds since the last call during which engines had no request."""
        ...


class NoEngines:
    """Implements `Engines` for runs whose responses come from their data. Publishes nothing, because there is no
    engine."""

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
    """Implements `Engines` with the engines of an `InferenceClient`."""

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
        sends_changes = settings.delta_interval is not None or settings.only_trained
        deltas = DeltaSyncs(settings.delta_interval, only_trained=settings.only_trained)
        self._deltas = deltas if sends_changes else None
        self._verification = verification_of(settings.verification, policy, client, self._publish)
        self.idle_lap()  # the first call starts the measurement

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
        """See `Engines.bring_back`. While a step changes the weights, waits, because the sync of this step also reaches
        the restarted engine."""
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
        """Returns the mean idle time of all engines, and the idle time of each of the first `_MOST_ENGINES`. Empty with
        one engine."""
        idle = self._client.idle_lap()
        if len(idle) < 2:
            return {}
        each = {f"time/engine_idle/{engine}": seconds for engine, seconds in [*idle.items()][:_MOST_ENGINES]}
        return {"time/engine_idle": sum(idle.values()) / len(idle), **each}

    async def _publish(self) -> Publication:
        """Publishes the version. Repeats the sync if an engine or the connection to it was lost, because the sync
        has then failed for all engines. If a sync of changes failed, repeats it with whole weights. If a disk was full,
        waits for space and repeats the sync.

        Raises:
            WeightSyncError, DeadlineError: the sync failed with all engines alive, or engines were lost in every try.
            DiskFullError: the disk stayed full for too long.
            OSError: reading or writing failed in another way.
        """
        num_lost, clock = 0, asyncio.get_running_loop().time
        deadline = clock() + _ROOM_S
        while True:
            num_receivers, delta = self._client.num_weight_receivers(), self._next_delta()
            try:
                async with self._turns.handover():
                    published = await publish_weights(
                        self._policy,
                        self._client,
                        self._transport,
                        self._version,
                        max_bucket_bytes=self._settings.max_bucket_bytes,
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
                    logger.warning("publishing again with whole weights because the sync of changes failed: %s", error)
                elif self._client.num_weight_receivers() != num_receivers or await self._client.has_lost_engines():
                    num_lost += 1
                    if num_lost == _MOST_LOST:
                        raise WeightSyncError(
                            f"weight version {self._version}: engines or their connections were lost in each of "
                            f"{num_lost} tries to publish it; the engines' logs may say why. The last error: {error}"
                        ) from error
                    logger.warning("publishing again because an engine or its connection was lost: %s", error)
                else:
                    raise
            else:
                if self._deltas is not None and delta is not None:
                    self._deltas.succeeded(delta)
                return published

    async def _room(self, error: Exception, *, is_late: bool) -> None:
        """Waits `_ROOM_POLL_S` for disk space, while the engines are paused. Raises DiskFullError if `is_late`."""
        if is_late:
            raise DiskFullError(
                f"disk full: there was no room for weight version {self._version} within {_ROOM_S:g} s ({error}). "
                f"{_MAKE_ROOM}"
            ) from error
        message = "disk full: weight version %d is sent again in %g s (%s). %s"
        logger.warning(message, self._version, _ROOM_POLL_S, error, _MAKE_ROOM)
        await asyncio.sleep(_ROOM_POLL_S)

    def _next_delta(self) -> Mapping[str, Any] | None:
        if self._deltas is None:
            return None
        # An engine that has slept has lost its weights; with `weight_sync_delta`, it has kept a copy.
        is_empty = self._deltas.only_trained and self._turns.engine_sleeps
        return self._deltas.next(self._version, must_be_whole=self._client.lacks_weights or is_empty)
