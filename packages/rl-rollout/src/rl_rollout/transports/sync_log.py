"""Writes and reads a rank's messages in the log of a sync: one per bucket, then one with all checksums or an error.

All transports whose ranks and receivers communicate over a `Channel` use these messages, and may add others.
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
"""Result of `device_name` for memory that is not on a GPU."""


@contextlib.contextmanager
def sending(rendezvous: Rendezvous, rank: int, buckets: Iterator[WeightBucket]) -> Iterator[Channel]:
    """Opens the log for a rank that sends within the context. If the context raises, the log gets a message about the
    failure, the sync is broken off, and `buckets` are drained."""
    with draining(buckets):
        channel = Channel(rendezvous.data)
        try:
            yield channel
        except Exception as error:
            description = f"{type(error).__name__}: {error}"
            with contextlib.suppress(WeightSyncError):  # the sync is closed: nobody reads the log
                channel.append({"kind": "failed", "rank": rank, "error": description})
                channel.break_off(f"rank {rank} could not send its weights: {description}")
            raise


@contextlib.contextmanager
def receiving(rendezvous: Rendezvous) -> Iterator[None]:
    """Context in which a receiver receives a sync. If the context raises, the sync is broken off for all participants.
    Otherwise a rank would wait in a collective for a receiver that is gone, because NCCL would not notice the
    failure."""
    try:
        yield
    except BaseException as error:  # also GeneratorExit: the consumer of the buckets raised
        reason = "" if isinstance(error, GeneratorExit) else f": {type(error).__name__}: {error}"
        break_off(rendezvous.data, f"the receiver in {this_process()} did not receive all weights{reason}")
        raise


def require_version(receivers: Sequence[Mapping[str, Any]], version: int) -> None:
    """Raises WeightSyncError unless all receivers expect the version that is sent; call it before connecting them."""
    others = [receiver["version"] for receiver in receivers if receiver["version"] != version]
    if others:
        raise WeightSyncError(f"got weight version {version} to send, but an engine expects {others[0]}")


def description(bucket: WeightBucket, rank: int) -> dict[str, Any]:
    """Makes the message that announces a bucket."""
    return {
        "kind": "bucket",
        "rank": rank,
        "names": bucket.names,
        "dtypes": bucket.dtypes,
        "shapes": bucket.shapes,
        "num_bytes": bucket.data.numel(),
    }


def end_message(tensors: Mapping[str, TensorRecord], rank: int, version: int) -> dict[str, Any]:
    """Makes the message that announces the end of a rank's buckets, with the checksums of all tensors."""
    checksums = {name: record.checksum for name, record in tensors.items()}
    return {"kind": "end", "rank": rank, "version": version, "checksums": checksums}


def follow(
    channel: Channel, version: int, take: Callable[[Mapping[str, Any], int], WeightBucket | None]
) -> Iterator[WeightBucket]:
    """Reads the log until every rank has sent its last bucket, and yields the buckets. After a rank's last bucket,
    checks the checksums of all its tensors.

    Args:
        channel: the channel of the sync.
        version: expected version.
        take: called with each message that is neither a failure nor an end, and with the message's place in the log.
            Returns the bucket that the message announces, or None.

    Raises:
        WeightSyncError: a rank failed or sent another version, tensors are damaged or missing, or the sync was closed.
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
    """Makes the bucket that a message of `description` announces; `data` holds its bytes."""
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
    """Returns a unique name of the GPU that holds the tensor, or `cpu` if no GPU does."""
    return f"cuda:{torch.cuda.get_device_properties(tensor.device).uuid}" if tensor.is_cuda else CPU
