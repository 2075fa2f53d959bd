"""The two ends of a delta sync, which sends only changes relative to weights that both sides hold (`Rendezvous.delta`).

A delta sync works with any transport, because it sends buckets. A rank keeps the weights that it sent last. An engine
keeps the weights that it received, each tensor in separate host memory, applies the changes to copies, and loads the
whole result like any version. The manifests of both sides describe the result. Before an engine loads tensors to
which it applied changes, it compares their checksums with the rank's, and ends the sync with an error if one differs.
Held weights are identified by the unique id of their sync, because the same version number may be sent twice with
different weights.

Layout: a bucket of changes begins with a JSON table with one row per tensor. A row says how its tensor is sent: whole,
as `Changes`, or not at all if it is unchanged. The data follows in the order of the rows.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from rl_core.errors import WeightSyncError
from rl_core.interfaces import Manifest, TensorRecord, WeightBucket, WeightReceiver, WeightSender
from rl_core.rank_kit.host_memory import fresh_memory
from rl_core.rank_kit.weight_buckets import bucket_of, draining, tensor_record, unpack_bucket
from rl_core.rank_kit.weight_changes import Changes, apply_changes, take_changes

_TABLE = "delta/table/"
_WHOLE = -1
"""Value of `_Row.width` for a tensor that is sent whole."""


@attrs.define(eq=False)
class HeldWeights:
    """The weights of one side's last sync, which are the base of the next sync. Only one sync at a time uses them."""

    id: str | None = None
    """Id of the sync that sent the weights; None: they cannot be a base."""
    tensors: dict[str, Tensor] = attrs.field(factory=dict)
    """Tensors by name, contiguous, on the host."""

    def drop(self) -> None:
        """Releases all weights. The next sync must send whole weights."""
        self.id, self.tensors = None, {}

    def require(self, base: str, who: str) -> None:
        """Raises WeightSyncError unless these are the weights of sync `base`."""
        if self.id != base:
            raise WeightSyncError(f"got changes relative to weights {base}, but {who} holds {self.id or 'none'}")


def has_only_trained(delta: Mapping[str, Any] | None) -> bool:
    """Whether a sync sends only the tensors that are trained; the engine keeps its others. `delta`:
    `Rendezvous.delta`."""
    return delta is not None and bool(delta.get("only_trained")) and delta["base"] is not None


class DeltaSender(WeightSender):
    """The rank's end of a delta sync. Wraps another sender and sends whole weights, or only changes if `delta` has a
    base."""

    def __init__(self, sender: WeightSender, delta: Mapping[str, Any], held: HeldWeights) -> None:
        """
        Args:
            sender: the sender of any transport.
            delta: `Rendezvous.delta`.
            held: the weights that this rank sent last; updated by `send`, and empty after an error.
        """
        self._sender = sender
        self._delta = delta
        self._held = held
        self._num_bytes = 0

    def send(self, buckets: Iterator[WeightBucket], version: int) -> Manifest:
        """See `WeightSender.send`. The manifest describes the whole weights. Raises WeightSyncError if this rank does
        not hold the base."""
        records: dict[str, TensorRecord] = {}
        try:
            with draining(buckets):
                if self._delta["base"] is None:
                    self._held.drop()
                    outgoing = self._kept(buckets, records)
                else:
                    self._held.require(self._delta["base"], "this rank")
                    outgoing = self._changed(buckets, records)
                self._held.id = None
                self._sender.send(self._counted(outgoing), version)
        except BaseException:
            self._held.drop()
            raise
        for gone in self._held.tensors.keys() - records.keys():
            del self._held.tensors[gone]
        self._held.id = self._delta["id"]
        return Manifest(version=version, tensors=records, num_sent_bytes=self._num_bytes)

    def _counted(self, buckets: Iterator[WeightBucket]) -> Iterator[WeightBucket]:
        for bucket in buckets:
            self._num_bytes += bucket.num_bytes
            yield bucket

    def _kept(self, buckets: Iterator[WeightBucket], records: dict[str, TensorRecord]) -> Iterator[WeightBucket]:
        """Yields the buckets unchanged, and keeps copies of their tensors."""
        for bucket in buckets:
            for name, tensor in unpack_bucket(bucket):
                self._held.tensors[name] = _copied(tensor)
                records[name] = tensor_record(self._held.tensors[name])
            yield bucket

    def _changed(self, buckets: Iterator[WeightBucket], records: dict[str, TensorRecord]) -> Iterator[WeightBucket]:
        """Yields one bucket for each of `buckets`, with only the changes, on the weights' device, as `cuda_ipc`
        requires."""
        for i, bucket in enumerate(buckets):
            rows, sent, device = [], [], torch.device("cpu")
            for name, tensor in unpack_bucket(bucket):
                device = tensor.device
                new = tensor.detach().cpu().contiguous()
                records[name] = tensor_record(new)
                changes = self._taken(name, new)
                rows.append(_row(name, records[name], changes))
                if changes is None:
                    sent.append((name, tensor.detach()))
                elif changes.count:
                    sent.append((f"{name}/changes", changes.data))
            table = torch.frombuffer(bytearray(json.dumps(rows).encode()), dtype=torch.uint8)
            yield bucket_of([(name, part.to(device)) for name, part in [(f"{_TABLE}{i}", table), *sent]])
            bucket.taken()

    def _taken(self, name: str, new: Tensor) -> Changes | None:
        """The changes of a tensor; None if it is sent whole. Updates the held weights."""
        held = self._held.tensors.get(name)
        is_alike = held is not None and (held.shape, held.dtype) == (new.shape, new.dtype)
        changes = take_changes(held, new) if held is not None and is_alike else None
        if changes is None:
            self._held.tensors[name] = _copied(new)
        return changes


