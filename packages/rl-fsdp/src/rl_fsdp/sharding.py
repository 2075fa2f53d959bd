"""FSDP2: every rank holds a shard of each parameter, its gradient and its optimizer state.

A decoder layer is gathered when it computes and freed afterwards; with `reshard_after_forward=false`, it is freed only
after its backward. The parameters outside the layers (embeddings, last norm, output layer) form one more unit.
Gradients are summed over the ranks, never averaged: loss weights are already relative to the whole mini-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from rl_core.interfaces import WorkerSpec
from rl_fsdp.options import FsdpOptions
from rl_fsdp.shards import TensorShards
from rl_transformers.rank.distributing import decoder_layers, receive, require_same_structure
from rl_transformers.rank.rank_mesh import RankMesh
from rl_transformers.rank.token_scorer import Scorer

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def shard(scorer: Scorer, options: FsdpOptions, ranks: RankMesh, spec: WorkerSpec) -> TensorShards:
    """Shards rank 0's weights over the scorers of all ranks.

    A rank holds its shards and at most one whole unit at a time; rank 0 also holds the model that it loaded.

    Args:
        scorer: on rank 0, loaded on the CPU; on the other ranks, on device `meta`.
        options: how to shard.
        ranks: the ranks over which the weights are sharded.
        spec: the model and how it is trained.
    """
    require_same_structure(scorer)
    settings: dict[str, Any] = {
        "mesh": shard_mesh(ranks, options),
        "mp_policy": _mixed_precision(options, bf16=spec.bf16),
        "offload_policy": _offload(options),
    }
    done: set[nn.Module] = set()
    for unit in (*decoder_layers(scorer), scorer):
        receive(unit, ranks, leave_out=done)
        done.update(unit.modules())
        # The scorer's own unit is always freed after the forward pass, although a backward pass needs it again at once.
        # Otherwise it would stay gathered after scoring, which has no backward pass.
        fully_shard(unit, reshard_after_forward=options.reshard_after_forward or unit is scorer, **settings)
        assert isinstance(unit, FSDPModule)
        # Without forced sums FSDP asks gloo for a pre-multiplied sum (by 1), which gloo does not support.
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)
        # Only some ranks may have used an expert. The method is new in torch 2.13.
        if hasattr(unit, "set_reduce_scatter_unused_params"):
            unit.set_reduce_scatter_unused_params(True)
    return TensorShards(scorer, spec)


def shard_mesh(ranks: RankMesh, options: FsdpOptions) -> DeviceMesh:
    """Returns the mesh over which parameters are sharded; with several copies, it has two axes (copies, shards)."""
    num_ranks = ranks.mesh.world_size
    size = num_ranks if options.fsdp_size == -1 else options.fsdp_size
    num_copies = num_ranks // size
    shape, names = ((num_copies, size), ("copies", "shards")) if num_copies > 1 else ((size,), ("shards",))
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=names)


def _mixed_precision(options: FsdpOptions, *, bf16: bool) -> MixedPrecisionPolicy:
    if not bf16:
        return MixedPrecisionPolicy()
    given = options.mixed_precision
    return MixedPrecisionPolicy(param_dtype=DTYPES[given.param_dtype], reduce_dtype=DTYPES[given.reduce_dtype])


def _offload(options: FsdpOptions) -> OffloadPolicy:
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if options.cpu_offload else OffloadPolicy()
