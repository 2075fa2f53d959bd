"""Sends a rank's weights in a weight sync, for any backend: whole weights or only the adapter, packed on rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

from torch import Tensor

from rl_core.interfaces import Manifest, WeightBucket, WeightSender, WorkerSpec
from rl_core.rank_kit.weight_buckets import pack_buckets

T = TypeVar("T")


class Exporting(Protocol):
    """A worker that can export its weights, and separately the adapter of a LoRA policy."""

    spec: WorkerSpec

    def export_weights(self, max_bucket_bytes: int, *, only_trained: bool = False) -> Iterator[WeightBucket]:
        """See `Worker.export_weights`."""
        ...

    def export_adapter(self, max_bucket_bytes: int) -> Iterator[WeightBucket]:
        """Yields the adapter's tensors under peft's names."""
        ...


def publish(
    worker: Exporting, sender: WeightSender, version: int, max_bucket_bytes: int, *, only_trained: bool
) -> Manifest:
    """Implements `Worker.publish` for an `Exporting` worker."""
    if worker.spec.model.lora.is_sent_alone:
        return sender.send(worker.export_adapter(max_bucket_bytes), version)
    return sender.send(worker.export_weights(max_bucket_bytes, only_trained=only_trained), version)


def pack_on_first(
    tensors: Iterator[tuple[str, Tensor]], max_bucket_bytes: int, *, is_first: bool
) -> Iterator[WeightBucket]:
    """Yields buckets of whole tensors on rank 0, and nothing on other ranks: see `on_first`."""
    return pack_buckets(on_first(tensors, is_first=is_first), max_bucket_bytes)


def on_first(gathered: Iterator[T], *, is_first: bool) -> Iterator[T]:
    """Yields from `gathered` on rank 0. Other ranks only exhaust it, because advancing it is collective."""
    for item in gathered:
        if is_first:
            yield item
