"""Sends and receives the weights of a sync by broadcast.

consumes     (sender) a rank's buckets; (receiver) the log, then each bucket's bytes
produces     (sender) the log and the bytes; (receiver) buckets; an error after a rank's last bucket if checksums differ
waits for    receivers to join (`join_timeout_s` of the rendezvous); the next message or broadcast (`timeout_s`)
unblocked by the other side; by `close` of the transport; by a participant that fails and breaks off the sync, or that
             dies, which breaks its connections
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from rl_core.errors import WeightSyncError
from rl_core.interfaces import Manifest, Rendezvous, TensorRecord, WeightBucket, WeightReceiver, WeightSender
from rl_core.rank_kit.host_memory import fresh_memory
from rl_core.rank_kit.weight_buckets import bucket_records, packed_into
from rl_rollout.transports.channel import Channel
from rl_rollout.transports.sync_log import (
    CPU,
    described_bucket,
    description,
    device_name,
    end_message,
    follow,
    receiving,
    require_version,
    sending,
)

_LOOK_S = 0.001
_LOOKS_PER_STORE = 100


class BroadcastSender(WeightSender):
    """Sends the weights of one rank."""

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        self._rendezvous = rendezvous
        self._rank = rank

    def send(self, buckets: Iterator[WeightBucket], version: int) -> Manifest:
        """Broadcasts each bucket while the next one is made.

        Raises:
            WeightSyncError: a receiver expects another version, a receiver or the controller left, or the sync was
                closed.
            DeadlineError: a receiver did not join.
        """
        with sending(self._rendezvous, self._rank, buckets) as channel:
            tensors = self._send(channel, buckets, version)
        return Manifest(version=version, tensors=tensors)

    def _send(self, channel: Channel, buckets: Iterator[WeightBucket], version: int) -> dict[str, TensorRecord]:
        tensors: dict[str, TensorRecord] = {}
        group: Group | None = None
        stages = Stages()
        try:
            for bucket in buckets:
                packed = stages.packed(bucket)
                if group is None:
                    group = self._open_group(channel, packed.data, version)
                channel.append(description(packed, self._rank))
                group.wait()
                group.start_broadcast(packed.data)
                tensors |= bucket_records(packed)
            if group is not None:
                group.wait()
            channel.append(end_message(tensors, self._rank, version))
        finally:
            if group is not None:
                group.close()
        return tensors

    def _open_group(self, channel: Channel, data: Tensor, version: int) -> Group:
        """Creates the group of this rank and all receivers. It uses NCCL if each member has its own GPU, else gloo."""
        receivers = channel.receivers()
        require_version(receivers, version)
        devices = [device_name(data), *(receiver["device"] for receiver in receivers)]
        has_gpus = CPU not in devices and len(set(devices)) == len(devices)
        backend = "nccl" if has_gpus else "gloo"
        channel.append({"kind": "group", "rank": self._rank, "backend": backend})
        return Group.connected(channel, self._rendezvous.data, sender=self._rank, member=0, backend=backend)


class Stages:
    """Packs a rank's buckets into host memory: two buffers, used alternately for all buckets of a sync."""

    def __init__(self) -> None:
        self._stages = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]

    def packed(self, bucket: WeightBucket) -> WeightBucket:
        """Returns the packed bucket, which the call after next overwrites. Returns a bucket unchanged if it is already
        packed, or if it is on a GPU, because torch caches GPU memory itself."""
        if bucket.parts is None or any(part.is_cuda for part in bucket.parts):
            return bucket
        self._stages.reverse()
        if self._stages[0].numel() < bucket.num_bytes:
            self._stages[0] = fresh_memory(bucket.num_bytes)
        return packed_into(self._stages[0][: bucket.num_bytes], bucket)


class BroadcastReceiver(WeightReceiver):
    """Receives the weights of all ranks in an engine process."""

    is_staged = False

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous

    def receive(self, version: int) -> Iterator[WeightBucket]:
        """Yields the buckets of all ranks as they arrive, and receives the next bucket while the caller uses the
        current one. After a rank's last bucket, checks all checksums of the rank.

        Each bucket gets new memory, because vLLM keeps parts of a bucket until a layer's last tensor has arrived.

        Raises:
            DeadlineError: a rank stopped sending.
            WeightSyncError: a rank failed or sent another version, tensors are damaged or missing, or the sync was
                closed.
        """
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device(CPU)
        arrived: queue.Queue[WeightBucket | BaseException | None] = queue.Queue(maxsize=1)
        stopped = threading.Event()

        def run() -> None:
            try:
                for bucket in self._follow(version, device):
                    if not _put(arrived, bucket, stopped):
                        return
                _put(arrived, None, stopped)
            except BaseException as error:
                _put(arrived, error, stopped)

        follower = threading.Thread(target=run, name="rl-rollout-broadcast-receiver", daemon=True)
        follower.start()
        try:
            with receiving(self._rendezvous):
                while (item := arrived.get()) is not None:
                    if isinstance(item, BaseException):
                        raise item
                    yield item
        finally:
            stopped.set()

    def _follow(self, version: int, device: torch.device) -> Iterator[WeightBucket]:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        channel = Channel(self._rendezvous.data)
        described = {"device": device_name(torch.empty(0, device=device)), "version": version}
        member = 1 + channel.register_receiver(described)
        groups: dict[int, Group] = {}

        def take(message: Mapping[str, Any], place: int) -> WeightBucket | None:
            del place
            rank = message["rank"]
            if message["kind"] == "bucket":
                return _receive_bucket(message, groups[rank], device)
            groups[rank] = Group.connected(
                channel, self._rendezvous.data, sender=rank, member=member, backend=message["backend"]
            )
            return None

        try:
            yield from follow(channel, version, take)
        finally:
            for group in groups.values():
                group.close()


