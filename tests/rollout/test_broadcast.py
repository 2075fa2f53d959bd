"""The broadcast transport passes its suite, and the participants of a failed sync get an error instead of hanging."""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from rl_core.errors import ConfigError, DeadlineError, WeightSyncError
from rl_core.rank_kit.weight_buckets import pack_buckets, unpack_bucket
from rl_core.testing.transports import WeightTransportConformance
from rl_rollout.transports import broadcast_ends
from rl_rollout.transports import channel as channel_module
from rl_rollout.transports.broadcast import BroadcastTransport, broadcast
from rl_rollout.transports.broadcast_ends import BroadcastReceiver, Group
from rl_rollout.transports.channel import Channel
from rl_rollout.transports.sync_log import receiving


class TestBroadcast(WeightTransportConformance):
    transport = broadcast


WEIGHTS = {"a": torch.arange(6.0), "b": torch.ones(2, 2), "c": torch.arange(5.0)}
ONE_TENSOR_BYTES = 16


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def sync():
    transport = BroadcastTransport(timeout_s=120.0, join_timeout_s=120.0)
    rendezvous = transport.open(num_ranks=1, num_engines=1)
    yield transport, rendezvous
    transport.close(rendezvous)


def send(transport, rendezvous, weights=WEIGHTS, version=0):
    return transport.sender(rendezvous, 0, 1).send(pack_buckets(weights.items(), ONE_TENSOR_BYTES), version)


def receive(rendezvous, version=0):
    buckets = BroadcastReceiver(rendezvous).receive(version)
    return {name: tensor for bucket in buckets for name, tensor in unpack_bucket(bucket)}


class Spoiled(broadcast_ends.BroadcastSender):
    """Changes the messages that the sender writes to the log, so that they do not match what it sends."""

    def __init__(self, rendezvous, spoil):
        super().__init__(rendezvous, 0)
        self.spoil = spoil

    def _send(self, channel, buckets, version):
        append = channel.append
        channel.append = lambda message: append(self.spoil(dict(message)))
        return super()._send(channel, buckets, version)


def with_a_tensor_that_is_not_sent(message):
    if message["kind"] == "end":
        message["checksums"] = {**message["checksums"], "never.sent": 1}
    return message


