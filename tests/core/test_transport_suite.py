"""The weight-transport suite accepts an in-memory transport. Each faulty transport fails the check listed with it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import torch

from rl_core.errors import PluginError
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
    """Swaps the names of two tensors of equal shape, so sizes and counts are right."""

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
    """Sends stale weights under the new version number."""

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


class SendsForOneRank(MemoryTransport):
    def sender(self, rendezvous): ...  # pyright: ignore[reportIncompatibleMethodOverride]


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
    (SendsForOneRank(), "test_it_follows_the_contract"),
    (NotPlainData(), "test_the_rendezvous_is_plain_data"),
    (ClosesOnlyOnce(), "test_syncs_follow_each_other_also_after_one_that_failed"),
]
OTHER_ERRORS = {
    "test_it_follows_the_contract": (PluginError, r"cannot be called as sender\(rendezvous, rank, world_size\)"),
    "test_the_rendezvous_is_plain_data": (TypeError, "not JSON serializable"),
    "test_syncs_follow_each_other_also_after_one_that_failed": (KeyError, r"^\d+$"),
}
"""Checks that end in an error of the transport or of the code that they call → the error and its message."""


@pytest.mark.parametrize(
    ("wrong", "check"), WRONG_TRANSPORTS, ids=[f"{i}-{c[1]}" for i, c in enumerate(WRONG_TRANSPORTS)]
)
def test_a_wrong_transport_is_rejected(wrong, check):
    class Suite(WeightTransportConformance):
        transport = wrong

    arguments = [1] if check == WHAT_ARRIVES else []
    errors, message = OTHER_ERRORS.get(check, (REJECTED, None))
    with pytest.raises(errors, match=message):
        getattr(Suite(), check)(*arguments)


# --- transports that never finish -----------------------------------------------------------------------------------

LET_GO = threading.Event()
"""Set after a test, to end the threads that still wait."""


class NeverReceives(MemoryReceiver):
    """Never returns, whatever is sent and even if the sync is closed."""

    def receive(self, version):
        LET_GO.wait()
        yield from ()


class ReceivesForever(MemoryReceiver):
    """Yields the sent buckets again and again."""

    def receive(self, version):
        while not LET_GO.is_set():
            yield from super().receive(version)


class IsNeverBuilt(MemoryReceiver):
    def __init__(self, rendezvous):
        LET_GO.wait()
        super().__init__(rendezvous)


class DeafToClose(MemoryReceiver):
    """Waits for all ranks even after the sync is closed."""

    def receive(self, version):
        sync = reference_transport.SYNCS.get(self._number)  # None if it was closed before this thread began
        while (sync is None or len(sync.sent) < sync.num_ranks) and not LET_GO.is_set():
            time.sleep(0.01)
        yield from super().receive(version)


class NeverSends(MemorySender):
    def send(self, buckets, version):
        LET_GO.wait()
        return super().send(buckets, version)


class NeverCloses(MemoryTransport):
    def close(self, rendezvous):
        LET_GO.wait()


RECEIVE, CLOSE = "an engine's `receive` did not end", "the transport's `close` did not end"
MISSING_RANK = "test_a_sync_that_is_closed_ends_an_engine_that_waits_for_a_missing_rank"
ENDLESS_TRANSPORTS = [
    (MemoryTransport(receiver=f"{HERE}:NeverReceives"), WHAT_ARRIVES, RECEIVE),
    (MemoryTransport(receiver=f"{HERE}:NeverReceives"), "test_several_engines_receive_the_same", RECEIVE),
    (
        MemoryTransport(receiver=f"{HERE}:NeverReceives"),
        "test_what_is_staged_can_be_read_late_and_again",
        "a late `rec",
    ),
    (MemoryTransport(receiver=f"{HERE}:NeverReceives"), "test_a_rank_that_fails_half_way_completes_nothing", RECEIVE),
    (MemoryTransport(receiver=f"{HERE}:ReceivesForever"), WHAT_ARRIVES, RECEIVE),
    (MemoryTransport(receiver=f"{HERE}:IsNeverBuilt"), "test_another_version_is_refused", RECEIVE),
    (MemoryTransport(receiver=f"{HERE}:DeafToClose"), MISSING_RANK, RECEIVE),
    (FaultyTransport(faulty_sender=NeverSends), WHAT_ARRIVES, "rank 0's `send` did not end"),
    (NeverCloses(), "test_the_rendezvous_is_plain_data", CLOSE),
    (NeverCloses(), WHAT_ARRIVES, CLOSE),
]


@pytest.fixture
def let_go() -> Iterator[None]:
    LET_GO.clear()
    yield
    LET_GO.set()


@pytest.mark.usefixtures("let_go")
@pytest.mark.parametrize(
    ("endless", "check", "message"),
    ENDLESS_TRANSPORTS,
    ids=[f"{i}-{c[1]}" for i, c in enumerate(ENDLESS_TRANSPORTS)],
)
def test_a_transport_that_never_ends_fails_within_the_deadline(endless, check, message):
    class Suite(WeightTransportConformance):
        transport = endless

    arguments = [1] if check == WHAT_ARRIVES else []
    for deadline_s in (0.3, 3.0, 30.0):
        Suite.deadline_s = deadline_s
        with pytest.raises(AssertionError, match=r"did not end within") as raised:
            getattr(Suite(), check)(*arguments)
        # On a busy machine, a call that ends may miss a short deadline too.
        if str(raised.value).startswith(message):
            break
    assert re.match(f"{message}.* within {deadline_s:g} s", str(raised.value))


STUCK_SUITE = """
import threading

import attrs
from rl_core.testing.reference_transport import MemoryReceiver, MemoryTransport
from rl_core.testing.transports import WeightTransportConformance


class Stuck(MemoryReceiver):
    def receive(self, version):
        threading.Event().wait()
        yield from ()


class TestStuck(WeightTransportConformance):
    transport = MemoryTransport(receiver=f"{__name__}:Stuck")
    deadline_s = 0.3
"""


@pytest.mark.slow
def test_pytest_ends_even_if_a_transport_never_does(tmp_path: Path):
    (tmp_path / "test_stuck.py").write_text(STUCK_SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:timeout", "test_stuck.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "did not end within 0.3 s" in result.stdout
    assert " passed" in result.stdout, "checks without a receiver must still pass"
