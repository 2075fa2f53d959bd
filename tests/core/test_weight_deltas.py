"""Delta syncs through memory: the result equals the rank's weights bit for bit, and a delta that is incomplete,
damaged or relative to other weights is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from rl_core.errors import WeightSyncError
from rl_core.interfaces import Manifest, WeightBucket
from rl_core.rank_kit import weight_deltas
from rl_core.rank_kit.weight_buckets import bucket_of, bucket_records, pack_buckets, require_same, unpack_bucket
from rl_core.rank_kit.weight_deltas import DeltaSender, HeldWeights, received
from rl_core.testing.reference_transport import MemoryReceiver, MemoryTransport
from rl_core.testing.transports import sample_tensors

BUCKET_BYTES = 64
WHOLE = {"id": "1 (a)", "base": None}


def after(delta: dict[str, Any], name: str) -> dict[str, Any]:
    return {"id": name, "base": delta["id"]}


def trained(tensors: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Changes one element of some tensors, leaves the others, and replaces all of "embedding.weight"."""
    generator = torch.Generator().manual_seed(100 + seed)
    new = {name: tensor.clone() for name, tensor in tensors.items()}
    new["embedding.weight"] = torch.randn(7, 5, generator=generator)
    for name in ("first.weight", "transposed.weight", "steps"):
        flat = new[name].contiguous().view(-1)
        flat[int(torch.randint(len(flat), (1,), generator=generator))] += 1
        new[name] = flat.view(new[name].shape)
    return new


@attrs.define
class Sides:
    """A rank and an engine that sync through memory."""

    rank: HeldWeights = attrs.field(factory=HeldWeights)
    engine: HeldWeights = attrs.field(factory=HeldWeights)
    names_sent: list[str] = attrs.field(factory=list)
    spoil: Callable[[list[WeightBucket]], list[WeightBucket]] = list
    """Changes the buckets on their way; their checksums are recomputed afterwards."""

    def send(self, tensors: dict[str, Tensor], delta: dict[str, Any], rendezvous: Any) -> Manifest:
        sender = DeltaSender(Spoiling(MemoryTransport().sender(rendezvous, 0, 1), self), delta, self.rank)
        return sender.send(pack_buckets(tensors.items(), BUCKET_BYTES), 1)

    def sync(self, tensors: dict[str, Tensor], delta: dict[str, Any]) -> tuple[Manifest, dict[str, Tensor], Manifest]:
        rendezvous = (transport := MemoryTransport()).open(num_ranks=1, num_engines=1)
        try:
            sent = self.send(tensors, delta, rendezvous)
            arrived, records = {}, {}
            for bucket in received(MemoryReceiver(rendezvous), 1, delta, self.engine):
                arrived |= dict(unpack_bucket(bucket))
                records |= bucket_records(bucket)
        finally:
            transport.close(rendezvous)
        return sent, arrived, Manifest(version=1, tensors=records)


@attrs.frozen
class Spoiling:
    sender: Any
    sides: Sides

    def send(self, buckets: Iterator[WeightBucket], version: int) -> Manifest:
        kept = self.sides.spoil([attrs.evolve(bucket, data=bucket.data.clone()) for bucket in buckets])
        self.sides.names_sent = [name for bucket in kept for name in bucket.names]
        return self.sender.send(iter(kept), version)


