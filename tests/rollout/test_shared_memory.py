"""The shared memory transport passes its suite, reuses memory, never overwrites what is being read, and explains
errors.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import attrs
import pytest
import torch

from rl_core.errors import DeadlineError, WeightSyncError
from rl_core.rank_kit.weight_buckets import pack_buckets, unpack_bucket
from rl_core.testing.transports import WeightTransportConformance
from rl_rollout.transports import shared_memory as module
from rl_rollout.transports.shared_memory import SharedMemoryReceiver, SharedMemoryTransport, shared_memory


def announcements(rendezvous):
    return sorted(Path(rendezvous.data["directory"]).glob("rank*_*.json"))


def flip_a_byte(rendezvous):
    path = next(json.loads(path.read_text())["path"] for path in announcements(rendezvous))
    with Path(path).open("r+b") as file:
        byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([byte ^ 1]))


class TestSharedMemory(WeightTransportConformance):
    transport = shared_memory

    def damage(self, rendezvous):
        flip_a_byte(rendezvous)
        return True


@pytest.fixture
def sync():
    transport = SharedMemoryTransport(timeout_s=0.2)
    rendezvous = transport.open(num_ranks=1, num_engines=1)
    yield transport, rendezvous
    transport.close(rendezvous)


def send(transport, rendezvous, value=0.0, version=0, *, bucket_bytes=1 << 20):
    weights = {"a": torch.full((6,), value), "b": torch.full((2, 2), value), "c": torch.full((5,), value)}
    return transport.sender(rendezvous, 0, 1).send(pack_buckets(weights.items(), bucket_bytes), version)


def received(rendezvous, version=0):
    buckets = SharedMemoryReceiver(rendezvous).receive(version)
    return {name: tensor for bucket in buckets for name, tensor in unpack_bucket(bucket)}


def test_a_changed_byte_names_the_tensor(sync):
    send(*sync)
    flip_a_byte(sync[1])
    with pytest.raises(WeightSyncError, match="of rank 0 is damaged: a differ"):
        received(sync[1])


def test_a_segment_is_reused_only_after_its_last_reader_has_released_it():
    def path_of(value, version):
        rendezvous = shared_memory.open(num_ranks=1, num_engines=1)
        send(shared_memory, rendezvous, value, version)
        (announced,) = announcements(rendezvous)
        return rendezvous, json.loads(announced.read_text())["path"]

    first, path = path_of(1.0, 1)
    held = received(first, 1)
    shared_memory.close(first)
    second, path_beside = path_of(2.0, 2)
    assert path_beside != path, "a reader still holds the first segment, so it must not be reused"
    assert held["a"].tolist() == [1.0] * 6
    del held
    shared_memory.close(second)
    third, path_again = path_of(3.0, 3)
    assert path_again == path_beside
    assert received(third, 3)["a"].tolist() == [3.0] * 6
    shared_memory.close(third)


def test_writing_into_received_weights_changes_no_other_copy(sync):
    send(*sync, 1.0)
    received(sync[1])["a"].fill_(7.0)
    assert received(sync[1])["a"].tolist() == [1.0] * 6


def test_a_missing_last_bucket_is_noticed(sync):
    send(*sync, bucket_bytes=32)
    assert len(announcements(sync[1])) > 2
    announcements(sync[1])[-1].unlink()
    with pytest.raises(WeightSyncError, match="rank 0 sent 3 buckets, but 2 arrived"):
        received(sync[1])


def test_swapped_buckets_of_equal_size_are_noticed(sync):
    transport, rendezvous = sync
    weights = {"a": torch.zeros(6), "b": torch.ones(6)}
    transport.sender(rendezvous, 0, 1).send(pack_buckets(weights.items(), 24), 0)
    first, second = announcements(rendezvous)
    one, other = json.loads(first.read_text()), json.loads(second.read_text())
    first.write_text(json.dumps({**one, "path": other["path"]}))
    second.write_text(json.dumps({**other, "path": one["path"]}))
    with pytest.raises(WeightSyncError, match="of rank 0 is damaged: a differ"):
        received(rendezvous)


def test_receiving_from_a_rank_that_never_sends_ends_at_the_deadline(sync):
    with pytest.raises(DeadlineError, match=r"waited 0\.2 s for bucket 0 of rank 0"):
        received(sync[1])


def test_the_error_of_a_lost_rank_names_the_rank(sync):
    send(*sync)
    (path,) = announcements(sync[1])
    entry = json.loads(path.read_text())
    path.write_text(json.dumps({**entry, "path": f"/proc/{os.getpid()}/fd/999999"}))
    with pytest.raises(WeightSyncError, match="of rank 0 cannot be read: the rank has ended"):
        received(sync[1])


def test_errors_on_another_host_name_the_key_to_set(sync):
    transport, rendezvous = sync
    elsewhere = attrs.evolve(rendezvous, data={**rendezvous.data, "host": "another"})
    with pytest.raises(WeightSyncError, match="serves one host, but an engine runs on another: set generator"):
        received(elsewhere)
    with pytest.raises(WeightSyncError, match="rank 0 runs on another"):
        send(transport, elsewhere)


def test_segments_that_a_sync_did_not_need_are_freed():
    rendezvous = shared_memory.open(num_ranks=1, num_engines=1)
    sender = shared_memory.sender(rendezvous, 0, 1)
    paths = []
    for size in (100, 200):
        sender.send(pack_buckets([("a", torch.zeros(size))], 1 << 20), 0)
        (segment,) = module._pool_of(0)._used
        paths.append(Path(segment.path))
    assert [path.exists() for path in paths] == [False, True]
    shared_memory.close(rendezvous)


def test_only_the_owner_may_read_the_announcements(sync):
    assert Path(sync[1].data["directory"]).stat().st_mode & 0o077 == 0


def test_a_world_of_another_size_is_refused(sync):
    with pytest.raises(WeightSyncError, match="opened for 1 ranks, not 2"):
        sync[0].sender(sync[1], 0, 2)
