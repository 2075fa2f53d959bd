"""Sends weights through files: each rank writes its buckets and then a manifest; engines wait for all manifests.

Serves any number of ranks and engines that can access the same directory. A sync is staged: an engine takes the whole
version or refuses it. By default buckets are stored in memory (`/dev/shm`) while they fit, else in the temporary
folder; ranks and engines on several machines need a `directory` that all of them can access.

Layout of a sync: `<directory>/rank<r>_<i>.bucket` has the raw bytes of bucket i of rank r, as in `WeightBucket.data`.
`<directory>/rank<r>.json` is the rank's manifest: the version and, for each bucket, its file, size and tensors with
checksums. It is renamed into place when all buckets of the rank are complete.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
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

_SHARED_MEMORY = Path("/dev/shm")
_MAX_POLL_S = 0.05


@attrs.frozen
class FilesTransport(WeightTransport):
    """Implements `WeightTransport` with a directory for each sync."""

    directory: str | None = None
    """Directory in which each sync creates its own directory; None: `/dev/shm` while buckets fit, else the temporary
    folder."""
    timeout_s: float = 600.0
    """Seconds that an engine waits for the manifests of all ranks."""
    run: str = "run"
    """Name of the run that owns the files; part of their folders' names."""
    name: str = "files"
    is_staged: bool = True
    receiver: str = f"{__name__}:FilesReceiver"

    def of_run(self, run: str) -> Self:
        """Returns a copy of this transport that puts the run's name into the names of its folders."""
        return attrs.evolve(self, run=run)

    def validate(self) -> None:
        """Raises ConfigError if the configured directory does not exist or cannot be written."""
        directory = self.directory
        if directory is not None and not (Path(directory).is_dir() and os.access(directory, os.W_OK | os.X_OK)):
            raise ConfigError(
                f"the directory of files is {directory}, which does not exist or cannot be written; create it, or name "
                "another in FilesTransport",
                key="generator.inference_engine.weight_sync_backend",
            )

    def validate_nodes(self, num_nodes: int) -> None:
        """Raises ConfigError if there are several machines but no shared folder is configured."""
        if num_nodes > 1 and self.directory is None:
            raise ConfigError(
                "files uses folders of this machine, but the policy "
                f"trains on {num_nodes} machines (trainer.placement.policy_num_nodes): choose broadcast, or define a "
                'transport with a folder that all machines see, shared = FilesTransport(directory="/shared/tmp"), in '
                "your own module, and set generator.inference_engine.weight_sync_backend=my_module:shared",
                key="generator.inference_engine.weight_sync_backend",
            )

    def open(self, *, num_ranks: int, num_engines: int) -> Rendezvous:
        """Creates the sync's directory. If no `directory` is configured and /dev/shm is writable, also creates a
        directory in memory. Only this user can read the directories."""
        del num_engines  # any number of engines may read
        directories = [make_folder(self.directory, self.run)]
        if self.directory is None and os.access(_SHARED_MEMORY, os.W_OK):
            directories.append(make_folder(_SHARED_MEMORY, self.run))
        data = {"directories": directories, "num_ranks": num_ranks, "timeout_s": self.timeout_s}
        return Rendezvous(transport=self.name, receiver=self.receiver, data=data)

    def sender(self, rendezvous: Rendezvous, rank: int, world_size: int) -> FilesSender:
        if world_size != rendezvous.data["num_ranks"]:
            raise WeightSyncError(f"the sync was opened for {rendezvous.data['num_ranks']} ranks, not {world_size}")
        return FilesSender(rendezvous, rank)

    def close(self, rendezvous: Rendezvous) -> None:
        for directory in rendezvous.data["directories"]:
            remove_folder(directory)


class FilesSender(WeightSender):
    """Sends the weights of one rank."""

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        self._directories = [Path(directory) for directory in rendezvous.data["directories"]]
        self._rank = rank

    def send(self, buckets: Iterator[WeightBucket], version: int) -> Manifest:
        """Writes each bucket before it draws the next one. Raises WeightSyncError if a file cannot be written."""
        from rl_core.rank_kit.weight_buckets import draining

        tensors: dict[str, TensorRecord] = {}
        entries = []
        try:
            with draining(buckets):
                for i, bucket in enumerate(buckets):
                    num_bytes = bucket.num_bytes
                    path, records = self._write(f"rank{self._rank}_{i}.bucket", bucket)
                    tensors |= records
                    described = [
                        [name, record.dtype, record.shape, record.checksum] for name, record in records.items()
                    ]
                    entries.append({"file": str(path), "num_bytes": num_bytes, "tensors": described})
                self._write_manifest({"version": version, "buckets": entries})
        except OSError as error:
            where = " or ".join(map(str, reversed(self._directories)))
            raise WeightSyncError(
                f"rank {self._rank} could not write weight version {version} to {where}: {error}"
            ) from error
        return Manifest(version=version, tensors=tensors)

    def _write(self, name: str, bucket: WeightBucket) -> tuple[Path, dict[str, TensorRecord]]:
        """Writes a bucket to memory if it fits, else to disk; returns the file and the tensors' records."""
        *memory, disk = reversed(self._directories)
        for directory in memory:
            # Files in memory are a second copy of the weights, so a bucket may take at most half of the free memory.
            if shutil.disk_usage(directory).free > 2 * bucket.num_bytes:
                path = directory / name
                try:
                    return path, _write_bucket(path, bucket)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    path.unlink(missing_ok=True)  # other ranks have filled the memory meanwhile
        return disk / name, _write_bucket(disk / name, bucket)

    def _write_manifest(self, manifest: Mapping[str, Any]) -> None:
        path = _manifest_path(self._directories[0], self._rank)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(manifest))
        unfinished.rename(path)


