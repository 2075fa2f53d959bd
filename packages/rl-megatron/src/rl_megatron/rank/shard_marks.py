"""Marks which parameters are shards of a tensor-parallel group. The gradient norm must count parameters that are not
shards only once, not once per rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import nn


def mark_shards(chunks: Sequence[Any], expert_tensor_size: int) -> None:
    """Corrects the attribute by which Megatron decides which ranks' gradients enter the norm.

    Transformer Engine sets this attribute from incomplete information that Megatron passes. A linear layer that every
    tensor rank holds whole, such as a down-projection of latent attention, is marked as a shard, so its gradient counts
    once per rank. An expert that is on only one tensor rank may be marked as a copy, so its gradient counts only on the
    first rank; Megatron-LM's pull request 5916 describes this case.

    Args:
        chunks: the model's parts on this rank, before they are wrapped for training.
        expert_tensor_size: number of ranks over which one expert is split.
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
