"""A transport that records what ranks publish, so that a suite can check it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs
import torch
from torch import Tensor

from rl_core.interfaces import Manifest, Rendezvous, WeightBucket, WeightSender, WeightTransport
from rl_core.rank_kit.weight_buckets import tensor_record, unpack_bucket


@attrs.frozen
class RecordingTransport(WeightTransport):
    """A `WeightTransport` without receivers. Each rank writes its tensors to the directory of the rendezvous."""

    directory: Path | None = None
    """Directory in which one sync is recorded. None on ranks, which get the directory from the rendezvous."""
    name: str = f"{__name__}:recording_transport"

    is_staged: bool = True

    def open(self, *, num_ranks: int, num_engines: int) -> Rendezvous:
        """Creates `directory`, and returns a rendezvous that names it."""
        assert self.directory is not None, "only a transport with a directory can be opened"
        self.directory.mkdir()
        return Rendezvous(transport=self.name, receiver="", data={"directory": str(self.directory)})

    def sender(self, rendezvous: Rendezvous, rank: int, world_size: int) -> RecordingSender:
        """See `WeightTransport.sender`."""
        return RecordingSender(Path(rendezvous.data["directory"], f"{rank}.pt"))

    def close(self, rendezvous: Rendezvous) -> None:
        """Does nothing: the recorded files are kept."""


recording_transport = RecordingTransport()
"""The transport that ranks load by name."""


@attrs.frozen
class RecordingSender(WeightSender):
    """The rank's end of the transport."""

    path: Path

    def send(self, buckets: Iterator[WeightBucket], version: int) -> Manifest:
        """Exhausts the buckets, and writes their tensors and sizes to `path`."""
        tensors: dict[str, Tensor] = {}
        bucket_bytes = []
        for bucket in buckets:
            bucket_bytes.append(bucket.data.numel())
            for name, tensor in unpack_bucket(bucket):
                if name in tensors:
                    raise AssertionError(f"{name} was sent twice by one rank")
                tensors[name] = tensor.detach().cpu().clone()
        torch.save({"tensors": tensors, "bucket_bytes": bucket_bytes}, self.path)
        return Manifest(version=version, tensors={name: tensor_record(t) for name, t in tensors.items()})


@attrs.frozen(kw_only=True, eq=False)
class Published:
    """The data that all ranks sent."""

    manifest: Manifest
    tensors: dict[str, Tensor]
    bucket_bytes: list[list[int]]
    """Sizes of the buckets, by rank."""
