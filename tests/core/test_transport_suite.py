"""The suite of weight transports passes one through memory, and fails each wrong one in the check that is named."""

from __future__ import annotations

import attrs
import pytest
import torch

from rl_core.interfaces import CONTRACT_VERSION
from rl_core.rank_kit.weight_buckets import pack_buckets, unpack_bucket
from rl_core.testing import reference_transport
from rl_core.testing.reference_transport import MemoryReceiver, MemorySender, MemoryTransport
from rl_core.testing.transports import WeightTransportConformance
from tests.core.test_suites import REJECTED

HERE = __name__


class TestMemoryTransport(WeightTransportConformance):
    transport = MemoryTransport()

    def damage(self, rendezvous):
        return False


class FaultySender(MemorySender):
    def send(self, buckets, version):
        kept = list(buckets)
        manifest = reference_transport.manifest_of(kept, version)
        super().send(iter(self.spoil(kept)), self.spoil_version(version))
        return manifest

    def spoil(self, buckets):
        return buckets

    def spoil_version(self, version):
        return version


class LosesABucket(FaultySender):
    def spoil(self, buckets):
        return buckets[:-1]


class SwapsNames(FaultySender):
    """Two tensors of one shape arrive under each other's name: sizes and counts are right."""

    def spoil(self, buckets):
        tensors = dict(pair for bucket in buckets for pair in unpack_bucket(bucket))
        if "second.weight" in tensors:
            tensors["first.weight"], tensors["second.weight"] = tensors["second.weight"], tensors["first.weight"]
        return list(pack_buckets(tensors.items(), 64))


class SendsHalfPrecision(FaultySender):
    def spoil(self, buckets):
        tensors = dict(pair for bucket in buckets for pair in unpack_bucket(bucket))
        return list(pack_buckets(((name, t.to(torch.float16)) for name, t in tensors.items()), 64))


class ReadsOneBucket(FaultySender):
    def send(self, buckets, version):
        return super().send(iter([bucket for bucket, _ in zip(buckets, range(1), strict=False)]), version)


class ClaimsTheExpectedVersion(FaultySender):
    """Stale weights under a new number."""

    def spoil_version(self, version):
        return 5


class AcceptsAnyVersion(MemoryReceiver):
    def receive(self, version):
        sync = reference_transport.SYNCS[self._number]
        with sync.changed:
            sync.changed.wait_for(lambda: sync.is_closed or len(sync.sent) == sync.num_ranks, self._timeout_s)
        for _, buckets in sync.sent.values():
            yield from buckets


class WaitsForOneRankOnly(MemoryReceiver):
    def receive(self, version):
        sync = reference_transport.SYNCS[self._number]
        with sync.changed:
            sync.changed.wait_for(lambda: sync.sent, self._timeout_s)
        for _, buckets in list(sync.sent.values()):
            yield from buckets


@attrs.frozen
class FaultyTransport(MemoryTransport):
    faulty_sender: type = MemorySender

    def sender(self, rendezvous, rank, world_size):
        return self.faulty_sender(reference_transport.SYNCS[rendezvous.data["sync"]], rank)


class NotPlainData(MemoryTransport):
    def open(self, *, num_ranks, num_engines):
        rendezvous = super().open(num_ranks=num_ranks, num_engines=num_engines)
        return attrs.evolve(rendezvous, data={**rendezvous.data, "lock": object()})


class ClosesOnlyOnce(MemoryTransport):
    def close(self, rendezvous):
        reference_transport.SYNCS.pop(rendezvous.data["sync"])


WHAT_ARRIVES = "test_what_arrives_is_what_was_sent"
WRONG_TRANSPORTS = [
    (FaultyTransport(faulty_sender=LosesABucket), WHAT_ARRIVES),
    (FaultyTransport(faulty_sender=SwapsNames), WHAT_ARRIVES),
    (FaultyTransport(faulty_sender=SendsHalfPrecision), WHAT_ARRIVES),
    (FaultyTransport(faulty_sender=ReadsOneBucket), "test_every_rank_drains_its_weights_also_one_that_sends_nothing"),
    (FaultyTransport(faulty_sender=ClaimsTheExpectedVersion), "test_another_version_is_refused"),
    (MemoryTransport(receiver=f"{HERE}:AcceptsAnyVersion"), "test_another_version_is_refused"),
    (
        MemoryTransport(receiver=f"{HERE}:WaitsForOneRankOnly"),
        "test_a_sync_that_is_closed_ends_an_engine_that_waits_for_a_missing_rank",
    ),
    (MemoryTransport(contract_version=CONTRACT_VERSION + 1), "test_it_follows_this_version_of_the_contract"),
    (NotPlainData(), "test_the_rendezvous_is_plain_data"),
    (ClosesOnlyOnce(), "test_syncs_follow_each_other_also_after_one_that_failed"),
]


@pytest.mark.parametrize(
    ("wrong", "check"), WRONG_TRANSPORTS, ids=[f"{i}-{c[1]}" for i, c in enumerate(WRONG_TRANSPORTS)]
)
def test_a_wrong_transport_is_rejected(wrong, check):
    class Suite(WeightTransportConformance):
        transport = wrong

    arguments = [1] if check == WHAT_ARRIVES else []
    with pytest.raises((*REJECTED, KeyError, TypeError)):
        getattr(Suite(), check)(*arguments)
