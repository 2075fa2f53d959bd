"""Starts a rank: applies fixes, joins the process groups, sets the seed, and determines its place in the mesh."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from rl_core.interfaces import RankInfo
from rl_core.layout.mesh import Mesh
from rl_core.rank_kit.process_group import COLLECTIVE_TIMEOUT, join_process_group, own_device
from rl_megatron.patches import fixes_bridge, fixes_megatron, platform
from rl_megatron.place import Place

_is_prepared = False


def prepare_process() -> torch.device:
    """Fixes Megatron and Bridge and, without a GPU, makes them run on the CPU; returns the device.

    Only the first call in a process changes anything. It must run in the thread that computes.
    """
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
        info: this rank's number and the address where the ranks meet.
        mesh: how the ranks are arranged in groups.
        seed: random seed of the adapters' initial values, which no checkpoint contains.
    """
    device = own_device(info)
    prepare_process()
    join_process_group(info, device)
    parallel_state.initialize_model_parallel(
        mesh.tensor,
        mesh.pipeline,
        virtual_pipeline_model_parallel_size=mesh.virtual_pipeline if mesh.virtual_pipeline > 1 else None,
        context_parallel_size=mesh.context,
        expert_model_parallel_size=mesh.expert,
        expert_tensor_parallel_size=mesh.expert_tensor,
        distributed_timeout_minutes=int(COLLECTIVE_TIMEOUT.total_seconds() // 60),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return Place(rank=info.rank, mesh=mesh, device=device)


def leave() -> None:
    """Leaves all process groups."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
