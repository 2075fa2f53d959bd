"""From nothing to a rank's place in the mesh: platform, fixes, process groups, seeds."""

from __future__ import annotations

from datetime import timedelta

import attrs
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]  a rank alone meets nobody

from rl_core.interfaces import RankInfo
from rl_core.layout.mesh import Coordinates, Mesh
from rl_megatron import fixes_bridge, fixes_megatron, platform

_TIMEOUT = timedelta(minutes=30)
"""The controller's deadline ends a call sooner, and kills the ranks; this one ends ranks whose controller is gone."""


@attrs.frozen(kw_only=True)
class Place:
    """Where this rank stands."""

    rank: int
    mesh: Mesh
    device: torch.device

    @property
    def coordinates(self) -> Coordinates:
        """On each axis."""
        return self.mesh.coordinates(self.rank)

    @property
    def returns_results(self) -> bool:
        """The controller reads this rank's scores."""
        return self.mesh.returns_results(self.rank)


_is_prepared = False


def prepare_process() -> torch.device:
    """Makes Megatron and Bridge run on this machine, once; returns the device. Must run in the thread that computes."""
    global _is_prepared
    has_gpu = torch.cuda.is_available()
    if not _is_prepared:
        fixes_megatron.apply()
        if not has_gpu:
            platform.install_cpu()
        fixes_bridge.apply()
        _is_prepared = True
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")


def join(info: RankInfo, mesh: Mesh, seed: int) -> Place:
    """Waits for all ranks and makes Megatron's process groups.

    Args:
        info: where they meet.
        mesh: how they are arranged.
        seed: of what is random (nothing is, unless a pass-through section asks for dropout).
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(info.local_rank % torch.cuda.device_count())
    device = prepare_process()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://{info.master_address}:{info.master_port}" if info.world_size > 1 else None,
        store=HashStore() if info.world_size == 1 else None,
        rank=info.rank,
        world_size=info.world_size,
        timeout=_TIMEOUT,
    )
    parallel_state.initialize_model_parallel(
        mesh.tensor,
        mesh.pipeline,
        virtual_pipeline_model_parallel_size=mesh.virtual_pipeline if mesh.virtual_pipeline > 1 else None,
        context_parallel_size=mesh.context,
        expert_model_parallel_size=mesh.expert,
        expert_tensor_parallel_size=mesh.expert_tensor,
        distributed_timeout_minutes=int(_TIMEOUT.total_seconds() // 60),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return Place(rank=info.rank, mesh=mesh, device=device)


def leave() -> None:
    """Ends this rank's part of all process groups."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
