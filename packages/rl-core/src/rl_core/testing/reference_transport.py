"""A weight transport that passes buckets in the memory of one process. It is for tests, and is the shortest example."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import attrs

from rl_core.errors import DeadlineError, WeightSyncError
from rl_core.interfaces import Manifest, Rendezvous, WeightBucket, WeightReceiver, WeightSender, WeightTransport
from rl_core.rank_kit.weight_buckets import tensor_record, unpack_bucket


@attrs.define(eq=False)
class Sync:
    """State of one sync, shared by both sides."""

    num_ranks: int
    changed: threading.Condition = attrs.field(factory=threading.Condition)
    sent: dict[int, tuple[int, list[WeightBucket]]] = attrs.field(factory=dict)
    """The version and the buckets that each rank has sent, by rank."""
    is_closed: bool = False


SYNCS: dict[int, Sync] = {}
_numbers = itertools.count()


@attrs.frozen
class MemoryTransport(WeightTransport):
    """A `WeightTransport` for ranks and engines in one process."""

    name: str = "memory"
    is_staged: bool = True
    receiver: str = f"{__name__}:MemoryReceiver"
    timeout_s: float = 60.0

    def open(self, *, num_ranks: int, num_engines: int) -> Rendezvous:
        del num_engines  # any number of engines may read
        number = next(_numbers)
        SYNCS[number] = Sync(num_ranks)
        return Rendezvous(
            transport=self.name, receiver=self.receiver, data={"sync": number, "timeout_s": self.timeout_s}
        )

    def sender(self, rendezvous: Rendezvous, rank: int, world_size: int) -> MemorySender:
        # A rank must be able to drain its weights even if the sync is closed. Nobody receives these weights.
        closed = Sync(world_size, is_closed=True)
        return MemorySender(SYNCS.get(rendezvous.data["sync"], closed), rank)

    def close(self, rendezvous: Rendezvous) -> None:
        sync = SYNCS.pop(rendezvous.data["sync"], None)
        if sync:
            with sync.changed:
                sync.is_closed = True
                sync.changed.notify_all()


class MemorySender(WeightSender):
    """The rank's end of the transport."""

    def __init__(self, sync: Sync, rank: int) -> None:
        self._sync = sync
        self._rank = rank

    def send(self, buckets: Iterator[WeightBucket], version: int) -> Manifest:
        kept = [attrs.evolve(bucket, data=bucket.data.clone()) for bucket in buckets]
        with self._sync.changed:
            self._sync.sent[self._rank] = (version, kept)
            self._sync.changed.notify_all()
        return manifest_of(kept, version)


class MemoryReceiver(WeightReceiver):
    """The engine's end of the transport."""

    is_staged = True

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._number: int = rendezvous.data["sync"]
        self._timeout_s: float = rendezvous.data["timeout_s"]

    def receive(self, version: int) -> Iterator[WeightBucket]:
        sync = SYNCS.get(self._number)
        if sync is None:
            raise WeightSyncError("the sync is closed")
        with sync.changed:
            if not sync.changed.wait_for(lambda: sync.is_closed or len(sync.sent) == sync.num_ranks, self._timeout_s):
                raise DeadlineError(
                    f"waited {self._timeout_s:g} s for {sync.num_ranks} ranks, of which {len(sync.sent)} have sent"
                )
        if sync.is_closed:
            raise WeightSyncError("the sync was closed before the engine had received it")
        for rank, (sent_version, buckets) in sorted(sync.sent.items()):
            if sent_version != version:
                raise WeightSyncError(f"rank {rank} sent version {sent_version}, expected {version}")
            yield from buckets


def manifest_of(buckets: list[WeightBucket], version: int) -> Manifest:
    """Computes the manifest of all tensors in `buckets`."""
    tensors = {name: tensor_record(tensor) for bucket in buckets for name, tensor in unpack_bucket(bucket)}
    return Manifest(version=version, tensors=tensors)
