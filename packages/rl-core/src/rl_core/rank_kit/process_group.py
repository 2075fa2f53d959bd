"""The process group of one model's ranks: joining it, and agreeing on one outcome."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from rl_core.errors import RLError, WorkerError
from rl_core.interfaces import RankInfo

T = TypeVar("T")
JOINS_OPEN_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
"""Environment variables of ranks that meet at the store of `open_store`."""
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""The controller usually stops hanging ranks much earlier (`trainer.worker_silence_s`). This timeout ends ranks whose
controller has died."""


def own_device(rank: RankInfo) -> torch.device:
    """Returns this rank's GPU and makes it the current device; without GPUs, returns the CPU. A rank that sees only one
    GPU uses it."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", rank.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def open_store() -> TCPStore:
    """Opens the store at which the ranks of a group meet, on a free port (its attribute `port`). The store closes when
    the returned object is deleted.

    Ranks join the store as clients if their environment contains `JOINS_OPEN_STORE`, as with torchrun. Otherwise, rank
    0 would open a store on a port that another process may have taken since the port was chosen.
    """
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def join_process_group(rank: RankInfo, device: torch.device) -> None:
    """Creates the default process group; returns when all ranks have joined.

    Raises:
        WorkerError: this process already has a process group, which belongs to another model.
    """
    if dist.is_initialized():
        raise WorkerError(
            f"rank {rank.rank} of {rank.world_size}: this process already has a process group. All single-rank "
            "models of a run share the controller's process: return True from the backend's needs_own_process, or let "
            "a single rank use the existing group (torch.distributed.is_initialized) or none"
        )
    is_alone = rank.world_size == 1
    dist.init_process_group(
        # gloo is for CPU tensors: offloaded parameters, checkpoints, messages.
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=None if is_alone else f"tcp://{rank.master_address}:{rank.master_port}",
        store=HashStore() if is_alone else None,
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def new_cpu_group() -> dist.ProcessGroup:
    """Creates another process group of all ranks, for CPU tensors. Collective."""
    group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _runs_alone() -> bool:
    """Whether there is no process group, or this is a rehearsal of one rank without the others
    (`rl_transformers.rank.rehearsal`)."""
    return not dist.is_initialized() or dist.get_backend() == "fake"


def from_first(make: Callable[[], T]) -> T:
    """Calls `make` on rank 0 and returns its result on all ranks. If rank 0 raises an RLError, all ranks raise it.
    Without a process group, and in a rehearsal, calls `make` on this rank."""
    if _runs_alone():
        return make()
    made: list[tuple[T | None, RLError | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            made = [(make(), None)]
        except RLError as error:
            made = [(None, error)]
    dist.broadcast_object_list(made, src=0, device=torch.device("cpu"))
    value, error = made[0]
    if error is not None:
        raise error
    return value  # pyright: ignore[reportReturnType]


def agree(act: Callable[[], T]) -> T:
    """Calls `act` on every rank and returns this rank's result. If any rank raises an RLError, all ranks raise the
    error of the lowest failing rank. Without a process group, and in a rehearsal, only calls `act` on this rank."""
    if _runs_alone():
        return act()
    result, error = None, None
    try:
        result = act()
    except RLError as raised:
        error = raised
    errors: list[RLError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    first = next((error for error in errors if error is not None), None)
    if first is not None:
        raise first from error
    return result  # pyright: ignore[reportReturnType]