class FilesReceiver(WeightReceiver):
    """Receives the weights of all ranks in an engine."""

    is_staged = True

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._directories = [Path(directory) for directory in rendezvous.data["directories"]]
        self._num_ranks: int = rendezvous.data["num_ranks"]
        self._timeout_s: float = rendezvous.data["timeout_s"]

    def receive(self, version: int) -> Iterator[WeightBucket]:
        """Yields the buckets of all ranks, after checking their sizes and checksums.

        Raises:
            DeadlineError: a rank's manifest did not appear in time.
            WeightSyncError: a rank sent another version, a file is missing, truncated, damaged or outside the sync's
                directories, or the sync was closed meanwhile.
        """
        manifests = self._wait_for_manifests()
        for rank, manifest in enumerate(manifests):
            if manifest["version"] != version:
                raise WeightSyncError(
                    f"rank {rank} sent weight version {manifest['version']}, but the engine expects {version}"
                )
        for rank, manifest in enumerate(manifests):
            for entry in manifest["buckets"]:
                if Path(entry["file"]).parent not in self._directories:
                    raise WeightSyncError(f"rank {rank} names a file outside the directories of the sync")
                yield _read_bucket(entry, version)

    def _wait_for_manifests(self) -> list[dict[str, Any]]:
        deadline = time.monotonic() + self._timeout_s
        pause_s = 0.001
        directory = self._directories[0]
        paths = [_manifest_path(directory, rank) for rank in range(self._num_ranks)]
        while missing := [rank for rank, path in enumerate(paths) if not path.exists()]:
            if not directory.exists():
                raise WeightSyncError(f"the sync was closed before ranks {missing} had sent their weights")
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"waited {self._timeout_s:g} s for ranks {missing} of {self._num_ranks} to send their weights"
                )
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, _MAX_POLL_S)
        return [_read_manifest(path) for path in paths]


def _read_bucket(entry: Mapping[str, Any], version: int) -> WeightBucket:
    from rl_core.rank_kit.weight_buckets import with_checksums

    path, expected = Path(entry["file"]), entry["num_bytes"]
    try:
        data = _read_bytes(path)
    except OSError as error:
        raise WeightSyncError(f"weight version {version}: {path} cannot be read: {error}") from error
    if data.numel() != expected:
        raise WeightSyncError(f"weight version {version}: {path} has {data.numel()} bytes, expected {expected}")
    names, dtypes, shapes, checksums = zip(*entry["tensors"], strict=True) if entry["tensors"] else ((),) * 4
    bucket = with_checksums(WeightBucket(names=names, dtypes=dtypes, shapes=tuple(map(tuple, shapes)), data=data))
    damaged = [name for name, sent, came in zip(names, checksums, bucket.checksums or (), strict=True) if sent != came]
    if damaged:
        raise WeightSyncError(
            f"weight version {version}: {path} is damaged: {', '.join(damaged[:3])} differ from what was sent"
        )
    return bucket


def _write_bucket(path: Path, bucket: WeightBucket) -> dict[str, TensorRecord]:
    """Writes a bucket's tensors to a file without packing them first, releases the bucket, and returns the tensors'
    records."""
    import torch

    from rl_core.rank_kit.weight_buckets import bucket_records, unpack_bucket

    on_host = bucket if bucket.parts is not None else attrs.evolve(bucket, data=bucket.data.detach().cpu())
    with path.open("wb", buffering=0) as file:
        for _, tensor in unpack_bucket(on_host):
            data: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            # Linux writes at most 2 GiB per call.
            while len(data):
                data = data[file.write(data) :]
    records = bucket_records(on_host)
    bucket.taken()
    return records


def _read_bytes(path: Path) -> Tensor:
    from rl_core.rank_kit.host_memory import fresh_memory

    data = fresh_memory(path.stat().st_size)
    with path.open("rb", buffering=0) as file:
        view, at = data.numpy().data, 0
        while count := file.readinto(view[at:]):
            at += count
    return data[:at]


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise WeightSyncError(f"the sync was closed while {path.name} was read: {error}") from error


def _manifest_path(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.json"


files = FilesTransport()