def received(
    receiver: WeightReceiver, version: int, delta: Mapping[str, Any] | None, held: HeldWeights
) -> Generator[WeightBucket, None, None]:
    """The engine's end of a delta sync. Yields the buckets of `receiver.receive` with every tensor whole. If changes
    are received, each resulting tensor is compared with the rank's checksum, and its memory is not modified afterwards.

    Args:
        receiver: the receiver of any transport.
        version: the expected version.
        delta: `Rendezvous.delta`.
        held: the weights that this engine received last. They are updated when the caller has taken all buckets, and
            dropped if `delta` is None or an error occurs.

    Raises:
        WeightSyncError: `receiver` raised it; or the engine does not hold the base; or a tensor, with its changes
            applied, differs from the rank's; or tables and data are incomplete or do not fit each other.
    """
    arriving = receiver.receive(version)
    base, held.tensors = dict(held.tensors), {}
    held_id, held.id = held.id, None
    try:
        if delta is None:
            yield from arriving
            return
        if delta.get("only_trained"):
            if delta["base"] is not None:
                _require_base(HeldWeights(held_id), delta["base"], arriving)
            yield from arriving
        elif delta["base"] is None:
            for bucket in arriving:
                held.tensors |= {name: _copied(tensor) for name, tensor in unpack_bucket(bucket)}
                yield bucket
        else:
            _require_base(HeldWeights(held_id, base), delta["base"], arriving)
            for bucket in arriving:
                whole = _with_changes(bucket, base)
                held.tensors |= dict(unpack_bucket(whole))
                yield whole
            if base:
                raise WeightSyncError(f"changes of {len(base)} tensors did not arrive, first {sorted(base)[:3]}")
        held.id = delta["id"]
    finally:
        if isinstance(arriving, Generator):
            arriving.close()
        if held.id is None:
            held.drop()


def _require_base(held: HeldWeights, base: str, arriving: Iterator[WeightBucket]) -> None:
    """Raises WeightSyncError if `held` is not the base. Exhausts `arriving` first, because with some transports the
    other engines' buckets wait for this engine."""
    try:
        held.require(base, "this engine")
    except WeightSyncError:
        for _ in arriving:
            pass
        raise


def _with_changes(bucket: WeightBucket, base: dict[str, Tensor]) -> WeightBucket:
    """Returns a bucket of whole tensors for a bucket from `DeltaSender._changed`. Removes its tensors from `base`."""
    sent = {name: tensor.cpu() for name, tensor in unpack_bucket(bucket)}  # some transports deliver on the GPU
    tables = [name for name in bucket.names if name.startswith(_TABLE)]
    if len(tables) != 1 or bucket.names[0] != tables[0]:
        raise WeightSyncError(f"got a bucket of changes that begins with {bucket.names[:1]}; expected its table first")
    rows = [_Row(*row) for row in json.loads(bytes(sent.pop(tables[0]).numpy()))]
    whole, records = [], []
    for row in rows:
        before = base.pop(row.name, None)
        tensor = _made(row, before, sent)
        record = tensor_record(tensor)
        if record != row.record:
            raise WeightSyncError(f"{row.name}: got {record} after its changes, but the rank has {row.record}")
        whole.append((row.name, tensor))
        records.append(record)
    if sent:
        raise WeightSyncError(f"got {len(sent)} tensors that no table names: {sorted(sent)[:3]}")
    return attrs.evolve(bucket_of(whole), checksums=tuple(record.checksum for record in records))


def _made(row: _Row, before: Tensor | None, sent: dict[str, Tensor]) -> Tensor:
    name = row.name if row.width == _WHOLE else f"{row.name}/changes"
    if (row.width == _WHOLE or row.count) and name not in sent:
        raise WeightSyncError(f"{name} is named in a table but did not arrive")
    if row.width == _WHOLE:
        return _copied(sent.pop(name))
    if before is None:
        raise WeightSyncError(f"got changes of {row.name}, which the weights of the previous sync do not contain")
    if not row.count:
        return before
    tensor = _copied(before)
    apply_changes(tensor, Changes(data=sent.pop(name), count=row.count, width=row.width))
    return tensor


@attrs.frozen
class _Row:
    """A row of a bucket's table."""

    name: str
    shape: list[int]
    dtype: str
    checksum: int
    """Checksum of the new tensor."""
    count: int
    width: int
    """`count` and `width` are as in `Changes`; a width of `_WHOLE` means that the tensor is sent whole."""

    @property
    def record(self) -> TensorRecord:
        return TensorRecord(shape=tuple(self.shape), dtype=self.dtype, checksum=self.checksum)


def _row(name: str, record: TensorRecord, changes: Changes | None) -> list[Any]:
    count, width = (0, _WHOLE) if changes is None else (changes.count, changes.width)
    return [name, list(record.shape), record.dtype, record.checksum, count, width]


def _copied(tensor: Tensor) -> Tensor:
    """A copy of the tensor in newly allocated host memory."""
    copy = fresh_memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor.detach())
