"""Weights: what ranks send to engines, what must arrive, and the two ends of a transport."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    from torch import Tensor


@attrs.frozen(kw_only=True, eq=False)
class WeightBucket:
    """Parameters of one transfer: packed in `data`, or as `parts`, which are packed on first use. Each rank describes
    its own; layouts may differ between ranks."""

    names: tuple[str, ...]
    """Hugging Face parameter names, in the order of `data`."""
    dtypes: tuple[str, ...]
    """torch names without the prefix, e.g. `bfloat16`, one per name."""
    shapes: tuple[tuple[int, ...], ...]
    """Full (unsharded) shapes; a scalar is `()`."""
    _data: Tensor | None = attrs.field(default=None, alias="data")
    """uint8, one axis, contiguous, no gaps, on any device. The constructor's argument is `data`."""
    parts: tuple[Tensor, ...] | None = None
    """The tensors until they are packed, then None. In a bucket of `pack_buckets` they are valid until the next bucket
    is drawn; before that, this bucket is packed unless `taken` was called."""
    checksums: tuple[int, ...] | None = None
    """CRC-32 of each tensor's bytes, if a receiver has computed them."""

    def __attrs_post_init__(self) -> None:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError(
                f"WeightBucket: {len(self.names)} names, {len(self.dtypes)} dtypes and {len(self.shapes)} shapes; "
                f"first {self.names[:1]}"
            )
        if self._data is None and self.parts is None:
            raise ValueError(f"WeightBucket: neither `data` nor `parts`; first {self.names[:1]}")
        if self._data is not None:
            object.__setattr__(self, "parts", None)  # after `attrs.evolve` with new data, the old parts do not match it

    @property
    def data(self) -> Tensor:
        """The bytes of all tensors: uint8, one axis, contiguous, no gaps, on any device. Packs `parts` once."""
        if self._data is None:
            import torch

            parts = self.parts
            if parts is None or len(parts) != len(self.names):
                raise ValueError(f"WeightBucket of {self.names[:1]}…: its parts were released by `taken`")
            pieces = [part.contiguous().view(-1).view(torch.uint8) for part in parts]
            object.__setattr__(self, "_data", torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8))
            object.__setattr__(self, "parts", None)
        assert self._data is not None
        return self._data

    @property
    def num_bytes(self) -> int:
        """Size of `data`. Does not pack."""
        return sum(part.nbytes for part in self.parts) if self._data is None and self.parts else self.data.numel()

    def taken(self) -> None:
        """The consumer calls this when it has used `parts`. They are released, and the bucket is never packed."""
        if self.parts is not None:
            object.__setattr__(self, "parts", ())


@attrs.frozen(kw_only=True)
class TensorRecord:
    """Dtype, shape and checksum that a tensor must have on both sides."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int
    """CRC-32 of the tensor's bytes."""


@attrs.frozen(kw_only=True)
class Manifest:
    """The tensors that were sent, or that arrived. The two manifests are equal if the sync is complete and intact."""

    version: int
    tensors: Mapping[str, TensorRecord]
    num_sent_bytes: int | None = attrs.field(default=None, eq=False)
    """If only changes were sent: the bytes that this manifest's rank or ranks sent. None: whole tensors were sent."""


@attrs.frozen(kw_only=True)
class Rendezvous:
    """How sender and receiver of one weight sync find each other. Plain data that the transport creates on the
    controller."""

    transport: str
    """Entry-point name of the transport."""
    receiver: str
    """`package.module:Class`, loaded in the engine's process."""
    data: Mapping[str, Any]
    """Data for sender and receiver: a directory, an address, a group size."""
    adapter: Mapping[str, Any] | None = None
    """`LoraConfig.peft_config`, if the sync sends only a low-rank adapter. Transports do not read it."""
    delta: Mapping[str, Any] | None = None
    """For syncs whose weights both sides keep: the unique `id` of this sync, and `base`, the id of the sync whose
    weights the changes apply to (None if this sync sends whole weights). See `rl_core.rank_kit.weight_deltas`.
    Transports do not read it."""
    is_staged: bool = True
    """As `WeightTransport.is_staged`; `publish_weights` fills it in. If False, no engine gets the version without the
    other engines, and a client raises as soon as one of them fails."""


class WeightSender(Protocol):
    """A rank's end of a sync."""

    def send(self, buckets: Iterator[WeightBucket], version: int) -> Manifest:
        """Exhausts `buckets` on every rank and returns what this rank sent."""
        ...


class WeightReceiver(Protocol):
    """An engine's end of a sync, created as `Class(rendezvous)` in every engine process that holds weights."""

    @property
    def is_staged(self) -> bool:
        """As `WeightTransport.is_staged`."""
        ...

    def receive(self, version: int) -> Iterator[WeightBucket]:
        """Yields every bucket of `version`. The caller may keep their data. Raises WeightSyncError for another version,
        damaged or missing data; the caller then discards the buckets yielded before."""
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
        """True: data can be read until `close`, also by receivers that come late or repeat, and a failed sync leaves
        an engine with its old version. False: both ends work at the same time, and a failed sync leaves an engine
        without usable weights."""
        ...

    def open(self, *, num_ranks: int, num_engines: int) -> Rendezvous:
        """On the controller, once per sync.

        Args:
            num_ranks: number of senders.
            num_engines: least number of receivers; each process of an engine counts.
        """
        ...

    def sender(self, rendezvous: Rendezvous, rank: int, world_size: int) -> WeightSender:
        """Called in each rank."""
        ...

    def close(self, rendezvous: Rendezvous) -> None:
        """Called on the controller, also after a failed sync. Removes what `open` created and ends the waits of both
        sides. A second call does nothing."""
        ...


@runtime_checkable
class CheckingTransport(Protocol):
    """A transport that does not work on every machine."""

    def validate(self) -> None:
        """Called on the controller before a run; starts nothing. Raises ConfigError if no sync could be opened."""
        ...


@runtime_checkable
class NodeCheckingTransport(Protocol):
    """A transport that may not work between machines."""

    def validate_nodes(self, num_nodes: int) -> None:
        """Called on the controller before a run whose policy trains on this many machines; starts nothing. Raises
        ConfigError if weights could not get from one machine to another."""
        ...


@runtime_checkable
class RunTransport(Protocol):
    """A transport that writes files, whose names include the run's name."""

    def of_run(self, run: str) -> WeightTransport:
        """Returns this transport for the run of that name."""
        ...
