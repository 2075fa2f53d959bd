"""Sends weights through shared memory of one host: a rank writes each bucket once, and every engine reads it in place.

Serves any number of ranks and engines on one Linux machine. A sync is staged: an engine takes the whole version or
refuses it. While an engine checks a bucket, the rank writes the next one.

Tensors on the host are packed directly into a segment of shared memory, and checksums are computed while the tensors
are in the CPU cache.

A segment is anonymous memory (memfd), which engines open through the rank's `/proc` entry. The kernel frees it when the
last process that uses it ends, for whatever reason. A rank keeps its segments for the next sync, because allocating new
pages costs several times as much as copying the weights. An engine holds a shared file lock on each segment that it has
mapped. A rank that cannot get the exclusive lock of a segment takes another segment, so it never overwrites a segment
that is being read.

Layout of a sync: `<directory>/rank<r>_<i>.json` announces bucket i of rank r; `<directory>/rank<r>.json` gives the
number of rank r's buckets.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attrs

from rl_core.errors import ConfigError, DeadlineError, WeightSyncError
from rl_core.held_folders import make_folder, remove_folder
from rl_core.interfaces import (
    Manifest,
    Rendezvous,
    TensorRecord,
    WeightBucket,
    WeightReceiver,
    WeightSender,
    WeightTransport,
)

if TYPE_CHECKING:
    from torch import Tensor

_MAX_POLL_S = 0.02
_POPULATE_READ = 22
"""Number of MADV_POPULATE_READ (Linux 5.14), which maps all pages at once. Mapping them one by one, as they are read,
takes longer than the checksum."""


@attrs.frozen
class SharedMemoryTransport(WeightTransport):
    """Implements `WeightTransport` between processes of one host."""

    timeout_s: float = 600.0
    """Seconds that an engine waits for a rank's next bucket."""
    run: str = "run"
    """Name of the run that owns the announcements; part of their folder's name."""
    name: str = "shared_memory"
    is_staged: bool = True
    receiver: str = f"{__name__}:SharedMemoryReceiver"

    def of_run(self, run: str) -> Self:
        """Returns a copy of this transport that puts the run's name into the folder's name."""
        return attrs.evolve(self, run=run)

    def validate_nodes(self, num_nodes: int) -> None:
        """Raises ConfigError if the policy trains on several machines, because they cannot share memory."""
        if num_nodes > 1:
            raise ConfigError(
                f"shared_memory works only within one machine, but the policy trains on {num_nodes} machines "
                "(trainer.placement.policy_num_nodes): choose broadcast",
                key="generator.inference_engine.weight_sync_backend",
            )

    def validate(self) -> None:
        """Raises ConfigError if the system does not support memfd."""
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                "shared_memory needs Linux; use files", key="generator.inference_engine.weight_sync_backend"
            )

    def open(self, *, num_ranks: int, num_engines: int) -> Rendezvous:
        """Creates the directory for the ranks' announcements, which only this user can read."""
        del num_engines  # any number of engines may read
        self.validate()
        data = {
            "directory": make_folder(None, self.run),
            "host": _host(),
            "num_ranks": num_ranks,
            "timeout_s": self.timeout_s,
        }
        return Rendezvous(transport=self.name, receiver=self.receiver, data=data)

    def sender(self, rendezvous: Rendezvous, rank: int, world_size: int) -> SharedMemorySender:
        if world_size != rendezvous.data["num_ranks"]:
            raise WeightSyncError(f"the sync was opened for {rendezvous.data['num_ranks']} ranks, not {world_size}")
        return SharedMemorySender(rendezvous, rank)

    def close(self, rendezvous: Rendezvous) -> None:
        remove_folder(rendezvous.data["directory"])


