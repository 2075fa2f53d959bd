"""A rank's messages in the log of a sync: one per bucket, then one with all checksums, or one with an error.

Shared by the transports whose ranks and receivers communicate over a `Channel`; each adds its own kinds of messages.
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
"""`device_name` of memory that is not on a GPU."""


@contextlib.contextmanager
def sending(rendezvous: Rendezvous, rank: int, buckets: Iterator[WeightBucket]) -> Iterator[Channel]:
    """Opens the log for a rank that sends within the context. If the context raises, the log gets a message about the
    failure, the sync is broken off, and `buckets` are drained."""
    with draining(buckets):
        channel = Channel(rendezvous.data)
        try:
            yield channel
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            with contextlib.suppress(WeightSyncError):  # the sync is closed: nobody reads the log
                channel.append({"kind": "failed", "rank": rank, "error": told})
                channel.break_off(f"rank {rank} could not send its weights: {told}")
            raise


@contextlib.contextmanager
def receiving(rendezvous: Rendezvous) -> Iterator[None]:
    """Context in which a receiver receives a sync. If it does not receive all weights, the sync is broken off for all
    participants: NCCL would not notice, and a rank would wait in a collective for a receiver that is gone."""
    try:
        yield
    except BaseException as error:  # also GeneratorExit: the consumer of the buckets raised
        told = "" if isinstance(error, GeneratorExit) else f": {type(error).__name__}: {error}"
        break_off(rendezvous.data, f"the receiver in {this_process()} did not receive all weights{told}")
        raise


def require_version(receivers: Sequence[Mapping[str, Any]], version: int) -> None:
    """Call before connecting: raises WeightSyncError unless all receivers expect the version that is sent."""
    others = [receiver["version"] for receiver in receivers if receiver["version"] != version]
    if others:
        raise WeightSyncError(f"got weight version {version} to send, but an engine expects {others[0]}")


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
    """The log's message that a rank has sent all of its buckets."""
    checksums = {name: record.checksum for name, record in tensors.items()}
    return {"kind": "end", "rank": rank, "version": version, "checksums": checksums}


def follow(
    channel: Channel, version: int, take: Callable[[Mapping[str, Any], int], WeightBucket | None]
) -> Iterator[WeightBucket]:
    """Reads the log until every rank has sent its last bucket; after a rank's last bucket its checksums must match.

    Args:
        channel: the channel of the sync.
        version: expected version.
        take: called with each message that announces neither a failure nor an end, and with its place; returns the
            bucket that the message announces, or None.

    Raises:
        WeightSyncError: another version, damaged or missing tensors, a rank that failed, or a closed sync.
        DeadlineError: a rank stopped sending.
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
                    f"rank {rank} sent weight version {message['version']}, but the engine expects {version}"
                )
            _require_checksums(records.pop(rank), message["checksums"], rank)
        elif (taken := take(message, place)) is not None:
            bucket = with_checksums(taken)
            records[rank] |= bucket_records(bucket)
            yield bucket


def described_bucket(message: Mapping[str, Any], data: Tensor) -> WeightBucket:
    """The bucket that a message of `description` describes, with its bytes."""
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
    """A unique name of the GPU that holds the tensor; `cpu` if none does."""
    return f"cuda:{torch.cuda.get_device_properties(tensor.device).uuid}" if tensor.is_cuda else CPU
