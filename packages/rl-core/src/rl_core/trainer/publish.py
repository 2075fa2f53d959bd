"""One weight sync: ranks send, engines load, both sides' manifests must be equal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, TypeVar

import attrs

from rl_core.interfaces import InferenceClient, Manifest, WeightPreparing, WeightReceivers, WeightTransport
from rl_core.rank_kit.weight_buckets import require_same
from rl_core.tasks import code_of
from rl_core.workers import WorkerGroup

R = TypeVar("R")
PauseMode = Literal["keep", "abort", "wait"]
_END_S = 10.0
"""For engines to end their part of a sync that failed."""


@attrs.frozen(kw_only=True)
class Publication:
    """A sync that succeeded."""

    sent: Manifest
    """What the engines hold."""
    pause_s: float
    """How long they sampled nothing for it."""


async def publish_weights(
    group: WorkerGroup,
    client: InferenceClient,
    transport: WeightTransport,
    version: int,
    *,
    max_bucket_bytes: int,
    num_engines: int = 1,
    pause_mode: PauseMode = "keep",
    delta: Mapping[str, Any] | None = None,
) -> Publication:
    """Brings the engines to the group's weights, as `version`. Where the transport is staged and the client is
    `WeightPreparing`, engines sample until they have received it, and pause for the swap alone.

    Args:
        group: the ranks that send.
        client: the engines.
        transport: how the weights travel.
        version: what the engines call them.
        max_bucket_bytes: of what travels at a time.
        num_engines: of a client that does not say how many processes receive.
        pause_mode: what becomes of requests under way: see `InferenceClient.pause`.
        delta: see `Rendezvous`; None: whole weights, which nobody keeps.

    Raises:
        WeightSyncError: what arrived is not what was sent. Engines that had been paused for it stay so, and serve
        nothing until a good sync.
    """
    preparing = client if transport.is_staged and isinstance(client, WeightPreparing) else None
    # Receivers are counted after the pause, so that the sync does not wait for an engine that was lost during it.
    paused_at = await _paused(client, pause_mode) if preparing is None else None
    num_receivers = client.num_weight_receivers() if isinstance(client, WeightReceivers) else num_engines
    opened = transport.open(num_ranks=group.mesh.world_size, num_engines=num_receivers)
    rendezvous = attrs.evolve(opened, adapter=group.adapter, delta=delta, is_staged=transport.is_staged)

    async def both(receiving: Awaitable[R]) -> tuple[Manifest, R]:
        sender = asyncio.ensure_future(group.publish(rendezvous, version, max_bucket_bytes))
        receiver = asyncio.ensure_future(_of_client(client, receiving))
        await _both_or_neither(sender, receiver, stop=lambda: transport.close(rendezvous))
        return sender.result(), receiver.result()

    try:
        if preparing is None:
            sent, received = await both(client.update_weights(rendezvous, version))
        else:
            sent, _ = await both(preparing.prepare_weights(rendezvous, version))
            paused_at = await _paused(client, pause_mode)
            received = await _of_client(client, client.update_weights(rendezvous, version))
        require_same(sent, received)
        await _of_client(client, client.resume())
    finally:
        transport.close(rendezvous)
    assert paused_at is not None
    return Publication(sent=sent, pause_s=time.monotonic() - paused_at)


async def _paused(client: InferenceClient, mode: PauseMode) -> float:
    """When the engines were asked to pause; they have."""
    asked_at = time.monotonic()
    await _of_client(client, client.pause(mode))
    return asked_at


async def _of_client(client: InferenceClient, answering: Awaitable[R]) -> R:
    with code_of(f"the engine client {type(client).__name__}"):
        return await answering


async def _both_or_neither(
    sending: asyncio.Future[Any], receiving: asyncio.Future[Any], *, stop: Callable[[], None]
) -> None:
    """Waits for both. When one fails the other is told through the transport and waited for too: a rank that still
    sends would hold up whatever it is asked next. An engine that does not end is given up: it may be hung. Raises the
    error that came first."""
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
                future.exception()  # the other side's error follows from the first
