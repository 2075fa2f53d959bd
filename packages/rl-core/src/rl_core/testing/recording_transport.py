"""A transport that writes down what ranks publish, so that a suite can look at it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs
import torch
from torch import Tensor

from rl_core.interfaces import CONTRACT_VERSION, Manifest, Rendezvous, WeightBucket
from rl_core.rank_kit.weight_buckets import tensor_record, unpack_bucket


@attrs.frozen
class RecordingTransport:
    """A transport without receivers: each rank writes what it was given into the rendezvous' directory."""

    contract_version: int = CONTRACT_VERSION
    name: str = f"{__name__}:recording_transport"

    def open(self, directory: Path) -> Rendezvous:
        """`directory` is made."""
        directory.mkdir()
        return Rendezvous(transport=self.name, receiver="", data={"directory": str(directory)})

    def sender(self, rendezvous: Rendezvous, rank: int, world_size: int) -> RecordingSender:
        """See `WeightTransport.sender`."""
        return RecordingSender(Path(rendezvous.data["directory"], f"{rank}.pt"))


recording_transport = RecordingTransport()


@attrs.frozen
class RecordingSender:
    """A rank's end."""

    path: Path

    def send(self, buckets: Iterator[WeightBucket], version: int) -> Manifest:
        """Drains the buckets."""
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
    """What all ranks sent, together."""

    manifest: Manifest
    tensors: dict[str, Tensor]
    bucket_bytes: list[list[int]]
    """Sizes of the buckets, by rank."""
