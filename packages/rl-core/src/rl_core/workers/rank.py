"""What runs in a rank's process: it builds the worker and answers calls by name."""

from __future__ import annotations

from typing import Any

from rl_core import plugins
from rl_core.interfaces import Backend, Manifest, RankInfo, Rendezvous, Worker, WorkerSpec


class RankHost:
    """One rank. All calls come from one thread, in order."""

    def __init__(self, backend: Backend, spec: WorkerSpec, rank: RankInfo):
        self._rank = rank
        self._worker: Worker = backend.create_worker(spec, rank)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls the worker's `method`."""
        return getattr(self._worker, method)(*args, **kwargs)

    def publish(self, rendezvous: Rendezvous, version: int, max_bucket_bytes: int) -> Manifest:
        """Builds this rank's end of the transport and sends the weights through it."""
        transport = plugins.load("rl_core.weight_transports", rendezvous.transport)
        sender = transport.sender(rendezvous, self._rank.rank, self._rank.world_size)
        return self._worker.publish(sender, version, max_bucket_bytes)
