"""FSDP2: every rank holds a shard of each parameter, its gradient and its optimizer state.

A decoder layer is gathered when it computes and let go afterwards; what stands outside the layers (embeddings, last
norm, output layer) belongs to the scorer as a whole. Gradients are summed over the ranks, never averaged: a loss weight
already speaks of the whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from rl_core.errors import ConfigError
from rl_core.rank_kit.process_group import agree, from_first
from rl_fsdp.model import Scorer
from rl_fsdp.options import FsdpOptions
from rl_fsdp.rank_mesh import RankMesh
from rl_fsdp.shards import TensorShards

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def shard(scorer: Scorer, options: FsdpOptions, ranks: RankMesh, *, bf16: bool) -> TensorShards:
    """Makes every rank's scorer hold rank 0's weights, sharded. One unit exists whole at a time besides the shards.

    Args:
        scorer: on rank 0 loaded, on the CPU; on the others without memory (device `meta`).
        options: how to shard.
        ranks: over whom.
        bf16: the computation runs in bfloat16.
    """
    require_same_structure(scorer)
    settings: dict[str, Any] = {
        "mesh": ranks.shards,
        "mp_policy": _mixed_precision(options, bf16=bf16),
        "offload_policy": _offload(options),
    }
    done: set[nn.Module] = set()
    for unit in (*decoder_layers(scorer), scorer):
        receive(unit, ranks, leave_out=done)
        done.update(unit.modules())
        # The whole is needed again at once, by backward, but after scoring alone it must not stay.
        fully_shard(unit, reshard_after_forward=options.reshard_after_forward or unit is scorer, **settings)
        assert isinstance(unit, FSDPModule)
        # Without forced sums gloo is asked for a product with 1 in front of the sum, which it does not have.
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)
        if hasattr(unit, "set_reduce_scatter_unused_params"):  # torch 2.13: an expert that only one rank used
            unit.set_reduce_scatter_unused_params(True)
    return TensorShards(scorer)


def decoder_layers(scorer: nn.Module) -> list[nn.Module]:
    """Decoder layers, in order."""
    return [module for module in scorer.modules() if isinstance(module, GradientCheckpointingLayer)]


def receive(unit: nn.Module, ranks: RankMesh, *, leave_out: Container[nn.Module]) -> None:
    """Puts rank 0's parameters and buffers of `unit` on this rank's device; tied ones stay tied.

    Args:
        unit: a module.
        ranks: all take part.
        leave_out: modules inside that have theirs.
    """
    slots: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in (module for module in unit.modules() if module not in leave_out):
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    slots.setdefault(id(tensor), []).append((tensors, name))
    for places in slots.values():
        tensors, name = places[0]
        new = _from_first(tensors[name], ranks)
        for tensors, name in places:
            tensors[name] = new


def _from_first(tensor: Tensor, ranks: RankMesh) -> Tensor:
    data = tensor.detach().to(ranks.device) if ranks.is_first else torch.empty_like(tensor, device=ranks.device)
    data = data.contiguous()
    dist.broadcast(data, 0)
    return nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


def require_same_structure(scorer: nn.Module) -> None:
    """The others built the model from its configuration alone: it must be what rank 0 read, and in separate units."""

    def describe() -> list[tuple[str, tuple[int, ...], str]]:
        named = [*scorer.named_parameters(), *scorer.named_buffers()]
        return [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named]

    def compare() -> None:
        differing = [f"{a} and {b}" for a, b in zip(loaded, describe(), strict=False) if a != b]
        if differing or len(loaded) != len(describe()):
            raise ConfigError(
                f"the model as it was loaded is not the one its configuration describes: {'; '.join(differing[:3])}"
            )
        _require_separate_units(scorer)

    loaded = from_first(describe)
    agree(compare)


def _require_separate_units(scorer: nn.Module) -> None:
    layers = decoder_layers(scorer)
    layer_of = {module: i for i, layer in enumerate(layers) for module in layer.modules()}
    owner: dict[nn.Parameter, int] = {}
    for module in scorer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            layer = layer_of.get(module, -1)
            if owner.setdefault(parameter, layer) != layer:
                raise ConfigError(
                    f"{name} of a {type(module).__name__} is shared between layers; this backend cannot shard it: "
                    "train on one rank"
                )


def _mixed_precision(options: FsdpOptions, *, bf16: bool) -> MixedPrecisionPolicy:
    if not bf16:
        return MixedPrecisionPolicy()
    given = options.mixed_precision
    return MixedPrecisionPolicy(param_dtype=DTYPES[given.param_dtype], reduce_dtype=DTYPES[given.reduce_dtype])


def _offload(options: FsdpOptions) -> OffloadPolicy:
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if options.cpu_offload else OffloadPolicy()
