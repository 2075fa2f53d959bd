"""Weights: what is sent from ranks to engines, what must arrive, and the two ends of a transport."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    from torch import Tensor


@attrs.frozen(kw_only=True, eq=False)
class WeightBucket:
    """Some parameters, packed for one transfer. Each rank describes its own; layouts may differ between ranks."""

    names: tuple[str, ...]
    """Hugging Face parameter names, in the order in which they lie in `data`."""
    dtypes: tuple[str, ...]
    """torch names without the prefix, e.g. `bfloat16`, one per name."""
    shapes: tuple[tuple[int, ...], ...]
    """Full (unsharded) shapes; a scalar is `()`."""
    data: Tensor
    """uint8, one axis, contiguous, no gaps, on any device."""
    checksums: tuple[int, ...] | None = None
    """CRC-32 of each tensor's bytes, where a receiver has computed them from what arrived."""

    def __attrs_post_init__(self) -> None:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError(
                f"WeightBucket: {len(self.names)} names, {len(self.dtypes)} dtypes and {len(self.shapes)} shapes; "
                f"first {self.names[:1]}"
            )


@attrs.frozen(kw_only=True)
class TensorRecord:
    """What one transferred tensor must equal on the other side."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int
    """CRC-32 of the tensor's bytes."""


@attrs.frozen(kw_only=True)
class Manifest:
    """What was sent, or what arrived: equal on both sides when a sync is complete and intact."""

    version: int
    tensors: Mapping[str, TensorRecord]


@attrs.frozen(kw_only=True)
class Rendezvous:
    """How the two sides of one weight sync meet. Plain data, made by the transport on the controller."""

    transport: str
    """Entry-point name of the transport."""
    receiver: str
    """`package.module:Class`, loaded in the engine's process."""
    data: Mapping[str, Any]
    """Whatever sender and receiver agreed upon: a directory, an address, a group size."""
    adapter: Mapping[str, Any] | None = None
    """Of a sync that sends a low-rank adapter alone: its `LoraConfig.peft_config`. No transport reads it."""


class WeightSender(Protocol):
    """A rank's end of a sync."""

    def send(self, buckets: Iterator[WeightBucket], version: int) -> Manifest:
        """Drains `buckets` on every rank and returns what this rank sent."""
        ...


class WeightReceiver(Protocol):
    """An engine's end of a sync; built as `Class(rendezvous)`, in every process of an engine that holds weights."""

    @property
    def is_staged(self) -> bool:
        """As the transport's."""
        ...

    def receive(self, version: int) -> Iterator[WeightBucket]:
        """Yields every bucket of `version`; its data is the caller's to keep. Raises WeightSyncError if they are of
        another version, damaged or incomplete; what was yielded before is then worth nothing."""
        ...


@runtime_checkable
class WeightTransport(Protocol):
    """How weights get from ranks to engines (entry-point group `rl_core.weight_transports`)."""

    @property
    def contract_version(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def is_staged(self) -> bool:
        """True: what was sent can be read until `close`, by receivers that come late or again, and an engine takes it
        whole or keeps the version it has. False: both ends work at the same time, and what breaks half-way leaves an
        engine without weights that it could serve."""
        ...

    def open(self, *, num_ranks: int, num_engines: int) -> Rendezvous:
        """On the controller, once per sync.

        Args:
            num_ranks: senders that will come.
            num_engines: receivers that will come, at least: an engine of several processes counts as many.
        """
        ...

    def sender(self, rendezvous: Rendezvous, rank: int, world_size: int) -> WeightSender:
        """In each rank."""
        ...

    def close(self, rendezvous: Rendezvous) -> None:
        """On the controller, whether the sync succeeded or not: removes what `open` left, and ends both sides' waits. A
        second call does nothing."""
        ...


@runtime_checkable
class CheckingTransport(Protocol):
    """A transport that cannot serve on every machine."""

    def validate(self) -> None:
        """Before a run, on the controller; starts nothing. Raises ConfigError where no sync could be opened."""
        ...


@runtime_checkable
class NodeCheckingTransport(Protocol):
    """A transport that needs something which several machines may not have in common."""

    def validate_nodes(self, num_nodes: int) -> None:
        """Before a run whose policy trains on so many machines, on the controller; starts nothing. Raises ConfigError
        where weights could not get from one to another."""
        ...


@runtime_checkable
class RunTransport(Protocol):
    """A transport that leaves files, whose names say whose they are."""

    def of_run(self, run: str) -> WeightTransport:
        """The same, for the run of that name."""
        ...
