"""Packs the data of a weight sync into buckets, and checks with manifests that the data arrived completely."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import torch
from torch import Tensor
from zlib_ng import zlib_ng

from rl_core.errors import WeightSyncError
from rl_core.interfaces import Manifest, TensorRecord, WeightBucket

_CHUNK_BYTES = 1 << 17
"""Bytes that are copied and checksummed at a time, while they are in the CPU cache. Doing both in one pass is 1.05
times as fast as two separate passes; with chunks of 1 MiB, it is 0.9 times as fast as two separate passes."""


def pack_buckets(named_tensors: Iterable[tuple[str, Tensor]], max_bucket_bytes: int) -> Iterator[WeightBucket]:
    """Puts tensors into buckets of at most `max_bucket_bytes` (a larger tensor gets a separate bucket).

    Args:
        named_tensors: full tensors, drained lazily: at most one bucket exists at a time. A tensor must not change
            before the caller has drawn the bucket that follows the tensor's bucket.
        max_bucket_bytes: largest size of a bucket's data.
    """
    pending: list[tuple[str, Tensor]] = []
    pending_bytes = 0
    for name, tensor in named_tensors:
        if pending and pending_bytes + tensor.nbytes > max_bucket_bytes:
            yield from _packed_when_left(bucket_of(pending))
            pending, pending_bytes = [], 0
        pending.append((name, tensor.detach()))
        pending_bytes += tensor.nbytes
    if pending:
        yield from _packed_when_left(bucket_of(pending))


def _packed_when_left(bucket: WeightBucket) -> Iterator[WeightBucket]:
    """Yields the bucket. Before the next bucket is drawn, packs this one, so that its data can still be read. If the
    consumer has called `taken`, nothing is left to pack."""
    yield bucket
    if bucket.parts:
        bucket.data  # noqa: B018 - packs


def bucket_of(named_tensors: Sequence[tuple[str, Tensor]]) -> WeightBucket:
    """A bucket of these tensors, not packed yet."""
    return WeightBucket(
        names=tuple(name for name, _ in named_tensors),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in named_tensors),
        shapes=tuple(tuple(tensor.shape) for _, tensor in named_tensors),
        parts=tuple(tensor for _, tensor in named_tensors),
    )


def packed_into(memory: Tensor, bucket: WeightBucket) -> WeightBucket:
    """Packs a bucket into host memory and releases its parts. Returns the packed bucket with checksums, which for
    tensors on the host are computed during the copy.

    Args:
        memory: uint8 [`bucket.num_bytes`], contiguous.
    """
    pieces = _pieces(bucket)
    if any(piece.device != memory.device for piece in pieces):
        memory.copy_(bucket.data)  # packed on the device and copied once: many small copies are slower
        packed = attrs.evolve(bucket, data=memory)
        return attrs.evolve(packed, checksums=tuple(checksum(piece) for piece in _pieces(packed)))
    target, checksums, start = memory.numpy(), [], 0
    for piece in pieces:
        source, crc = piece.numpy(), 0
        for at in range(0, len(source), _CHUNK_BYTES):
            chunk = source[at : at + _CHUNK_BYTES]
            target[start + at : start + at + len(chunk)] = chunk
            crc = zlib_ng.crc32(chunk, crc)
        checksums.append(crc)
        start += len(source)
    packed = attrs.evolve(bucket, data=memory, checksums=tuple(checksums))
    bucket.taken()
    return packed


def _pieces(bucket: WeightBucket) -> list[Tensor]:
    """The bytes of each tensor, without packing."""
    if bucket.parts is not None:
        return [part.contiguous().view(-1).view(torch.uint8) for part in bucket.parts]
    sizes = [
        getattr(torch, dtype).itemsize * torch.Size(shape).numel()
        for dtype, shape in zip(bucket.dtypes, bucket.shapes, strict=True)
    ]
    return list(bucket.data.split(sizes))


def unpack_bucket(bucket: WeightBucket) -> Iterator[tuple[str, Tensor]]:
    """Yields the bucket's tensors with their names, in order. Each is a view if its alignment allows, else a copy.
    Raises WeightSyncError if the data are too short or too long for the tensors."""
    if bucket.parts is not None:
        yield from zip(bucket.names, bucket.parts, strict=True)
        return
    start = 0
    for name, dtype_name, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        dtype: torch.dtype = getattr(torch, dtype_name)
        end = start + dtype.itemsize * torch.Size(shape).numel()
        if end > bucket.data.numel():
            raise WeightSyncError(
                f"{name}: the bucket ends at byte {bucket.data.numel()}, the tensor at {end}; the transfer is cut off"
            )
        data = bucket.data[start:end]
        yield name, (data if start % dtype.itemsize == 0 else data.clone()).view(dtype).view(shape)
        start = end
    if start != bucket.data.numel():
        raise WeightSyncError(f"bucket of {bucket.names[:1]}…: {bucket.data.numel() - start} bytes belong to no tensor")


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes, computed with zlib-ng: the same value as zlib's, about five times as fast."""
    return zlib_ng.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def tensor_record(tensor: Tensor) -> TensorRecord:
    """Shape, dtype and CRC-32 of a tensor's bytes."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorRecord(shape=tuple(tensor.shape), dtype=dtype, checksum=checksum(tensor))


def bucket_records(bucket: WeightBucket) -> dict[str, TensorRecord]:
    """Returns the record of every tensor in a bucket, by name. Sender and receiver must get equal records."""
    if bucket.checksums is None:
        return {name: tensor_record(tensor) for name, tensor in unpack_bucket(bucket)}
    described = zip(bucket.names, bucket.shapes, bucket.dtypes, bucket.checksums, strict=True)
    return {name: TensorRecord(shape=shape, dtype=dtype, checksum=value) for name, shape, dtype, value in described}


def with_checksums(bucket: WeightBucket) -> WeightBucket:
    """The bucket with its tensors' checksums, so that they are computed once."""
    return attrs.evolve(bucket, checksums=tuple(record.checksum for record in bucket_records(bucket).values()))


