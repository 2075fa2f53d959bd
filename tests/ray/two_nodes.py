"""Starts two Ray nodes, connects to them by RAY_ADDRESS, and runs a group on both. test_two_nodes.py runs this script.

Both nodes are raylets on this machine and have the same address, so Ray's node id identifies a rank's node.
"""

from __future__ import annotations

import asyncio
import json
import os

from rl_core.errors import ConfigError, WorkerError
from rl_core.workers import MicroBatchLimits, WorkerGroup
from tests.local_ray import start_cluster
from tests.ray.conftest import START_S
from tests.ray.gloo_backend import GlooBackend, GlooWorker, spec_of
from tests.ray.test_dispatch import batch_of

LIMITS = MicroBatchLimits(max_sequences=1)


async def main() -> None:
    """Prints the observations as one line of JSON."""
    cluster = start_cluster(2)
    (second,) = cluster.worker_nodes
    cluster.wait_for_nodes(timeout=START_S)
    os.environ["RAY_ADDRESS"] = cluster.address
    seen: dict[str, object] = {}
    group = await WorkerGroup.launch(GlooBackend(), spec_of(), num_nodes=2, ranks_per_node=2, timeout_s=START_S)
    try:
        batch = batch_of([3, 5, 2, 7, 4, 6])
        scores = await group.forward(batch, LIMITS, temperature=0.5)
        seen["scores_are_right"] = bool((scores["logprobs"] == batch["tokens"] + 0.5).all())
        ranks = await group._ranks.call(GlooWorker.describe)
        seen["nodes"] = ["second" if rank["node"] == second.node_id else "first" for rank in ranks]
        seen["local_ranks"] = [rank["LOCAL_RANK"] for rank in ranks]
        try:
            await WorkerGroup.launch(GlooBackend(), spec_of(), num_nodes=3, ranks_per_node=1, timeout_s=START_S)
        except ConfigError as error:
            seen["three_nodes"] = str(error)
        started = asyncio.get_running_loop().time()
        call = asyncio.create_task(group.forward(batch_of([3, 4]), LIMITS, temperature=0.5))
        cluster.remove_node(second, allow_graceful=False)
        try:
            await call
            await group.forward(batch, LIMITS, temperature=0.5)
        except WorkerError as error:
            seen["lost_node"] = str(error)
            seen["lost_node_seconds"] = asyncio.get_running_loop().time() - started
    finally:
        await group.close()
        cluster.shutdown()
    print(json.dumps(seen))


if __name__ == "__main__":
    asyncio.run(main())
