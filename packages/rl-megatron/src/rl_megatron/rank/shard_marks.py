"""Which parameters are shards of a tensor-parallel group. Others count once in the gradient norm, not once per rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import nn


def mark_shards(chunks: Sequence[Any], expert_tensor_size: int) -> None:
    """Corrects the marks by which Megatron decides whose gradients enter the norm.

    Transformer Engine marks weights by what it was told, and Megatron tells it less than there is: a linear layer that
    every tensor rank holds whole counts as a shard, and its gradient once per rank (the down-projections of latent
    attention); an expert that is on one tensor rank alone may count as a copy, and its gradient on the first rank
    alone. Megatron-LM's pull request 5916 describes the second.

    Args:
        chunks: the model's parts on this rank, before they are wrapped for training.
        expert_tensor_size: ranks that one expert is split over.
    """
    for chunk in chunks:
        layers: list[Any] = [module for module in chunk.modules() if isinstance(module, MoELayer)]
        experts = [module for layer in layers for module in layer.experts.modules()]
        for module in experts:
            if expert_tensor_size == 1 or _is_transformer_engines(module):
                _mark(module, True)
        is_expert = set(experts)
        for module in chunk.modules():
            if module not in is_expert and _is_transformer_engines(module) and module.parallel_mode is None:
                _mark(module, False)


def _is_transformer_engines(module: nn.Module) -> bool:
    return hasattr(module, "parallel_mode")


def _mark(module: nn.Module, is_shard: bool) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.tensor_model_parallel = is_shard  # pyright: ignore[reportAttributeAccessIssue]
