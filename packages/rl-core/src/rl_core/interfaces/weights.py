"""Weights: what is sent from ranks to engines, what must arrive, and the two ends of a transport."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    from torch import Tensor


@attrs.frozen(kw_only=True, eq=False)
class WeightBucket:
    """Some parameters, for one transfer: packed as `data`, or as `parts` that are packed when they are asked for. Each
    rank describes its own; layouts may differ between ranks."""

    names: tuple[str, ...]
    """Hugging Face parameter names, in the order in which they lie in `data`."""
    dtypes: tuple[str, ...]
    """torch names without the prefix, e.g. `bfloat16`, one per name."""
    shapes: tuple[tuple[int, ...], ...]
    """Full (unsharded) shapes; a scalar is `()`."""
    _data: Tensor | None = attrs.field(default=None, alias="data")
    """uint8, one axis, contiguous, no gaps, on any device. Given as `data`."""
    parts: tuple[Tensor, ...] | None = None
    """The tensors, while nothing has packed them; None once `data` is there. Of a bucket that `pack_buckets` made they
    are good until the next one is drawn, when it is packed unless `taken` was called."""
    checksums: tuple[int, ...] | None = None
    """CRC-32 of each tensor's bytes, where they have been computed: by a receiver from what arrived."""

    def __attrs_post_init__(self) -> None:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError(
                f"WeightBucket: {len(self.names)} names, {len(self.dtypes)} dtypes and {len(self.shapes)} shapes; "
                f"first {self.names[:1]}"
            )
        if self._data is None and self.parts is None:
            raise ValueError(f"WeightBucket: neither `data` nor `parts`; first {self.names[:1]}")
        if self._data is not None:
            object.__setattr__(self, "parts", None)  # of other bytes, where `attrs.evolve` gave the data

    @property
    def data(self) -> Tensor:
        """The bytes of all tensors: uint8, one axis, contiguous, no gaps, on any device. Packs `parts` once."""
        if self._data is None:
            import torch

            parts = self.parts
            if parts is None or len(parts) != len(self.names):
                raise ValueError(f"WeightBucket of {self.names[:1]}…: its parts were let go by `taken`")
            pieces = [part.contiguous().view(-1).view(torch.uint8) for part in parts]
            object.__setattr__(self, "_data", torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8))
            object.__setattr__(self, "parts", None)
        assert self._data is not None
        return self._data

    @property
    def num_bytes(self) -> int:
        """Of `data`; packs nothing."""
        return sum(part.nbytes for part in self.parts) if self._data is None and self.parts else self.data.numel()

    def taken(self) -> None:
        """Says that whoever drew the bucket has what it needs of `parts`, which are let go: it need not be packed."""
        if self.parts is not None:
            object.__setattr__(self, "parts", ())


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
    num_sent_bytes: int | None = attrs.field(default=None, eq=False)
    """Of a rank that sends what changed, or of all of them: what travelled. None: the tensors did."""


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
    delta: Mapping[str, Any] | None = None
    """Of a sync whose weights both sides keep: its own `id`, which no other sync has, and as `base` the id of the
    weights whose changes are sent, None where all are. See `rl_core.rank_kit.weight_deltas`. No transport reads it."""


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
