"""An FSDP backend and a weight transport that run out of disk space."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

from rl_core.errors import WeightSyncError
from rl_core.interfaces import Manifest, RankInfo, Rendezvous, WeightBucket, WeightTransport, Worker, WorkerSpec
from rl_fsdp.backend import FsdpBackend


@attrs.frozen(kw_only=True)
class FullDiskFsdp(FsdpBackend):
    """`FsdpBackend` whose first rank can write neither model weights nor a state's list of files if the path has a
    directory named `full`."""

    name: str = "full_disk_fsdp"

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        from rl_core.rank_kit import model_files
        from rl_transformers.rank import state

        if rank.rank == 0:
            for module, name in ((model_files, "save_file"), (state, "write_state_list")):
                setattr(module, name, _fails_if_full(getattr(module, name)))
        return super().create_worker(spec, rank)


def _fails_if_full(write: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        if any(isinstance(arg, Path) and "full" in arg.parts for arg in args):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*args, **named)

    return call


class FullTransport(WeightTransport):
    """A weight transport that is out of disk space at the first bucket of version 1. It discards other versions."""

    name = f"{__name__}:transport"
    is_staged = True

    def open(self, *, num_ranks: int, num_engines: int) -> Rendezvous:
        return Rendezvous(transport=self.name, receiver="", data={})

    def sender(self, rendezvous: Rendezvous, rank: int, world_size: int) -> FullTransport:
        return self

    def send(self, buckets: Iterator[WeightBucket], version: int) -> Manifest:
        from rl_core.rank_kit.weight_buckets import draining

        with draining(buckets):
            for _ in buckets:
                if version == 1:
                    raise WeightSyncError("no space")
        return Manifest(version=version, tensors={})

    def close(self, rendezvous: Rendezvous) -> None:
        pass


transport = FullTransport()
full_disk_fsdp = FullDiskFsdp()
