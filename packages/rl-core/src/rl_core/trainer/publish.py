"""One weight sync: ranks send, engines load, both sides' manifests must be equal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs

from rl_core.interfaces import InferenceClient, Manifest, WeightReceivers, WeightTransport
from rl_core.rank_kit.weight_buckets import require_same
from rl_core.workers import WorkerGroup

PauseMode = Literal["keep", "abort", "wait"]


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
) -> Manifest:
    """Brings the engines to the group's weights, as `version`; returns what they hold.

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
        WeightSyncError: what arrived is not what was sent. The engines stay paused: they serve nothing until a good
        sync.
    """
    num_receivers = client.num_weight_receivers() if isinstance(client, WeightReceivers) else num_engines
    opened = transport.open(num_ranks=group.mesh.world_size, num_engines=num_receivers)
    rendezvous = attrs.evolve(opened, adapter=group.adapter, delta=delta)
    try:
        await client.pause(pause_mode)
        sending = asyncio.ensure_future(group.publish(rendezvous, version, max_bucket_bytes))
        receiving = asyncio.ensure_future(client.update_weights(rendezvous, version))
        await _both_or_neither(sending, receiving, stop=lambda: transport.close(rendezvous))
        require_same(sending.result(), receiving.result())
        await client.resume()
    finally:
        transport.close(rendezvous)
    return sending.result()


async def _both_or_neither(
    sending: asyncio.Future[Any], receiving: asyncio.Future[Any], *, stop: Callable[[], None]
) -> None:
    """Waits for both. When one fails the other is told through the transport and waited for too: a rank that still
    sends would hold up whatever it is asked next. Raises the error that came first."""
    both = {sending, receiving}
    try:
        done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        failures = [error for future in done if (error := future.exception()) is not None]
        if failures:
            stop()
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