class SharedMemorySender(WeightSender):
    """Sends the weights of one rank."""

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        self._rendezvous = rendezvous
        self._rank = rank

    def send(self, buckets: Iterator[WeightBucket], version: int) -> Manifest:
        """Packs each bucket into shared memory and announces it to the engines. Raises WeightSyncError if the memory or
        the announcement cannot be written, or if this rank is on another host."""
        from rl_core.rank_kit.weight_buckets import bucket_records, draining

        tensors: dict[str, TensorRecord] = {}
        count = 0
        try:
            with draining(buckets), _pool_of(self._rank) as pool:
                _require_same_host(self._rendezvous, f"rank {self._rank}")
                for bucket in buckets:
                    segment = pool.take(bucket.num_bytes)
                    records = bucket_records(segment.write(bucket))
                    self._announce(records, segment, version, count)
                    tensors |= records
                    count += 1
                self._write(f"rank{self._rank}.json", {"version": version, "num_buckets": count})
        except OSError as error:
            where = f"shared memory (announced in {self._rendezvous.data['directory']})"
            raise WeightSyncError(
                f"rank {self._rank} could not write weight version {version} to {where}: {error}"
            ) from error
        return Manifest(version=version, tensors=tensors)

    def _announce(self, records: Mapping[str, TensorRecord], segment: Segment, version: int, index: int) -> None:
        entry = {
            "version": version,
            "path": segment.path,
            "num_bytes": segment.num_bytes,
            "tensors": [[name, record.dtype, record.shape, record.checksum] for name, record in records.items()],
        }
        self._write(f"rank{self._rank}_{index}.json", entry)

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        path = Path(self._rendezvous.data["directory"], name)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(content))
        unfinished.rename(path)


class SharedMemoryReceiver(WeightReceiver):
    """Receives the weights of all ranks in an engine."""

    is_staged = True

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._directory = Path(rendezvous.data["directory"])
        self._timeout_s: float = rendezvous.data["timeout_s"]

    def receive(self, version: int) -> Iterator[WeightBucket]:
        """Yields the buckets of all ranks, after checking their checksums, as copy-on-write views of the shared memory.

        Raises:
            DeadlineError: a rank's next bucket did not arrive in time.
            WeightSyncError: a rank sent another version or is gone, the memory is damaged, the sync was closed
                meanwhile, or this engine is on another host.
        """
        _require_same_host(self._rendezvous, "an engine")
        for rank in range(self._rendezvous.data["num_ranks"]):
            count = 0
            while (entry := self._next(rank, count)) is not None:
                _require_version(entry, version, rank)
                yield _read_bucket(entry, rank)
                count += 1

    def _next(self, rank: int, index: int) -> dict[str, Any] | None:
        """Waits for the announcement of a rank's bucket and returns it; returns None if the rank has no more
        buckets."""
        announced, last = self._directory / f"rank{rank}_{index}.json", self._directory / f"rank{rank}.json"
        deadline, pause_s = time.monotonic() + self._timeout_s, 0.0005
        while True:
            is_complete = last.exists()  # read first: if it exists, all announcements exist too
            if announced.exists():
                return _read_json(announced)
            if is_complete:
                return self._require_all(last, rank, index)
            if not self._directory.exists():
                raise WeightSyncError(f"the sync was closed before rank {rank} had sent its weights")
            if time.monotonic() > deadline:
                raise DeadlineError(f"waited {self._timeout_s:g} s for bucket {index} of rank {rank}'s weights")
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, _MAX_POLL_S)

    def _require_all(self, path: Path, rank: int, count: int) -> None:
        num_buckets = _read_json(path)["num_buckets"]
        if count != num_buckets:
            raise WeightSyncError(f"rank {rank} sent {num_buckets} buckets, but {count} arrived")


# --- segments -------------------------------------------------------------------------------------------------------


