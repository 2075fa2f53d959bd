"""A transport without the attribute that names its receiver, like transports written before this attribute existed.
Also a function that a request must not be able to call.

The receiver can be told to fail in some of a server's workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import attrs
import psutil
import torch

from rl_core.interfaces import Rendezvous, WeightBucket, WeightTransport
from rl_rollout.transports.files import FilesReceiver, FilesSender, FilesTransport
from rl_rollout.vllm import fixes

Fault = Literal["raises in every engine", "raises", "takes other weights", "keeps its old output layer"]
_files = FilesTransport()
_repack_tied_heads_on_cpu = fixes.repack_tied_heads_on_cpu


@attrs.frozen
class OtherTransport(WeightTransport):
    """The `files` transport with another receiver, and without the attribute that names a receiver."""

    name: str = f"{__name__}:other"
    is_staged: bool = True
    fault: Fault | None = None
    """What goes wrong in the last tensor-parallel rank of the last data-parallel engine or, if the value says so, of
    every engine."""

    def open(self, *, num_ranks: int, num_engines: int) -> Rendezvous:
        opened = _files.open(num_ranks=num_ranks, num_engines=num_engines)
        data = {**opened.data, "fault": self.fault}
        return attrs.evolve(opened, transport=self.name, receiver=f"{__name__}:OtherReceiver", data=data)

    def sender(self, rendezvous: Rendezvous, rank: int, world_size: int) -> FilesSender:
        return _files.sender(rendezvous, rank, world_size)

    def close(self, rendezvous: Rendezvous) -> None:
        _files.close(rendezvous)


class OtherReceiver(FilesReceiver):
    """A receiver that no installed transport names."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__(rendezvous)
        fault: Fault | None = rendezvous.data["fault"]
        self._fault = fault if _is_last(of_every_engine=fault == "raises in every engine") else None

    def receive(self, version: int) -> Iterator[WeightBucket]:
        fixes.repack_tied_heads_on_cpu = _repack_tied_heads_on_cpu
        if self._fault in ("raises", "raises in every engine"):
            raise RuntimeError("this worker has no memory left")
        if self._fault == "keeps its old output layer":
            fixes.repack_tied_heads_on_cpu = lambda model: None
        for bucket in super().receive(version):
            if self._fault == "takes other weights":
                bucket = attrs.evolve(bucket, data=torch.zeros_like(bucket.data), checksums=None)
            yield bucket


def _is_last(*, of_every_engine: bool) -> bool:
    """Whether this worker has the last tensor-parallel rank of the last engine or, with `of_every_engine`, of any."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    engine = psutil.Process().parent()
    assert engine is not None
    is_last_rank = get_tensor_model_parallel_rank() == get_tensor_model_parallel_world_size() - 1
    return is_last_rank and (of_every_engine or "EngineCore_DP0" not in " ".join(engine.cmdline()))


def leave_a_trace(rendezvous: Rendezvous) -> Any:
    """Writes a file when called; it is not a receiver."""
    Path(rendezvous.data["trace"]).write_text("called")
    return None


other = OtherTransport()
