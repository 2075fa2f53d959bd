"""Publishes weights in one sync: ranks send, engines load, and the manifests of both sides must be equal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import attrs

from rl_core.interfaces import InferenceClient, Manifest, PauseMode, WeightTransport
from rl_core.rank_kit.weight_buckets import require_same
from rl_core.tasks import code_of
from rl_core.workers import WorkerGroup

R = TypeVar("R")
_END_S = 10.0
"""Longest wait, in seconds, for engines to end their part of a failed sync."""


@attrs.frozen(kw_only=True)
class Publication:
    """The result of a sync that succeeded."""

    sent: Manifest
    """The manifest of the weights that the engines now hold."""
    pause_s: float
    """Seconds from the request to pause sampling until the engines have resumed."""


async def publish_weights(
    group: WorkerGroup,
    client: InferenceClient,
    transport: WeightTransport,
    version: int,
    *,
    max_bucket_bytes: int,
    pause_mode: PauseMode = "keep",
    delta: Mapping[str, Any] | None = None,
) -> Publication:
    """Publishes the group's weights to the engines as `version`. If the transport is staged and the client
    `can_prepare_weights`, engines keep sampling while they receive, and pause only to load.

    Args:
        group: the policy's ranks, which send the weights.
        client: client of the engines, which receive and load them.
        transport: moves the weights from ranks to engines.
        version: number of the version that the engines will serve.
        max_bucket_bytes: largest size of one bucket.
        pause_mode: what happens to running requests: see `InferenceClient.pause`.
        delta: see `Rendezvous`; None: whole weights, of which neither side keeps a copy.

    Raises:
        WeightSyncError: the weights that arrived are not those that were sent.
        RLError, OSError: one side failed; if both sides failed, this is the error of the side that failed first.

    After any error, engines that were paused for the sync stay paused and serve nothing until a sync succeeds.
    """
    prepares = transport.is_staged and client.can_prepare_weights
    # Receivers are counted after the pause, so that the sync does not wait for an engine that was lost while pausing.
    paused_at = None if prepares else await _paused(client, pause_mode)
    opened = transport.open(num_ranks=group.mesh.world_size, num_engines=client.num_weight_receivers())
    rendezvous = attrs.evolve(opened, adapter=group.adapter, delta=delta, is_staged=transport.is_staged)

    async def both(receiving: Awaitable[R]) -> tuple[Manifest, R]:
        sender = asyncio.ensure_future(group.publish(rendezvous, version, max_bucket_bytes))
        receiver = asyncio.ensure_future(_of_client(client, receiving))
        await _both_or_neither(sender, receiver, stop=lambda: transport.close(rendezvous))
        return sender.result(), receiver.result()

    try:
        if not prepares:
            sent, received = await both(client.update_weights(rendezvous, version))
        else:
            sent, _ = await both(client.prepare_weights(rendezvous, version))
            paused_at = await _paused(client, pause_mode)
            received = await _of_client(client, client.update_weights(rendezvous, version))
        require_same(sent, received)
        await _of_client(client, client.resume())
        resumed_at = time.monotonic()
    finally:
        transport.close(rendezvous)
    assert paused_at is not None
    return Publication(sent=sent, pause_s=resumed_at - paused_at)


async def _paused(client: InferenceClient, mode: PauseMode) -> float:
    """Pauses the engines. Returns the time of the request."""
    asked_at = time.monotonic()
    await _of_client(client, client.pause(mode))
    return asked_at


async def _of_client(client: InferenceClient, answering: Awaitable[R]) -> R:
    with code_of(f"the engine client {type(client).__name__}"):
        return await answering


async def _both_or_neither(
    sending: asyncio.Future[Any], receiving: asyncio.Future[Any], *, stop: Callable[[], None]
) -> None:
    """Waits for both sides. If one side fails, calls `stop`, which closes the transport so that the other side fails
    too. Then waits for the other side, because a rank cannot begin its next call before it has stopped sending. If the
    engines' side has not ended after `_END_S`, it is cancelled. Raises the first error."""
    both = {sending, receiving}
    try:
        done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        failures = [error for future in done if (error := future.exception()) is not None]
        if failures:
            stop()
            await asyncio.wait({receiving}, timeout=_END_S)
            receiving.cancel()
            await asyncio.wait(both)
            raise failures[0]
    except asyncio.CancelledError:
        for future in both:
            future.cancel()
        raise
    finally:
        for future in both:
            if future.done() and not future.cancelled():
                future.exception()  # retrieved, so that asyncio does not log the consequential error of the other side
