"""Conformance suite of weight transports. It checks that weights arrive complete, or that the receiver raises an error.

A plug-in's author writes

    class TestMyTransport(WeightTransportConformance):
        transport = my_transport

and runs pytest. Ranks and engines are threads of the test's process. Suites of staged transports override `damage` to
corrupt a sync that was sent but not yet received; other transports store nothing in between. A call that does not end
within `deadline_s` fails its test. The call's thread keeps running, but does not prevent pytest from exiting.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, ClassVar

import attrs
import pytest
import torch
from torch import Tensor

from rl_core import plugins
from rl_core.errors import RLError, WeightSyncError
from rl_core.interfaces import Manifest, Rendezvous, WeightBucket, WeightSender, WeightTransport
from rl_core.rank_kit.weight_buckets import merge_manifests, pack_buckets, require_same, tensor_record, unpack_bucket
from rl_core.rank_kit.weight_deltas import DeltaSender, HeldWeights, received

_BUCKET_BYTES = 64


def sample_tensors() -> dict[str, Tensor]:
    """Returns tensors that are difficult to transfer: several dtypes, odd sizes that break alignment, a scalar, an
    empty tensor, and two of equal shape."""
    generator = torch.Generator().manual_seed(0)
    return {
        "embedding.weight": torch.randn(7, 5, generator=generator),
        "mask": torch.tensor([True, False, True]),
        "first.weight": torch.randn(4, 4, generator=generator).to(torch.bfloat16),
        "second.weight": torch.randn(4, 4, generator=generator).to(torch.bfloat16),
        "transposed.weight": torch.randn(3, 6, generator=generator).t(),
        "scale": torch.tensor(0.5),
        "codes": torch.randint(0, 255, (5,), generator=generator, dtype=torch.uint8),
        "nothing": torch.zeros(0, 3),
        "steps": torch.tensor([2**40], dtype=torch.int64),
    }


@attrs.frozen(eq=False)
class TransportCall:
    """A running call in a separate daemon thread."""

    what: str
    """Description of the call, for messages."""
    deadline_s: float
    future: Future[Any] = attrs.field(factory=Future)

    @classmethod
    def start(cls, deadline_s: float, what: str, function: Callable[..., Any], *args: Any) -> TransportCall:
        """Calls the function in a new thread."""
        call = cls(what, deadline_s)
        threading.Thread(target=call._run, args=(function, *args), daemon=True).start()
        return call

    def result(self) -> Any:
        """Returns what the function returned, or raises what it raised. Raises AssertionError if the function does not
        end within the deadline."""
        self.require_end()
        return self.future.result()

    def exception(self) -> BaseException | None:
        """Returns the exception that the function raised, or None. Raises AssertionError if the function does not end
        within the deadline."""
        self.require_end()
        return self.future.exception()

    def require_end(self) -> None:
        """Raises AssertionError unless the function ends within the deadline."""
        _, unfinished = wait([self.future], self.deadline_s)
        assert not unfinished, f"{self.what} did not end within {self.deadline_s:g} s"

    def _run(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            self.future.set_result(function(*args))
        except BaseException as error:  # handled in the test's own thread
            self.future.set_exception(error)


@attrs.define
class SendingRanks:
    """The ranks of one sync, and the tensors that each rank sends."""

    transport: WeightTransport
    rendezvous: Rendezvous
    parts: Sequence[dict[str, Tensor]]
    undrained: list[int] = attrs.field(factory=list)

    def send(self, version: int, rank: int) -> Manifest:
        return self.sender(rank).send(self._buckets(rank), version)

    def send_delta(self, version: int, rank: int, delta: Mapping[str, Any], held: HeldWeights) -> Manifest:
        """Sends the changes since the base of `delta`."""
        return DeltaSender(self.sender(rank), delta, held).send(self._buckets(rank), version)

    def sender(self, rank: int) -> WeightSender:
        return self.transport.sender(self.rendezvous, rank, len(self.parts))

    def _buckets(self, rank: int) -> Iterator[WeightBucket]:
        self.undrained.append(rank)
        yield from pack_buckets(self.parts[rank].items(), _BUCKET_BYTES)
        self.undrained.remove(rank)


class WeightTransportConformance:
    """Base class of the suite. A subclass sets `transport`; pytest then runs the tests on it."""

    transport: ClassVar[WeightTransport]
    deadline_s: ClassVar[float] = 60.0
    """Longest time in seconds that one call may take."""

    def damage(self, rendezvous: Rendezvous) -> bool:
        """Corrupts the data that was sent but not yet received. Returns False if there is nothing to corrupt."""
        return False

    def test_it_follows_the_contract(self) -> None:
        plugins.require_plugin("rl_core.weight_transports", self.transport, self.transport.name)

    def test_both_ends_say_alike_whether_a_sync_is_staged(self) -> None:
        """The transport and its receiver have the same value of `is_staged`."""
        rendezvous = self.transport.open(num_ranks=1, num_engines=1)
        self._close(rendezvous)
        receiver = plugins.load_receiver(rendezvous.receiver)
        assert receiver.is_staged == self.transport.is_staged

    def test_the_rendezvous_is_plain_data(self) -> None:
        rendezvous = self.transport.open(num_ranks=1, num_engines=1)
        try:
            assert rendezvous.transport == self.transport.name
            json.dumps(dict(rendezvous.data))
        finally:
            self._close(rendezvous)

    @pytest.mark.parametrize("num_ranks", [1, 3])
    def test_what_arrives_is_what_was_sent(self, num_ranks: int) -> None:
        tensors = sample_tensors()
        with self._sync(_dealt(tensors, num_ranks)) as (ranks, start):
            receiving = start("an engine's `receive`", _receive, ranks.rendezvous, 7)
            sent = self._send_all(ranks, 7, start)
            arrived, received = receiving.result()
        assert arrived.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert arrived[name].dtype == tensor.dtype, name
            assert torch.equal(arrived[name], tensor), name
        expected = Manifest(version=7, tensors={name: tensor_record(tensor) for name, tensor in tensors.items()})
        require_same(expected, sent)
        require_same(expected, received)

    def test_every_rank_drains_its_weights_also_one_that_sends_nothing(self) -> None:
        """A rank that has nothing to send must drain its iterator of buckets too."""
        with self._sync([sample_tensors(), {}]) as (ranks, start):
            receiving = start("an engine's `receive`", _receive, ranks.rendezvous, 0)
            self._send_all(ranks, 0, start)
            arrived, _ = receiving.result()
        assert not ranks.undrained, f"ranks {ranks.undrained} did not drain their weights"
        assert arrived.keys() == sample_tensors().keys()

    def test_several_engines_receive_the_same(self) -> None:
        with self._sync([sample_tensors()], num_engines=2) as (ranks, start):
            receiving = [start("an engine's `receive`", _receive, ranks.rendezvous, 3) for _ in range(2)]
            sent = self._send_all(ranks, 3, start)
            for engine in receiving:
                require_same(sent, engine.result()[1])

    def test_another_version_is_refused(self) -> None:
        with self._sync([sample_tensors()]) as (ranks, start):
            receiving = start("an engine's `receive`", _receive, ranks.rendezvous, 5)
            sending = start("a rank's `send`", ranks.send, 4, 0)
            with pytest.raises(WeightSyncError):
                receiving.result()
            self._close(ranks.rendezvous)
            assert isinstance(sending.exception(), RLError | None)

    def test_damage_is_noticed(self) -> None:
        if not self.transport.is_staged:
            pytest.skip("this transport keeps nothing that could be damaged")
        with self._sync([sample_tensors()]) as (ranks, start):
            self._send_all(ranks, 0, start)
            if not self.damage(ranks.rendezvous):
                pytest.skip("`damage` corrupted nothing; override it to check a staged transport")
            with pytest.raises(WeightSyncError):
                start("an engine's `receive`", _receive, ranks.rendezvous, 0).result()

    def test_what_is_staged_can_be_read_late_and_again(self) -> None:
        if not self.transport.is_staged:
            pytest.skip("this transport keeps nothing that could be read again")
        with self._sync(_dealt(sample_tensors(), 2)) as (ranks, start):
            sent = self._send_all(ranks, 0, start)
            for _ in range(2):
                require_same(sent, start("a late `receive`", _receive, ranks.rendezvous, 0).result()[1])

    @pytest.mark.parametrize("num_ranks", [1, 3])
    def test_what_changed_since_the_last_sync_arrives_as_the_whole(self, num_ranks: int) -> None:
        """The second and the third sync send only changes. The engine must still receive all tensors."""
        of_ranks, of_engine = [HeldWeights() for _ in range(num_ranks)], HeldWeights()
        tensors, base = sample_tensors(), None
        for version in (1, 2, 3):
            delta = {"id": f"sync {version}", "base": base}
            with self._sync(_dealt(tensors, num_ranks)) as (ranks, start):
                receiving = start("an engine's `receive`", _receive, ranks.rendezvous, version, delta, of_engine)
                sending = [
                    start(f"rank {rank}'s `send`", ranks.send_delta, version, rank, delta, held)
                    for rank, held in enumerate(of_ranks)
                ]
                sent = merge_manifests([manifest.result() for manifest in sending])
                arrived, received_ = receiving.result()
            require_same(sent, received_)
            assert all(torch.equal(arrived[name], tensor) for name, tensor in tensors.items())
            tensors, base = {**tensors, "first.weight": arrived["first.weight"] + version}, delta["id"]

    def test_a_rank_drains_its_weights_also_when_the_sync_is_closed(self) -> None:
        with self._sync([sample_tensors()]) as (ranks, start):
            self._close(ranks.rendezvous)
            error = start("a rank's `send`", ranks.send, 0, 0).exception()
        assert isinstance(error, RLError | None)
        assert not ranks.undrained, "the rank did not drain its weights, so the other ranks would wait for it"

    def test_a_sync_that_is_closed_ends_an_engine_that_waits_for_a_missing_rank(self) -> None:
        with self._sync(_dealt(sample_tensors(), 2)) as (ranks, start):
            receiving = start("an engine's `receive`", _receive, ranks.rendezvous, 0)
            start("a rank's `send`", ranks.send, 0, 0).result()
            self._close(ranks.rendezvous)
            with pytest.raises(RLError):
                receiving.result()

    def test_a_rank_that_fails_half_way_completes_nothing(self) -> None:
        def breaks() -> Iterator[WeightBucket]:
            yield from pack_buckets(list(sample_tensors().items())[:2], _BUCKET_BYTES)
            raise ArithmeticError("this rank broke")

        with self._sync([sample_tensors()]) as (ranks, start):
            receiving = start("an engine's `receive`", _receive, ranks.rendezvous, 0)
            with pytest.raises(ArithmeticError):
                start("a rank's `send`", ranks.sender(0).send, breaks(), 0).result()
            self._close(ranks.rendezvous)
            with pytest.raises(RLError):
                receiving.result()

    def test_syncs_follow_each_other_also_after_one_that_failed(self) -> None:
        failed = self.transport.open(num_ranks=1, num_engines=1)
        self._close(failed)
        self._close(failed)
        for version in range(3):
            tensors = {"weight": torch.full((9,), float(version))}
            with self._sync([tensors]) as (ranks, start):
                receiving = start("an engine's `receive`", _receive, ranks.rendezvous, version)
                self._send_all(ranks, version, start)
                assert torch.equal(receiving.result()[0]["weight"], tensors["weight"])

    @contextmanager
    def _sync(
        self, parts: Sequence[dict[str, Tensor]], *, num_engines: int = 1
    ) -> Iterator[tuple[SendingRanks, Callable[..., TransportCall]]]:
        rendezvous = self.transport.open(num_ranks=len(parts), num_engines=num_engines)
        calls: list[TransportCall] = []

        def start(what: str, function: Callable[..., Any], *args: Any) -> TransportCall:
            calls.append(TransportCall.start(self.deadline_s, what, function, *args))
            return calls[-1]

        try:
            yield SendingRanks(self.transport, rendezvous, parts), start
        finally:
            self._close(rendezvous)
        for call in calls:
            call.require_end()

    def _close(self, rendezvous: Rendezvous) -> None:
        TransportCall.start(self.deadline_s, "the transport's `close`", self.transport.close, rendezvous).result()

    def _send_all(self, ranks: SendingRanks, version: int, start: Callable[..., TransportCall]) -> Manifest:
        sending = [start(f"rank {rank}'s `send`", ranks.send, version, rank) for rank in range(len(ranks.parts))]
        return merge_manifests([manifest.result() for manifest in sending])


def _dealt(tensors: dict[str, Tensor], num_ranks: int) -> list[dict[str, Tensor]]:
    return [dict(list(tensors.items())[rank::num_ranks]) for rank in range(num_ranks)]


def _receive(
    rendezvous: Rendezvous, version: int, delta: Mapping[str, Any] | None = None, held: HeldWeights | None = None
) -> tuple[dict[str, Tensor], Manifest]:
    """Receives as an engine does. Returns all tensors by name, and the manifest of what arrived."""
    receiver = plugins.load_receiver(rendezvous.receiver)(rendezvous)
    buckets = received(receiver, version, delta, held or HeldWeights())
    tensors = {name: tensor for bucket in buckets for name, tensor in unpack_bucket(bucket)}
    return tensors, Manifest(version=version, tensors={name: tensor_record(tensor) for name, tensor in tensors.items()})
