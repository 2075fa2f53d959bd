"""What the log of a sync says: a message per bucket, then the rank's checksums, or that it failed.

Shared by the transports whose ranks and receivers meet at a `Channel`; each adds messages of its own kinds.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_core.errors import WeightSyncError
from rl_core.interfaces import Rendezvous, TensorRecord, WeightBucket
from rl_core.rank_kit.weight_buckets import bucket_records, draining, with_checksums
from rl_rollout.transports.channel import Channel, break_off, this_process

CPU = "cpu"
"""What `device_name` calls memory that is on no GPU."""


@contextlib.contextmanager
def sending(rendezvous: Rendezvous, rank: int, buckets: Iterator[WeightBucket]) -> Iterator[Channel]:
    """The log, for a rank that sends in the block; where it raises, receivers are told and `buckets` are drained."""
    with draining(buckets):
        channel = Channel(rendezvous.data)
        try:
            yield channel
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            with contextlib.suppress(WeightSyncError):  # of a sync that is closed: nobody reads it
                channel.append({"kind": "failed", "rank": rank, "error": told})
                channel.break_off(f"rank {rank} could not send its weights: {told}")
            raise


@contextlib.contextmanager
def receiving(rendezvous: Rendezvous) -> Iterator[None]:
    """For a receiver, which takes the sync in the block: where it does not take all of it, that ends everybody's part.
    NCCL would not notice, and a rank would wait in it for a receiver that is no longer there."""
    try:
        yield
    except BaseException as error:  # GeneratorExit too: whoever loads the buckets raised
        told = "" if isinstance(error, GeneratorExit) else f": {type(error).__name__}: {error}"
        break_off(rendezvous.data, f"the receiver in {this_process()} did not take all of it{told}")
        raise


def require_version(receivers: Sequence[Mapping[str, Any]], version: int) -> None:
    """All receivers were told the version that is sent, or nobody connects."""
    others = [receiver["version"] for receiver in receivers if receiver["version"] != version]
    if others:
        raise WeightSyncError(f"weight version {version} is sent, an engine was told {others[0]}")


def description(bucket: WeightBucket, rank: int) -> dict[str, Any]:
    """The log's message about a bucket."""
    return {
        "kind": "bucket",
        "rank": rank,
        "names": bucket.names,
        "dtypes": bucket.dtypes,
        "shapes": bucket.shapes,
        "num_bytes": bucket.data.numel(),
    }


def end_message(tensors: Mapping[str, TensorRecord], rank: int, version: int) -> dict[str, Any]:
    """The log's message that a rank has sent all it has."""
    checksums = {name: record.checksum for name, record in tensors.items()}
    return {"kind": "end", "rank": rank, "version": version, "checksums": checksums}


def follow(
    channel: Channel, version: int, take: Callable[[Mapping[str, Any], int], WeightBucket | None]
) -> Iterator[WeightBucket]:
    """Reads the log until every rank has sent its last bucket; at the end of each, its checksums must be right.

    Args:
        channel: of the sync.
        version: that must be sent.
        take: gets a message of any kind of the transport's own and its place; the bucket that it brought, if it did.
    """
    records: dict[int, dict[str, TensorRecord]] = {rank: {} for rank in range(channel.num_ranks)}
    for place in itertools.count():
        if not records:
            return
        message = channel.read(place)
        rank = message["rank"]
        if message["kind"] == "failed":
            raise WeightSyncError(f"rank {rank} could not send weight version {version}: {message['error']}")
        if message["kind"] == "end":
            if message["version"] != version:
                raise WeightSyncError(
                    f"rank {rank} sent weight version {message['version']}, the engine was told {version}"
                )
            _require_checksums(records.pop(rank), message["checksums"], rank)
        elif (taken := take(message, place)) is not None:
            bucket = with_checksums(taken)
            records[rank] |= bucket_records(bucket)
            yield bucket


def described_bucket(message: Mapping[str, Any], data: Tensor) -> WeightBucket:
    """The bucket of `description`, with its bytes."""
    return WeightBucket(
        names=tuple(message["names"]),
        dtypes=tuple(message["dtypes"]),
        shapes=tuple(map(tuple, message["shapes"])),
        data=data,
    )


def _require_checksums(records: Mapping[str, TensorRecord], checksums: Mapping[str, int], rank: int) -> None:
    arrived = {name: record.checksum for name, record in records.items()}
    wrong = sorted(name for name in arrived.keys() | checksums.keys() if arrived.get(name) != checksums.get(name))
    if wrong:
        raise WeightSyncError(f"weights of rank {rank}: {len(wrong)} tensors differ from what was sent: {wrong[:3]}")


def device_name(tensor: Tensor) -> str:
    """The GPU it lies on, as no other GPU is called; `cpu` for the rest."""
    return f"cuda:{torch.cuda.get_device_properties(tensor.device).uuid}" if tensor.is_cuda else CPU