def require_equal(arrived: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    assert arrived.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (arrived[name].dtype, arrived[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(arrived[name], tensor), name


@pytest.fixture
def sides() -> Sides:
    """Both sides hold `sample_tensors` after a full sync."""
    sides = Sides()
    sides.sync(sample_tensors(), WHOLE)
    return sides


@pytest.mark.gpu
def test_deltas_of_weights_on_a_gpu_travel_on_the_gpu(sides):
    tensors, delta = trained(sample_tensors()), after(WHOLE, "1")
    devices = set()

    def seen(buckets: list[WeightBucket]) -> list[WeightBucket]:
        devices.update(bucket.data.device.type for bucket in buckets)
        return buckets

    sides.spoil = seen
    sent, arrived, manifest = sides.sync({name: tensor.cuda() for name, tensor in tensors.items()}, delta)
    assert devices == {"cuda"}
    require_equal(arrived, tensors)
    require_same(sent, manifest)


def test_repeated_deltas_give_the_engine_the_whole_weights(sides):
    tensors, delta = sample_tensors(), WHOLE
    for step in range(4):
        tensors, delta = trained(tensors, step), after(delta, str(step))
        sent, arrived, manifest = sides.sync(tensors, delta)
        require_equal(arrived, tensors)
        require_same(sent, manifest)
        assert "embedding.weight" in sides.names_sent, "all elements changed, so the tensor must be sent whole"
        assert {"first.weight", "second.weight", "second.weight/changes"}.isdisjoint(sides.names_sent)
        assert "first.weight/changes" in sides.names_sent


def test_a_whole_sync_sends_plain_tensors():
    sides = Sides()
    sent, arrived, manifest = sides.sync(sample_tensors(), WHOLE)
    require_equal(arrived, sample_tensors())
    require_same(sent, manifest)
    assert sides.names_sent == list(sample_tensors())
    assert sent.num_sent_bytes == sum(tensor.nbytes for tensor in sample_tensors().values())


def test_the_bytes_that_are_sent_are_counted():
    tensors = {"weight": torch.randn(10_000).to(torch.bfloat16)}
    sides = Sides()
    sides.sync(tensors, WHOLE)
    tensors["weight"][::100] += 1
    sent, _, _ = sides.sync(tensors, after(WHOLE, "2"))
    table_bytes = len(json.dumps([["weight", [10_000], "bfloat16", sent.tensors["weight"].checksum, 100, 1]]))
    assert sent.num_sent_bytes == 100 * 3 + table_bytes


def test_tensors_kept_by_an_engine_are_not_overwritten(sides):
    tensors, delta, kept = sample_tensors(), WHOLE, []
    for step in range(3):
        tensors, delta = trained(tensors, step), after(delta, str(step))
        kept.append((sides.sync(tensors, delta)[1], tensors))
    for arrived, tensors in kept:
        require_equal(arrived, tensors)


def test_training_in_place_does_not_change_the_kept_base(sides):
    tensors = sample_tensors()
    sides.sync(tensors, after(WHOLE, "2"))
    for tensor in tensors.values():
        tensor.zero_()
    _, arrived, _ = sides.sync(tensors, after(after(WHOLE, "2"), "3"))
    require_equal(arrived, tensors)


# --- faults ---------------------------------------------------------------------------------------------------------


def require_recovery(sides: Sides, tensors: dict[str, Tensor]) -> None:
    """Requires that changes are refused for lack of a base, and that a full sync and the changes after it work."""
    assert sides.engine.id is None
    assert not sides.engine.tensors
    with pytest.raises(WeightSyncError, match=r"holds none|holds \d"):
        sides.sync(tensors, {"id": "9", "base": "8"})
    sides.spoil = list
    whole = {"id": "10", "base": None}
    require_equal(sides.sync(tensors, whole)[1], tensors)
    tensors = trained(tensors, 7)
    require_equal(sides.sync(tensors, after(whole, "11"))[1], tensors)


def test_an_engine_that_missed_a_version_refuses_the_changes_after_it(sides):
    first, second = trained(sample_tensors(), 1), trained(trained(sample_tensors(), 1), 2)
    missed = after(WHOLE, "2 (b)")
    rendezvous = MemoryTransport().open(num_ranks=1, num_engines=1)
    sides.send(first, missed, rendezvous)
    with pytest.raises(WeightSyncError, match=r"got changes relative to weights 2 \(b\), but this engine holds 1 \(a"):
        sides.sync(second, after(missed, "3"))
    require_recovery(sides, second)


def test_an_engine_that_was_started_again_refuses_changes(sides):
    sides.engine = HeldWeights()
    with pytest.raises(WeightSyncError, match="but this engine holds none"):
        sides.sync(trained(sample_tensors()), after(WHOLE, "2"))
    require_recovery(sides, sample_tensors())


def test_a_rank_without_the_base_raises_and_drains_its_weights(sides):
    drained = []

    def buckets() -> Iterator[WeightBucket]:
        yield from pack_buckets(sample_tensors().items(), BUCKET_BYTES)
        drained.append(True)

    rendezvous = MemoryTransport().open(num_ranks=1, num_engines=1)
    sender = DeltaSender(MemoryTransport().sender(rendezvous, 0, 1), {"id": "3", "base": "2"}, sides.rank)
    with pytest.raises(WeightSyncError, match=r"but this rank holds 1 \(a\)"):
        sender.send(buckets(), 1)
    assert drained
    assert sides.rank.id is None


def test_a_rank_that_failed_while_sending_keeps_no_base(sides):
    def breaks() -> Iterator[WeightBucket]:
        yield from pack_buckets(list(sample_tensors().items())[:2], BUCKET_BYTES)
        raise ArithmeticError("this rank broke")

    rendezvous = MemoryTransport().open(num_ranks=1, num_engines=1)
    sender = DeltaSender(MemoryTransport().sender(rendezvous, 0, 1), after(WHOLE, "2"), sides.rank)
    with pytest.raises(ArithmeticError):
        sender.send(breaks(), 1)
    assert (sides.rank.id, sides.rank.tensors) == (None, {})


def without_the_last(buckets: list[WeightBucket]) -> list[WeightBucket]:
    return buckets[:-1]


def without_the_changes(buckets: list[WeightBucket]) -> list[WeightBucket]:
    """Removes the first changed tensor's changes, which the table still lists."""
    lacking = next(name for bucket in buckets for name in bucket.names if name.endswith("/changes"))
    return [bucket_of([pair for pair in unpack_bucket(b) if pair[0] != lacking]) for b in buckets]


def with_a_flipped_bit(buckets: list[WeightBucket]) -> list[WeightBucket]:
    """Flips a bit of a change's value before a transport computes its checksum, so the checksum cannot show it."""
    tensors = [dict(unpack_bucket(bucket)) for bucket in buckets]
    changes = next(tensor for of in tensors for name, tensor in of.items() if name.endswith("/changes"))
    changes[-1] ^= 1
    return [bucket_of(list(of.items())) for of in tensors]


def without_its_table(buckets: list[WeightBucket]) -> list[WeightBucket]:
    return [bucket_of(list(unpack_bucket(bucket))[1:]) for bucket in buckets]


DAMAGED = {
    without_the_last: r"changes of \d tensors did not arrive",
    without_the_changes: "weight/changes is named in a table but did not arrive",
    with_a_flipped_bit: "got TensorRecord.* after its changes, but the rank has TensorRecord",
    without_its_table: "expected its table first",
}


@pytest.mark.parametrize("spoil", DAMAGED, ids=lambda spoil: spoil.__name__)
def test_a_damaged_delta_is_refused_and_whole_weights_work_after_it(sides, spoil):
    tensors = trained(sample_tensors())
    sides.spoil = spoil
    with pytest.raises(WeightSyncError, match=DAMAGED[spoil]):
        sides.sync(tensors, after(WHOLE, "2"))
    require_recovery(sides, tensors)


def test_without_the_check_of_changed_tensors_a_flipped_bit_is_loaded(sides, monkeypatch):
    """Negative control of the test above: without this check, only the comparison of the manifests notices the bit."""
    monkeypatch.setattr(weight_deltas, "_with_changes", unchecked)
    sides.spoil = with_a_flipped_bit
    tensors = trained(sample_tensors())
    sent, arrived, manifest = sides.sync(tensors, after(WHOLE, "2"))
    assert [name for name in tensors if not torch.equal(arrived[name], tensors[name])]
    with pytest.raises(WeightSyncError, match="1 tensors differ"):
        require_same(sent, manifest)


def unchecked(bucket: WeightBucket, base: dict[str, Tensor]) -> WeightBucket:
    """`_with_changes` without its comparison of checksums."""
    sent = dict(unpack_bucket(bucket))
    rows = [weight_deltas._Row(*row) for row in json.loads(bytes(sent.pop(bucket.names[0]).numpy()))]
    return bucket_of([(row.name, weight_deltas._made(row, base.pop(row.name, None), sent)) for row in rows])


def test_an_engine_that_overwrote_received_tensors_refuses_the_changes(sides):
    first = trained(sample_tensors())
    _, arrived, _ = sides.sync(first, after(WHOLE, "2"))
    arrived["second.weight"].fill_(3.0)
    with pytest.raises(WeightSyncError, match=r"second.weight: got .* after its changes"):
        sides.sync(first, after(after(WHOLE, "2"), "3"))
    require_recovery(sides, first)


def test_a_new_tensor_is_sent_whole_and_a_missing_one_is_an_error(sides):
    tensors = trained(sample_tensors())
    more = {**tensors, "new.weight": torch.ones(3)}
    require_equal(sides.sync(more, after(WHOLE, "2"))[1], more)
    with pytest.raises(WeightSyncError, match=r"changes of 1 tensors did not arrive, first \['new.weight'\]"):
        sides.sync(tensors, after(after(WHOLE, "2"), "3"))


def test_a_tensor_of_another_shape_is_sent_whole(sides):
    tensors = {**sample_tensors(), "second.weight": torch.zeros(2, 8, dtype=torch.bfloat16)}
    require_equal(sides.sync(tensors, after(WHOLE, "2"))[1], tensors)
    assert "second.weight" in sides.names_sent


def test_a_sync_without_deltas_keeps_no_base(sides):
    rendezvous = MemoryTransport().open(num_ranks=1, num_engines=1)
    MemoryTransport().sender(rendezvous, 0, 1).send(pack_buckets(sample_tensors().items(), 64), 1)
    assert len(list(received(MemoryReceiver(rendezvous), 1, None, sides.engine))) > 1
    assert (sides.engine.id, sides.engine.tensors) == (None, {})
