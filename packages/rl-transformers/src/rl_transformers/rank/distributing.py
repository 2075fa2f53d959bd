"""Broadcasts rank 0's weights one unit at a time: a decoder layer, or everything outside the layers."""

from __future__ import annotations

from collections.abc import Container
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rl_core.errors import ConfigError
from rl_core.rank_kit.process_group import agree, from_first
from rl_transformers.rank.rank_mesh import RankMesh


def decoder_layers(scorer: nn.Module) -> list[nn.Module]:
    """The decoder layers of the scorer's model, from first to last."""
    return [module for module in scorer.modules() if isinstance(module, GradientCheckpointingLayer)]


def receive(unit: nn.Module, ranks: RankMesh, *, leave_out: Container[nn.Module]) -> None:
    """Copies rank 0's parameters and buffers of `unit` to this rank's device. Tied tensors stay tied. Collective.

    Args:
        unit: a module of the scorer, or the scorer itself.
        ranks: all ranks of the model; each must call this.
        leave_out: modules inside `unit` that have already received their weights.
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
    """Raises ConfigError on all ranks if a rank's structure differs from the model that rank 0 loaded, or if two units
    of the model share a parameter. The other ranks build their structure from the configuration."""

    def describe() -> list[tuple[str, tuple[int, ...], str]]:
        named = [*scorer.named_parameters(), *scorer.named_buffers()]
        return [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named]

    def compare() -> None:
        pairs = zip_longest(loaded, describe(), fillvalue="nothing")
        differing = [f"{a} and {b}" for a, b in pairs if a != b]
        if differing:
            raise ConfigError(
                f"the loaded model differs from the one that its configuration describes: {'; '.join(differing[:3])}"
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
                    f"{name} of a {type(module).__name__} is shared between layers, so it cannot be sharded: train on "
                    "one rank with trainer.strategy=fsdp"
                )
