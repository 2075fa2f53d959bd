"""What each rank of a sharded model holds, counted on the model without its weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from rl_core.errors import ConfigError
from rl_core.interfaces import RankPlan, WorkerSpec
from rl_core.layout.mesh import Mesh
from rl_core.rank_kit.model_shapes import ModelShape, model_shape
from rl_core.rank_kit.worker_specs import SECTIONS
from rl_fsdp.model import load_scorer

_BYTES_OF_LOGITS = 3 * 4
"""Per token of a chunk and row of the vocabulary: float32 logits, their softmax and its gradient."""


def plan_ranks(spec: WorkerSpec, mesh: Mesh, *, micro_batch_tokens: int, is_fsdp1: bool) -> tuple[RankPlan, ...]:
    """One entry per rank, as `rl_core.interfaces.Planner` has it: there is one micro-batch at a time.

    Args:
        spec: the model.
        mesh: of its ranks.
        micro_batch_tokens: tokens of the largest micro-batch, before Ulysses ranks split it.
        is_fsdp1: its flat parameters are not counted exactly: refused.

    Raises:
        ConfigError: the model's directory cannot be read.
    """
    if is_fsdp1:
        raise ConfigError("trainer.strategy: fsdp1 flattens its parameters; plan with fsdp, which holds as much")
    scorer = load_scorer(spec, torch.device("meta"))
    where = f"{SECTIONS[spec.role]}.model.path"
    shape = model_shape(scorer.model.config.get_text_config().to_dict(), where)
    num_shards = mesh.world_size if spec.options.fsdp_size == -1 else spec.options.fsdp_size
    activations = _activation_bytes(spec, shape, micro_batch_tokens / mesh.sequence)
    return tuple(
        _rank_plan(spec, scorer, shape, mesh, rank, num_shards, activations) for rank in range(mesh.world_size)
    )


def _rank_plan(
    spec: WorkerSpec, scorer: nn.Module, shape: ModelShape, mesh: Mesh, rank: int, num_shards: int, activations: int
) -> RankPlan:
    shard = rank % num_shards
    parameters = list(scorer.parameters())
    trained = [p for p in parameters if p.requires_grad] if spec.optimizer is not None else []
    return RankPlan(
        rank=rank,
        data_part=mesh.data_rank(rank),
        layers=tuple(range(shape.num_layers)),
        experts=tuple(range(shape.num_experts)),
        place=f"shard {shard} sequence {mesh.coordinates(rank).sequence}",
        num_parameters=sum(_shard_elements(p, shard, num_shards) for p in parameters),
        parameter_bytes=_shard_bytes(parameters, shard, num_shards),
        gradient_bytes=_shard_bytes(trained, shard, num_shards),
        optimizer_bytes=2 * _shard_bytes(trained, shard, num_shards),
        activation_bytes=activations,
    )


def _shard_elements(parameter: nn.Parameter, shard: int, num_shards: int) -> int:
    """FSDP2 cuts the first axis into equal parts, of which the last ones may be smaller or empty."""
    rows = parameter.shape[0] if parameter.dim() else 1
    part = -(-rows // num_shards)
    held = max(0, min(part, rows - shard * part))
    return held * (parameter.numel() // rows if rows else 0)


def _shard_bytes(parameters: Iterable[nn.Parameter], shard: int, num_shards: int) -> int:
    return sum(_shard_elements(p, shard, num_shards) * p.element_size() for p in parameters)


def _activation_bytes(spec: WorkerSpec, shape: ModelShape, tokens: float) -> int:
    """Of one micro-batch: all layers, or where they are computed again their inputs and one layer; and the output's."""
    size = 2 if spec.bf16 else 4
    layers = [tokens * shape.activation_elements(layer) for layer in range(shape.num_layers)]
    if spec.optimizer is None:
        elements = max(layers)
    elif spec.gradient_checkpointing:
        elements = len(layers) * tokens * shape.hidden_size + max(layers)
    else:
        elements = sum(layers)
    logits = min(tokens, spec.logprobs_chunk_size) * shape.vocab_size * _BYTES_OF_LOGITS
    return round(size * (elements + 2 * tokens * shape.hidden_size) + (0 if spec.role == "critic" else logits))
