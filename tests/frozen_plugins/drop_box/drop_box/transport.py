"""Weights through a folder: each rank drops one file, an engine waits until all are there. Imports no torch."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import attrs

from rl_core.errors import DeadlineError, WeightSyncError
from rl_core.interfaces import Manifest, Rendezvous, WeightBucket


@attrs.frozen
class DropBox:
    """WeightTransport for ranks and engines that see one folder."""

    contract_version: int = 1
    name: str = "drop_box"
    is_staged: bool = True
    timeout_s: float = 600.0
    """How long an engine waits for the ranks."""

    def open(self, *, num_ranks: int, num_engines: int) -> Rendezvous:
        """Makes the sync's folder."""
        del num_engines  # any number may read
        data = {
            "folder": tempfile.mkdtemp(prefix="drop-box-"),
            "num_ranks": num_ranks,
            "timeout_s": self.timeout_s,
        }
        return Rendezvous(transport=self.name, receiver=f"{__name__}:DropBoxReceiver", data=data)

    def sender(self, rendezvous: Rendezvous, rank: int, world_size: int) -> DropBoxSender:
        return DropBoxSender(Path(rendezvous.data["folder"]), rank)

    def close(self, rendezvous: Rendezvous) -> None:
        shutil.rmtree(rendezvous.data["folder"], ignore_errors=True)


class DropBoxSender:
    """A rank's end."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank

    def send(self, buckets: Iterator[WeightBucket], version: int) -> Manifest:
        import torch

        from rl_core.weights import bucket_records

        kept = [attrs.evolve(bucket, data=bucket.data.detach().cpu().clone()) for bucket in buckets]
        dropped = [(list(b.names), list(b.dtypes), [list(shape) for shape in b.shapes], b.data) for b in kept]
        tensors = {name: record for bucket in kept for name, record in bucket_records(bucket).items()}
        checksums = {name: record.checksum for name, record in tensors.items()}
        unfinished = self._folder / f"{self._rank}.unfinished"
        try:
            torch.save({"version": version, "buckets": dropped, "checksums": checksums}, unfinished)
            unfinished.rename(self._folder / f"{self._rank}.pt")
        except (OSError, RuntimeError) as error:
            raise WeightSyncError(f"rank {self._rank} could not drop weight version {version}: {error}") from error
        return Manifest(version=version, tensors=tensors)


class DropBoxReceiver:
    """An engine's end."""

    is_staged = True

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._folder = Path(rendezvous.data["folder"])
        self._num_ranks: int = rendezvous.data["num_ranks"]
        self._timeout_s: float = rendezvous.data["timeout_s"]

    def receive(self, version: int) -> Iterator[WeightBucket]:
        for rank, file in enumerate(self._files()):
            yield from _read(file, rank, version)

    def _files(self) -> list[Path]:
        """One per rank, as soon as all are there."""
        files = [self._folder / f"{rank}.pt" for rank in range(self._num_ranks)]
        deadline = time.monotonic() + self._timeout_s
        while missing := [file.stem for file in files if not file.exists()]:
            if not self._folder.exists():
                raise WeightSyncError(f"the sync was closed before ranks {', '.join(missing)} had sent")
            if time.monotonic() > deadline:
                raise DeadlineError(f"waited {self._timeout_s:g} s for ranks {', '.join(missing)}")
            time.sleep(0.002)
        return files


def _read(file: Path, rank: int, version: int) -> Iterator[WeightBucket]:
    import torch

    from rl_core.weights import bucket_records

    try:
        content = torch.load(file, weights_only=True)
    except (OSError, RuntimeError) as error:
        raise WeightSyncError(f"weight version {version}: {file} cannot be read: {error}") from error
    if content["version"] != version:
        raise WeightSyncError(f"rank {rank} sent version {content['version']}, version {version} was expected")
    for names, dtypes, shapes, data in content["buckets"]:
        bucket = WeightBucket(
            names=tuple(names), dtypes=tuple(dtypes), shapes=tuple(tuple(shape) for shape in shapes), data=data
        )
        for name, record in bucket_records(bucket).items():
            if record.checksum != content["checksums"][name]:
                raise WeightSyncError(f"weight version {version}: {name} is not what rank {rank} sent")
        yield bucket


drop_box = DropBox()