class Segment:
    """Memory of this process that other processes can map."""

    def __init__(self, num_bytes: int) -> None:
        import torch

        self.num_bytes = num_bytes
        self._fd = os.memfd_create("rl-weights", os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.tensor = torch.empty(0, dtype=torch.uint8)
        if num_bytes:
            try:
                # Raises if memory is short. Without this call, touching a missing page later would kill the process.
                os.posix_fallocate(self._fd, 0, num_bytes)
                self.tensor = torch.frombuffer(mmap.mmap(self._fd, num_bytes), dtype=torch.uint8)
            except BaseException:
                self.close()
                raise

    def write(self, bucket: WeightBucket) -> WeightBucket:
        """Packs a bucket from any device into this memory and releases the lock, so that engines can map it. Returns
        the packed bucket."""
        from rl_core.rank_kit.weight_buckets import packed_into

        packed = packed_into(self.tensor, bucket)
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return packed

    def lock(self) -> bool:
        """Tries to take the exclusive lock. Returns False if an engine reads the segment. If it returns True, no engine
        can map the segment until `write` has ended."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Closes the segment in this process; engines keep what they have mapped."""
        os.close(self._fd)


class SegmentPool:
    """Keeps the segments of one rank from one sync to the next. A sync enters the pool as a context manager, one sync
    at a time; segments that the sync did not take are freed at the end of the context."""

    def __init__(self) -> None:
        self._free: list[Segment] = []
        self._used: list[Segment] = []

    def __enter__(self) -> SegmentPool:
        self._free, self._used = self._used, []
        return self

    def __exit__(self, *_: object) -> None:
        for segment in self._free:
            segment.close()
        self._free = []

    def take(self, num_bytes: int) -> Segment:
        """Returns a locked segment of exactly this size. Segments can be reused, because a model's buckets have the
        same sizes in every sync."""
        fitting = [segment for segment in self._free if segment.num_bytes == num_bytes]
        segment = next((segment for segment in fitting if segment.lock()), None)
        if segment is None:
            segment = Segment(num_bytes)
            segment.lock()
        else:
            self._free.remove(segment)
        self._used.append(segment)
        return segment


_pools: dict[tuple[int, int], SegmentPool] = {}
"""(Process id, rank) → pool. A forked process must not use the segments of its parent, because engines would look for
them in `/proc` under the wrong process id."""


def _pool_of(rank: int) -> SegmentPool:
    return _pools.setdefault((os.getpid(), rank), SegmentPool())


def _read_bucket(entry: Mapping[str, Any], rank: int) -> WeightBucket:
    from rl_core.rank_kit.weight_buckets import with_checksums

    names, dtypes, shapes, checksums = zip(*entry["tensors"], strict=True) if entry["tensors"] else ((),) * 4
    data = _map(entry["path"], entry["num_bytes"], rank)
    bucket = with_checksums(WeightBucket(names=names, dtypes=dtypes, shapes=tuple(map(tuple, shapes)), data=data))
    damaged = [name for name, sent, came in zip(names, checksums, bucket.checksums or (), strict=True) if sent != came]
    if damaged:
        raise WeightSyncError(
            f"shared memory of rank {rank} is damaged: {', '.join(damaged[:3])} differ from what was sent"
        )
    return bucket


def _map(path: str, num_bytes: int, rank: int) -> Tensor:
    import torch

    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    try:
        # The mapping duplicates the descriptor and shares its lock, so the lock ends when the tensor is freed.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            mapped = mmap.mmap(fd, num_bytes, access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise WeightSyncError(
            f"shared memory of rank {rank} cannot be read: the rank has ended, has begun its next sync, or runs in "
            f"another container: {error}"
        ) from error
    with contextlib.suppress(OSError):  # on an older kernel pages are mapped as they are read
        mapped.madvise(_POPULATE_READ)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _require_version(entry: Mapping[str, Any], version: int, rank: int) -> None:
    if entry["version"] != version:
        raise WeightSyncError(f"rank {rank} sent weight version {entry['version']}, but the engine expects {version}")


def _require_same_host(rendezvous: Rendezvous, who: str) -> None:
    if _host() != rendezvous.data["host"]:
        raise WeightSyncError(
            f"the shared_memory transport serves one host, but {who} runs on another: set "
            "generator.inference_engine.weight_sync_backend to broadcast, or to files with a directory that all hosts "
            "see"
        )


def _host() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise WeightSyncError(f"the sync was closed while {path.name} was read: {error}") from error


shared_memory = SharedMemoryTransport()