class Group:
    """The process group of one sending rank (member 0) and all receivers.

    Its creator must call `close`, even after an error: `close` breaks the connections, which ends the waits of the
    other members. Dropping the reference is not enough, because an error's traceback may keep it alive.
    """

    def __init__(self, process_group: Any, channel: Channel, device: torch.device) -> None:
        """
        Args:
            process_group: torch's process group; this object takes ownership.
            channel: the channel of the sync.
            device: device of the tensors in the group's collectives.
        """
        self.device = device
        self._group: Any = process_group
        self._channel = channel
        self._data: Tensor | None = None
        self._work: Any = None
        """The broadcast that is running, or None; `_data` is the memory that it sends or fills."""

    @classmethod
    def connected(cls, channel: Channel, data: Mapping[str, Any], *, sender: int, member: int, backend: str) -> Group:
        """Connects this process with all other members; with NCCL, the first broadcast connects them.

        Args:
            channel: the channel of the sync.
            data: `Rendezvous.data` of the sync.
            sender: the sending rank.
            member: this process's number in the group: 0 for the sender, 1 + n for receiver n.
            backend: `nccl` or `gloo`.

        Raises:
            WeightSyncError: the members could not connect in time.
        """
        prefix, size, timeout = f"group/{sender}", 1 + channel.num_receivers, timedelta(seconds=channel.timeout_s)
        try:
            if backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                # The group's threads use the store as long as the group lives, so this store must not run Python code.
                store = PrefixStore(prefix, channel.store.plain)
                group: Any = dist.ProcessGroupNCCL(store, member, size, options)
                return cls(group, channel, torch.device("cuda", torch.cuda.current_device()))
            store = PrefixStore(prefix, channel.store)
            group = dist.ProcessGroupGloo(store, member, size, _gloo_options(data["host"], timeout))
            return cls(group, channel, torch.device(CPU))
        except RuntimeError as error:
            raise WeightSyncError(f"rank {sender} and its receivers could not connect: {error}") from error

    def start_broadcast(self, data: Tensor) -> Tensor:
        """Starts a broadcast from the sender; call `wait` before the next one. Receivers pass the memory to fill.

        Returns:
            The tensor that is sent or filled, on the group's device.
        """
        assert self._work is None, "call `wait` before the next broadcast"
        data = data.to(self.device)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=self._channel.timeout_s)
        # An empty bucket is skipped, because not every backend supports a collective of zero bytes.
        if data.numel():
            self._data, self._work = data, self._group.broadcast([data], options)
        return data

    def wait(self) -> None:
        """Returns when the running broadcast is complete. While it waits, checks the sync's store, because NCCL does
        not notice that a participant has left or that the sync was closed.

        Raises:
            WeightSyncError: a participant left or is too late, or the sync was closed.
        """
        if self._work is None:
            return
        looks = itertools.count(1)
        while not self._work.is_completed():
            time.sleep(_LOOK_S)
            if next(looks) % _LOOKS_PER_STORE == 0:
                self._channel.require_open()
        try:
            self._work.wait()
        except RuntimeError as error:
            raise WeightSyncError(f"the broadcast failed: a participant left or was too late: {error}") from error
        self._data = self._work = None

    def close(self) -> None:
        """Breaks the connections; a second call does nothing.

        Abandons a broadcast that is still running. NCCL can abort the broadcast. With gloo, it ends only at its
        deadline or when other members break their connections. Freeing the group blocks until then, so a thread frees
        the group.
        """
        held = [self._group, self._work, self._data]
        is_under_way = self._work is not None
        if self.device.type != CPU and self._group is not None:
            self._group.abort() if is_under_way else self._group.shutdown()
        self._group = self._work = self._data = None
        if is_under_way:
            threading.Thread(target=held.clear, name="rl-rollout-broadcast-end", daemon=True).start()


def _receive_bucket(message: Mapping[str, Any], group: Group, device: torch.device) -> WeightBucket:
    on_host = group.device.type == CPU
    size = message["num_bytes"]
    memory = fresh_memory(size) if on_host else torch.empty(size, dtype=torch.uint8, device=group.device)
    group.start_broadcast(memory)
    group.wait()
    data = memory.to(device)
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()  # the bucket is loaded on another thread's stream
    return described_bucket(message, data)


def _put(items: queue.Queue[Any], item: object, stopped: threading.Event) -> bool:
    """Puts the item into the queue as soon as there is room. Returns False if the consumer has stopped before that."""
    while not stopped.is_set():
        try:
            items.put(item, timeout=0.1)
            return True
        except queue.Full:
            continue
    return False


def _gloo_options(host: str, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    # `host` is the controller's address. It is an address of every member only if it is loopback.
    is_local = host in ("127.0.0.1", "localhost")
    options._devices = [gloo.create_device(hostname=host) if is_local else gloo.create_default_device()]
    return options
