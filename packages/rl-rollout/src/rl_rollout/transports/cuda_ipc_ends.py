"""Sends and receives the weights of a sync by CUDA IPC.

consumes     (sender) a rank's buckets; (receiver) the log, then each bucket's memory
produces     (sender) the log with a handle per bucket; (receiver) copies on its own GPU, and acknowledgements
waits for    receivers to join (`join_timeout_s` of the rendezvous) and to copy; the next message (`timeout_s`)
unblocked by the other side; by `close` of the transport; by a participant that fails and breaks off the sync
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from rl_core.errors import WeightSyncError
from rl_core.interfaces import Manifest, Rendezvous, TensorRecord, WeightBucket, WeightReceiver, WeightSender
from rl_core.rank_kit.weight_buckets import bucket_records
from rl_rollout.transports.channel import Channel
from rl_rollout.transports.sync_log import (
    described_bucket,
    description,
    device_name,
    end_message,
    follow,
    receiving,
    require_version,
    sending,
)

_BUCKETS_UNDER_WAY = 2


class CudaIpcSender(WeightSender):
    """Sends the weights of one rank."""

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        self._rendezvous = rendezvous
        self._rank = rank

    def send(self, buckets: Iterator[WeightBucket], version: int) -> Manifest:
        """Announces each bucket to the receivers and keeps it until all have copied it.

        Raises:
            WeightSyncError: the weights are not on a GPU, a receiver expects another version or cannot see that GPU, or
                the sync was closed.
            DeadlineError: a receiver did not join, or did not take a bucket.
        """
        with sending(self._rendezvous, self._rank, buckets) as channel:
            tensors = self._send(channel, buckets, version)
        return Manifest(version=version, tensors=tensors)

    def _send(self, channel: Channel, buckets: Iterator[WeightBucket], version: int) -> dict[str, TensorRecord]:
        tensors: dict[str, TensorRecord] = {}
        everyone = range(channel.num_receivers)
        under_way: deque[tuple[int, Tensor]] = deque()
        for i, bucket in enumerate(buckets):
            if i == 0:
                require_version(channel.receivers(), version)
            shown = shared(bucket.data, self._rank)
            place = channel.append(description(bucket, self._rank) | shown)
            under_way.append((place, bucket.data))
            tensors |= bucket_records(bucket)
            if len(under_way) == _BUCKETS_UNDER_WAY:
                channel.wait_until_taken(under_way[0][0], everyone)
                under_way.popleft()
        for place, _ in under_way:
            channel.wait_until_taken(place, everyone)
        channel.append(end_message(tensors, self._rank, version))
        return tensors


class CudaIpcReceiver(WeightReceiver):
    """Receives the weights of all ranks in an engine process."""

    is_staged = False

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous

    def receive(self, version: int) -> Iterator[WeightBucket]:
        """Copies the buckets of all ranks to this process's GPU as they arrive, and yields the copies.

        Raises:
            DeadlineError: a rank stopped sending.
            WeightSyncError: a rank failed, sent another version, or uses a GPU that this process does not see; tensors
                are damaged or missing; this process has no GPU; or the sync was closed.
        """
        if not torch.cuda.is_available():
            raise WeightSyncError("the cuda_ipc transport reached an engine without a GPU; use shared_memory")
        device = torch.device("cuda", torch.cuda.current_device())
        with receiving(self._rendezvous):
            channel = Channel(self._rendezvous.data)
            number = channel.register_receiver({"version": version})

            def take(message: Mapping[str, Any], place: int) -> WeightBucket:
                # A copy, because vLLM keeps parts of a bucket until a layer's last tensor has arrived. The rank keeps
                # the bucket only until this process acknowledges it.
                data = opened(message).to(device, copy=True)
                torch.cuda.current_stream(device).synchronize()
                channel.acknowledge(place, number)
                return described_bucket(message, data)

            yield from follow(channel, version, take)


def shared(data: Tensor, rank: int) -> dict[str, Any]:
    """Returns what another process needs to open this GPU memory with `opened`, as plain data. The memory must stay
    allocated until the other process has copied it. Raises WeightSyncError if the data is not on a GPU."""
    if not data.is_cuda:
        raise WeightSyncError(
            f"rank {rank}: the cuda_ipc transport shares GPU memory, but the weights are on the {data.device.type}; "
            "use shared_memory"
        )
    torch.cuda.current_stream(data.device).synchronize()
    _, arguments = reduce_tensor(data)
    fields = {name: arguments[i] for i, name in _HANDLE.items()}
    return {
        "gpu": device_name(data),
        "handle": {name: value.hex() if isinstance(value, bytes) else value for name, value in fields.items()},
    }


def opened(message: Mapping[str, Any]) -> Tensor:
    """Opens the memory that `shared` describes, and returns it as a tensor on the GPU that contains it. Raises
    WeightSyncError if this process does not see that GPU."""
    if message["num_bytes"] == 0:
        return torch.empty(0, dtype=torch.uint8)
    names = [device_name(torch.empty(0, device=f"cuda:{i}")) for i in range(torch.cuda.device_count())]
    if message["gpu"] not in names:
        raise WeightSyncError(
            f"rank {message['rank']} shares {message['gpu']}, but this engine sees {names}: set the same "
            "CUDA_VISIBLE_DEVICES, or use broadcast"
        )
    given = message["handle"]
    handle = {name: bytes.fromhex(given[name]) if name in _BYTES else given[name] for name in _HANDLE.values()}
    return rebuild_cuda_tensor(
        Tensor,
        (message["num_bytes"],),
        (1,),
        handle["tensor_offset"],
        torch.storage.TypedStorage,
        torch.uint8,
        names.index(message["gpu"]),
        handle["storage"],
        handle["storage_size_bytes"],
        handle["storage_offset_bytes"],
        False,
        handle["ref_counter"],
        handle["ref_counter_offset"],
        handle["event"],
        handle["event_sync_required"],
    )


_HANDLE = {
    3: "tensor_offset",
    7: "storage",
    8: "storage_size_bytes",
    9: "storage_offset_bytes",
    11: "ref_counter",
    12: "ref_counter_offset",
    13: "event",
    14: "event_sync_required",
}
"""Position → name, for the arguments that torch's `reduce_tensor` (2.11 to 2.13) returns for a GPU tensor."""
_BYTES = ("storage", "ref_counter", "event")
