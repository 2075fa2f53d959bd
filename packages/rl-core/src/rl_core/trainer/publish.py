"""One weight sync: ranks send, engines load, both sides' manifests must be equal."""

from __future__ import annotations

import asyncio

from rl_core.errors import first_error
from rl_core.interfaces import InferenceClient, WeightTransport
from rl_core.weights import require_same
from rl_core.workers import WorkerGroup


async def publish_weights(
    group: WorkerGroup,
    client: InferenceClient,
    transport: WeightTransport,
    version: int,
    *,
    max_bucket_bytes: int,
    num_engines: int = 1,
) -> None:
    """Brings the engines to the group's weights, as `version`; in-flight requests go on under the new weights.

    Raises:
        WeightSyncError: what arrived is not what was sent. The engines stay paused: they serve nothing until a good
        sync.
    """
    rendezvous = transport.open(num_ranks=group.mesh.world_size, num_engines=num_engines)
    try:
        await client.pause("keep")
        async with asyncio.TaskGroup() as both:
            sending = both.create_task(group.publish(rendezvous, version, max_bucket_bytes))
            receiving = both.create_task(client.update_weights(rendezvous, version))
        require_same(sending.result(), receiving.result())
        await client.resume()
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
    finally:
        transport.close(rendezvous)
