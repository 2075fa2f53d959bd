"""What a rank sends in a weight sync, whatever its backend: whole weights or the adapter alone, packed on rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

from torch import Tensor

from rl_core.interfaces import Manifest, WeightBucket, WeightSender, WorkerSpec
from rl_core.rank_kit.weight_buckets import pack_buckets

T = TypeVar("T")


class Exporting(Protocol):
    """A worker that hands out its weights, and the adapter of a LoRA policy alone."""

    spec: WorkerSpec

    def export_weights(self, max_bucket_bytes: int) -> Iterator[WeightBucket]:
        """See `Worker.export_weights`."""
        ...

    def export_adapter(self, max_bucket_bytes: int) -> Iterator[WeightBucket]:
        """The adapter's tensors under peft's names."""
        ...


def publish(worker: Exporting, sender: WeightSender, version: int, max_bucket_bytes: int) -> Manifest:
    """`Worker.publish` of a backend that can export both."""
    export = worker.export_adapter if worker.spec.model.lora.is_sent_alone else worker.export_weights
    return sender.send(export(max_bucket_bytes), version)


def pack_on_first(
    tensors: Iterator[tuple[str, Tensor]], max_bucket_bytes: int, *, is_first: bool
) -> Iterator[WeightBucket]:
    """Buckets of whole tensors on rank 0; on the others none: see `on_first`."""
    return pack_buckets(on_first(tensors, is_first=is_first), max_bucket_bytes)


def on_first(gathered: Iterator[T], *, is_first: bool) -> Iterator[T]:
    """`gathered` on rank 0. The others yield nothing, and take part: all ranks gather each of these together."""
    for item in gathered:
        if is_first:
            yield item