@contextmanager
def draining(buckets: Iterator[WeightBucket]) -> Iterator[None]:
    """Exhausts `buckets` if the block raises, because the other ranks wait for this one in every gather."""
    try:
        yield
    except Exception:
        for _ in buckets:
            pass
        raise


def merge_manifests(manifests: Iterable[Manifest]) -> Manifest:
    """Merges the manifests of all ranks. Raises WeightSyncError if two ranks sent different data under one name, or
    different versions."""
    tensors: dict[str, TensorRecord] = {}
    versions, sent_bytes = set(), []
    for manifest in manifests:
        if manifest.num_sent_bytes is not None:
            sent_bytes.append(manifest.num_sent_bytes)
        versions.add(manifest.version)
        for name, record in manifest.tensors.items():
            if tensors.setdefault(name, record) != record:
                raise WeightSyncError(f"{name}: two ranks sent different tensors: {tensors[name]} and {record}")
    if len(versions) != 1:
        raise WeightSyncError(f"the ranks sent different versions: {sorted(versions)}")
    return Manifest(version=versions.pop(), tensors=tensors, num_sent_bytes=sum(sent_bytes) if sent_bytes else None)


def require_same(sent: Manifest, received: Manifest) -> None:
    """Raises WeightSyncError if the two manifests differ. The message names the first differences."""
    if sent.version != received.version:
        raise WeightSyncError(f"version {sent.version} was sent, version {received.version} arrived")
    wrong = [
        f"{name}: sent {sent.tensors.get(name, 'nothing')}, arrived {received.tensors.get(name, 'nothing')}"
        for name in sorted(sent.tensors.keys() | received.tensors.keys())
        if sent.tensors.get(name) != received.tensors.get(name)
    ]
    if wrong:
        raise WeightSyncError(f"weight version {sent.version}: {len(wrong)} tensors differ; " + "; ".join(wrong[:3]))


def broken_weights_file(model_directory: str | Path) -> Path | None:
    """The first file of a model directory that cannot be opened, for example because it is truncated or not in
    safetensors format; None if all can be opened."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(Path(model_directory).glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, RuntimeError, SafetensorError):  # torch raises RuntimeError if too many files are open
            return file
    return None
