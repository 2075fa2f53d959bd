"""Starts Ray for tests. Ray allows a node 30 s to start, which cannot be configured and is too short on a busy machine.
So there are several tries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import ray
from ray.cluster_utils import Cluster

T = TypeVar("T")
_TRIES = 3


def start_ray() -> None:
    """Starts Ray in this process, on loopback and with a small object store."""
    _tried(
        lambda: ray.init(
            "local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20
        )
    )


def start_cluster(num_nodes: int) -> Cluster:
    """Starts Ray nodes of one CPU each: raylets on this machine."""
    node = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    cluster = _tried(lambda: Cluster(initialize_head=True, head_node_args=node))
    for _ in range(num_nodes - 1):
        add_node(cluster)
    return cluster


def add_node(cluster: Cluster) -> None:
    """Adds a node like those of `start_cluster`."""
    _tried(lambda: cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20))


def _tried(start: Callable[[], T]) -> T:
    for number in range(_TRIES):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error) or number == _TRIES - 1:
                raise
            ray.shutdown()
    raise AssertionError