def with_swapped_names():
    names = iter(["b", "a"])

    def spoil(message):
        if message["kind"] == "bucket" and message["names"][0] in ("a", "b"):
            other = next(names)
            message |= {"names": [other], "shapes": [[message["num_bytes"] // 4]]}
        return message

    return spoil


@pytest.mark.parametrize("spoil", [with_a_tensor_that_is_not_sent, with_swapped_names()], ids=["missing", "swapped"])
def test_a_missing_tensor_and_swapped_names_are_refused(sync, threads, spoil):
    receiving = threads.submit(receive, sync[1])
    Spoiled(sync[1], spoil).send(pack_buckets(WEIGHTS.items(), ONE_TENSOR_BYTES), 0)
    with pytest.raises(WeightSyncError, match="tensors differ from what was sent"):
        receiving.result(60)


def test_if_a_receiver_never_joins_all_participants_fail_long_before_the_deadline_of_a_message(threads):
    assert BroadcastTransport().join_timeout_s <= 30.0
    transport = BroadcastTransport(timeout_s=250.0, join_timeout_s=1.0)
    rendezvous = transport.open(num_ranks=1, num_engines=2)
    began = time.monotonic()
    receiving = threads.submit(receive, rendezvous)
    Channel(rendezvous.data).store.wait(["receiver/0"], timedelta(seconds=60))
    with pytest.raises(DeadlineError, match=rf"waited 1 s for 2 receivers to join the sync; 1 have .*{os.getpid()}"):
        send(transport, rendezvous)
    # The receiver reads either the rank's message or the reason why the sync was broken off.
    reason = r"rank 0 could not send (weight version 0|its weights): DeadlineError: waited 1 s"
    with pytest.raises(WeightSyncError, match=reason):
        receiving.result(60)
    assert time.monotonic() - began < 125.0, "the deadline of a message is 250 s"
    transport.close(rendezvous)


def test_receiving_from_a_rank_that_never_sends_ends_at_the_deadline(monkeypatch):
    connect = channel_module._connected
    # Otherwise a slow connection may miss the deadline first.
    monkeypatch.setattr(channel_module, "_connected", lambda host, port, within_s: connect(host, port, within_s=60.0))
    transport = BroadcastTransport(timeout_s=0.3)
    rendezvous = transport.open(num_ranks=1, num_engines=1)
    with pytest.raises(DeadlineError, match=r"waited 0\.3 s for a rank to append message 0 to"):
        receive(rendezvous)
    transport.close(rendezvous)


def test_one_receiver_too_many_is_refused(sync):
    channel = Channel(sync[1].data)
    channel.register_receiver({"device": "cpu", "version": 0})
    with pytest.raises(WeightSyncError, match="opened for 1 receivers, but one more joined"):
        channel.register_receiver({"device": "cpu", "version": 0})


def stranger(rendezvous):
    """A store client without the sync's secret. Any user of the machine can create one."""
    return TCPStore("127.0.0.1", rendezvous.data["port"], is_master=False, wait_for_workers=False)


def test_a_client_without_the_secret_of_the_sync_is_refused(sync):
    with pytest.raises(WeightSyncError, match="another program wrote to the store"):
        Channel({**sync[1].data, "secret": secrets.token_hex()})


def test_a_receiver_that_registers_without_the_secret_gets_nothing(sync):
    transport, rendezvous = sync
    store = stranger(rendezvous)
    store.add("receivers", 1)
    store.set("receiver/0", json.dumps({"device": "cpu", "version": 0, "process": "a stranger's"}))
    with pytest.raises(WeightSyncError, match=r"'receiver/0' in the sync's store is not signed"):
        send(transport, rendezvous)


@pytest.mark.parametrize("key", ["log/0", "broken", "group/0/0/0"])
def test_a_strangers_message_is_never_accepted_as_that_of_a_participant(sync, threads, key):
    """A stranger can end a sync, but cannot make a participant accept a message or connect to another address."""
    transport, rendezvous = sync
    stranger(rendezvous).set(key, json.dumps({"kind": "failed", "rank": 0, "error": "nothing failed"}))
    receiving = threads.submit(receive, rendezvous)
    error = f"'{key}' in the sync's store is not signed"
    if key == "group/0/0/0":  # the key under which the rank publishes the address it listens at
        joined = Channel(rendezvous.data)
        with pytest.raises(WeightSyncError, match=error):
            PrefixStore("group/0", joined.store).get("0/0")
        joined.store.wait(["receiver/0"], timedelta(seconds=60))  # a receiver that registers later would find no store
        transport.close(rendezvous)
        error = "the sync was closed"
    with pytest.raises(WeightSyncError, match=error):
        receiving.result(60)


def test_a_signature_also_covers_the_key(sync):
    store = stranger(sync[1])
    participant = Channel(sync[1].data)
    participant.append({"kind": "end", "rank": 0})
    store.set("log/1", store.get("log/0"))
    assert participant.read(0) == {"kind": "end", "rank": 0}
    with pytest.raises(WeightSyncError, match="'log/1' in the sync's store is not signed"):
        participant.read(1)


def test_a_closed_sync_is_refused(sync):
    transport, rendezvous = sync
    transport.close(rendezvous)
    with pytest.raises(WeightSyncError, match="is closed"):
        receive(rendezvous)
    drained = pack_buckets(WEIGHTS.items(), ONE_TENSOR_BYTES)
    with pytest.raises(WeightSyncError, match="is closed"):
        transport.sender(rendezvous, 0, 1).send(drained, 0)
    assert next(drained, None) is None, "the buckets must be drained, or the other ranks would wait for this one"


@pytest.mark.timeout(100)
def test_connecting_to_a_sync_that_is_being_closed_fails_long_before_the_deadline(monkeypatch):
    """Without the refusal, an engine that connects while the controller closes the sync would hang and be restarted."""
    transport, connect = BroadcastTransport(timeout_s=120.0), socket.create_connection
    monkeypatch.setattr("rl_rollout.transports.channel._CONNECT_S", 120.0)
    rendezvous = transport.open(num_ranks=1, num_engines=1)

    def connect_and_close(*args, **options):
        connection = connect(*args, **options)
        transport.close(rendezvous)
        return connection

    monkeypatch.setattr(socket, "create_connection", connect_and_close)
    with pytest.raises(WeightSyncError, match="is closed"):
        Channel(rendezvous.data)


def dies_after_a_bucket(rendezvous):
    for _ in BroadcastReceiver(rendezvous).receive(0):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_an_engine_that_is_killed_half_way_ends_the_sender():
    transport = BroadcastTransport(timeout_s=250.0, join_timeout_s=200.0)  # a new interpreter imports torch first
    rendezvous = transport.open(num_ranks=1, num_engines=1)
    engine = multiprocessing.get_context("spawn").Process(target=dies_after_a_bucket, args=(rendezvous,))
    engine.start()
    many = {str(i): torch.zeros(1 << 20) for i in range(8)}
    try:
        with pytest.raises(WeightSyncError, match="the broadcast failed"):
            send(transport, rendezvous, many)
    finally:
        engine.join(60)
        transport.close(rendezvous)
    assert engine.exitcode == -signal.SIGKILL


def fails_after_a_bucket(rendezvous, failed):
    with closing(BroadcastReceiver(rendezvous).receive(0)) as buckets:
        next(buckets)
        failed.set()
        raise ValueError("this engine cannot load it")


def test_a_receiver_that_fails_ends_the_other_participants_long_before_their_deadline(threads):
    transport = BroadcastTransport(timeout_s=250.0, join_timeout_s=120.0)
    rendezvous = transport.open(num_ranks=1, num_engines=2)
    failed, kept = threading.Event(), []

    def loads_slowly():
        for bucket in BroadcastReceiver(rendezvous).receive(0):
            failed.wait(60)
            yield bucket

    failing = threads.submit(fails_after_a_bucket, rendezvous, failed)
    healthy = threads.submit(lambda: [bucket.names for bucket in loads_slowly()])
    sending = threads.submit(send, transport, rendezvous, {str(i): torch.zeros(1 << 20) for i in range(20)})
    for future, kind in [(failing, ValueError), (sending, WeightSyncError), (healthy, WeightSyncError)]:
        with pytest.raises(kind) as error:
            future.result(60)
        # If an error were freed, Python would also free the frames of its traceback, which could end a participant.
        kept.append(error)
    transport.close(rendezvous)


class Endless:
    """A process group whose collectives never end when a peer is gone, like NCCL's."""

    def __init__(self):
        self.calls = []

    def broadcast(self, tensors, options):
        self.calls.append("broadcast")
        return SimpleNamespace(is_completed=lambda: False)

    def abort(self):
        self.calls.append("abort")

    def shutdown(self):
        self.calls.append("shutdown")


def test_a_participant_that_fails_ends_a_collective_that_would_wait_forever(sync, threads):
    _, rendezvous = sync
    stuck = Group(Endless(), Channel(rendezvous.data), torch.device("cpu"))
    stuck.start_broadcast(torch.ones(3))
    waiting = threads.submit(stuck.wait)
    with pytest.raises(ValueError, match="cannot load"), receiving(rendezvous):
        raise ValueError("this engine cannot load it")
    with pytest.raises(WeightSyncError, match=r"broken off: the receiver in process \d+ .*engine cannot load it"):
        waiting.result(60)


def test_a_rank_aborts_its_gpu_collective_when_the_sync_is_over(sync):
    transport, rendezvous = sync
    process_group = Endless()
    group = Group(process_group, Channel(rendezvous.data), torch.device("meta"))  # stands in for a GPU
    group.start_broadcast(torch.ones(3))
    transport.close(rendezvous)
    with pytest.raises(WeightSyncError, match="the sync was closed"):
        group.wait()
    group.close()
    assert process_group.calls == ["broadcast", "abort"]


def test_an_idle_group_is_shut_down_without_an_abort(sync):
    process_group = Endless()
    Group(process_group, Channel(sync[1].data), torch.device("meta")).close()
    assert process_group.calls == ["shutdown"]


def test_closing_the_sync_ends_a_rank_that_waits_for_a_lost_receiver(threads):
    transport = BroadcastTransport(timeout_s=250.0, join_timeout_s=120.0)
    rendezvous = transport.open(num_ranks=1, num_engines=1)
    joined = Channel(rendezvous.data)
    joined.register_receiver({"device": "cpu", "version": 0})
    sending = threads.submit(send, transport, rendezvous)
    joined.read(0)  # the rank now waits for connections, and nobody connects
    transport.close(rendezvous)
    with pytest.raises(WeightSyncError, match=r"could not connect|the sync was closed"):
        sending.result(60)


def test_closing_the_sync_ends_a_broadcast_under_way(threads, monkeypatch):
    transport = BroadcastTransport(timeout_s=250.0, join_timeout_s=120.0)
    rendezvous = transport.open(num_ranks=1, num_engines=1)
    is_receiving, may_go_on = threading.Event(), threading.Event()
    start = Group.start_broadcast

    def started(group, data):
        found = start(group, data)
        is_receiving.set()
        return found

    monkeypatch.setattr(Group, "start_broadcast", started)

    class WaitsBeforeSending(broadcast_ends.BroadcastSender):
        """Opens its group and announces a bucket, but sends nothing until the test allows it."""

        def _open_group(self, channel, data, version):
            group = super()._open_group(channel, data, version)
            channel.append(broadcast_ends.description(next(pack_buckets(WEIGHTS.items(), ONE_TENSOR_BYTES)), 0))
            may_go_on.wait(120)
            return group

    sending = threads.submit(WaitsBeforeSending(rendezvous, 0).send, pack_buckets(WEIGHTS.items(), ONE_TENSOR_BYTES), 0)
    receiving = threads.submit(receive, rendezvous)
    assert is_receiving.wait(60)
    with pytest.raises(TimeoutError):
        receiving.result(0.5)
    transport.close(rendezvous)
    with pytest.raises(WeightSyncError, match="the sync was closed, or its controller has ended"):
        receiving.result(60)
    may_go_on.set()
    with pytest.raises(WeightSyncError):
        sending.result(60)


def test_a_world_of_another_size_is_refused(sync):
    with pytest.raises(WeightSyncError, match="opened for 1 ranks, not 2"):
        sync[0].sender(sync[1], 0, 2)


def test_a_host_that_is_not_an_address_of_this_machine_is_refused_before_a_run():
    elsewhere = BroadcastTransport(host="192.0.2.1")  # reserved for documentation (RFC 5737)
    with pytest.raises(ConfigError, match=r"weight_sync_backend: broadcast cannot listen at 192\.0\.2\.1: .*; set"):
        elsewhere.validate()
    BroadcastTransport(host="127.0.0.2").validate()
    BroadcastTransport().validate()
