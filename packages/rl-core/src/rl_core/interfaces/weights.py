"""Contracts of weight syncs: the records that are sent, and a transport with its senders and receivers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import attrs

if TYPE_CHECKING:
    from torch import Tensor


@attrs.frozen(kw_only=True, eq=False)
class WeightBucket:
    """Parameters that are transferred together, either packed in `data` or as separate tensors in `parts`, which are
    packed when `data` is first read. Buckets of different ranks may contain different parameters."""

    names: tuple[str, ...]
    """Hugging Face parameter names, in the order of `data`."""
    dtypes: tuple[str, ...]
    """torch names without the prefix, e.g. `bfloat16`, one per name."""
    shapes: tuple[tuple[int, ...], ...]
    """Full (unsharded) shapes; a scalar is `()`."""
    _data: Tensor | None = attrs.field(default=None, alias="data")
    """uint8, one axis, contiguous, no gaps, on any device. The constructor's argument is `data`."""
    parts: tuple[Tensor, ...] | None = None
    """The separate tensors; None once they are packed, empty after `taken`. In a bucket from `pack_buckets`, the
    tensors are valid until the next bucket is requested. If `taken` has not been called by then, the bucket is
    packed."""
    checksums: tuple[int, ...] | None = None
    """CRC-32 of each tensor's bytes; None if they have not been computed."""

    def __attrs_post_init__(self) -> None:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError(
                f"WeightBucket: {len(self.names)} names, {len(self.dtypes)} dtypes and {len(self.shapes)} shapes; "
                f"the first name is {self.names[:1]}"
            )
        if self._data is None and self.parts is None:
            raise ValueError(f"WeightBucket: got neither `data` nor `parts`; the first name is {self.names[:1]}")
        if self._data is not None:
            object.__setattr__(self, "parts", None)  # `attrs.evolve` with new data keeps the old parts

    @property
    def data(self) -> Tensor:
        """The bytes of all tensors: uint8, one axis, contiguous, no gaps, on any device. Packs `parts` once."""
        if self._data is None:
            import torch

            parts = self.parts
            if parts is None or len(parts) != len(self.names):
                raise ValueError(
                    f"WeightBucket of {self.names[:1]}…: has {len(parts or ())} parts, expected {len(self.names)}; "
                    "read `data` before `taken` releases the parts"
                )
            pieces = [part.contiguous().view(-1).view(torch.uint8) for part in parts]
            object.__setattr__(self, "_data", torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8))
            object.__setattr__(self, "parts", None)
        assert self._data is not None
        return self._data

    @property
    def num_bytes(self) -> int:
        """Size of `data` in bytes. Reading this does not pack `parts`."""
        return sum(part.nbytes for part in self.parts) if self._data is None and self.parts else self.data.numel()

    def taken(self) -> None:
        """Releases `parts`, so that the bucket is never packed. The consumer calls this method after it has used the
        parts."""
        if self.parts is not None:
            object.__setattr__(self, "parts", ())


@attrs.frozen(kw_only=True)
class TensorRecord:
    """Dtype, shape and checksum of a tensor. They must be the same on the sending and on the receiving side."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int
    """CRC-32 of the tensor's bytes."""


@attrs.frozen(kw_only=True)
class Manifest:
    """The tensors that were sent, or that were received. Equal manifests show that a sync is complete and intact."""

    version: int
    tensors: Mapping[str, TensorRecord]
    num_sent_bytes: int | None = attrs.field(default=None, eq=False)
    """Number of bytes that this manifest's rank or ranks sent, if they sent only changes. None: whole tensors were
    sent."""


@attrs.frozen(kw_only=True)
class Rendezvous:
    """Plain data with which the senders and receivers of one weight sync find each other. The transport creates it on
    the controller."""

    transport: str
    """Entry-point name of the transport, or `package.module:object`."""
    receiver: str
    """`package.module:Class`, loaded in the engine's process."""
    data: Mapping[str, Any]
    """Data for senders and receivers, such as a directory, an address or a group size."""
    adapter: Mapping[str, Any] | None = None
    """`LoraConfig.peft_config`, if the sync sends only a low-rank adapter. Transports do not read it."""
    delta: Mapping[str, Any] | None = None
    """Set if both sides keep the weights, so that later syncs can send only changes; otherwise None. Contains `id`,
    which is unique to this sync; `base`: the id of the sync to whose weights the changes are applied, or None if
    this sync sends whole weights; and `only_trained`: whether neither side keeps weights, and the changes are the
    tensors that are trained. See `rl_core.rank_kit.weight_deltas`. Transports do not read it."""
    is_staged: bool = True
    """The transport's `WeightTransport.is_staged`, set by `publish_weights`. If False, either all engines get the
    version or none does, so a client raises as soon as any engine fails."""


class WeightSender(Protocol):
    """A rank's side of a sync. Authors inherit this class."""

    @abstractmethod
    def send(self, buckets: Iterator[WeightBucket], version: int) -> Manifest:
        """Sends all `buckets`, and returns what this rank sent. Every rank must exhaust its iterator."""
        ...


class WeightReceiver(Protocol):
    """An engine's side of a sync, created as `Class(rendezvous)` in every engine process that holds weights. Authors
    inherit this class."""

    is_staged: bool
    """The same value as `WeightTransport.is_staged`."""

    @abstractmethod
    def receive(self, version: int) -> Iterator[WeightBucket]:
        """Yields every bucket of `version`. The caller may keep the buckets' data. Raises WeightSyncError for another
        version, or for damaged or missing data; the caller then discards all earlier buckets."""
        ...


class WeightTransport(Protocol):
    """Sends weights from ranks to engines (entry-point group `rl_core.weight_transports`). Authors inherit this class;
    methods with a body are optional."""

    name: str
    is_staged: bool
    """True: data can be read until `close`, even by receivers that start late or read again, and after a failed sync an
    engine still has its old version. False: senders and receivers must run at the same time, and after a failed sync an
    engine has no usable weights."""

    @abstractmethod
    def open(self, *, num_ranks: int, num_engines: int) -> Rendezvous:
        """Prepares one sync, and returns what its senders and receivers need. Called on the controller.

        Args:
            num_ranks: number of senders.
            num_engines: minimum number of receivers: one per engine process that holds weights.
        """
        ...

    @abstractmethod
    def sender(self, rendezvous: Rendezvous, rank: int, world_size: int) -> WeightSender:
        """Creates a rank's sender. Called in the rank's process."""
        ...

    @abstractmethod
    def close(self, rendezvous: Rendezvous) -> None:
        """Removes what `open` created, and ends the waits of senders and receivers. Called on the controller, even
        after a failed sync. A second call does nothing."""
        ...

    def validate(self) -> None:
        """Raises ConfigError if this machine cannot open a sync. Called on the controller before a run; starts
        nothing."""

    def validate_nodes(self, num_nodes: int) -> None:
        """Raises ConfigError if the transport does not work when the policy trains on `num_nodes` machines. Called on
        the controller before a run; starts nothing."""

    def of_run(self, run: str) -> WeightTransport:
        """Returns this transport for the run with this name, for example to put the name into names of files."""
        return self
