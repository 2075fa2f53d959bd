"""Loads a model into the shards of every rank, and checks that the shards give the same scores as the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from transformers import PreTrainedModel

from rl_core.errors import ConfigError
from rl_core.interfaces import WorkerSpec
from rl_core.rank_kit.process_group import agree, from_first
from rl_core.rank_kit.scoring.attention import PACKED_ATTENTION, packed_attention_of_rows
from rl_core.rank_kit.scoring.attention_proof import with_eager_attention
from rl_core.rank_kit.scoring.rank_mesh import RankMesh
from rl_core.rank_kit.scoring.shards import Shards
from rl_core.rank_kit.scoring.token_scorer import (
    Scorer,
    load_scorer,
    require_close,
    require_separable_layers,
    two_sequences,
)
from rl_core.rank_kit.scoring.ulysses import require_heads
from rl_core.rank_kit.worker_specs import SECTIONS


def start_shards(
    spec: WorkerSpec,
    ranks: RankMesh,
    shard: Callable[[Scorer], Shards],
    *,
    section: str,
    routes_key: str | None,
    keeps_float32: bool = True,
) -> Shards:
    """Returns this rank's shards. Rank 0 loads and checks the model; the other ranks build its structure without
    allocating memory and receive their shards.

    Args:
        spec: the model to load.
        ranks: all ranks of the model.
        shard: gives every rank's scorer its part of rank 0's weights; collective.
        section: the backend's section of the configuration, for messages.
        routes_key: see `load_scorer`.
        keeps_float32: see `load_scorer`.

    Raises:
        ConfigError: the model does not exist, its code lacks a needed ability, or sharding changes its results. Raised
            on all ranks.
    """
    where = SECTIONS[spec.role]
    device = torch.device("cpu" if ranks.is_first else "meta")
    scorer = agree(lambda: load_scorer(spec, device, routes_key=routes_key, keeps_float32=keeps_float32))
    if ranks.ulysses is not None:
        num_heads, group = scorer.model.config.get_text_config().num_attention_heads, ranks.ulysses
        agree(lambda: require_heads(num_heads, group, f"{where}.{section}"))
        agree(lambda: require_separable_layers(scorer.model, where, f"set {where}.{section}.sequence_parallel_size=1"))
        from_first(lambda: _require_packed_attention(scorer.model, where, f"{where}.{section}"))
    inputs = partial(two_sequences, scorer.model, spec)
    with torch.no_grad():
        expected_S = from_first(lambda: inputs(torch.device("cpu")).scored_by(scorer, temperature=1.0)[0])
        chosen = str(scorer.model.config._attn_implementation)
        attention = from_first(lambda: chosen) if ranks.ulysses is None else PACKED_ATTENTION
        scorer.model.set_attn_implementation(attention)
        shards = shard(scorer)
        on_ranks = inputs(ranks.device, ulysses=ranks.ulysses)
        found_S = on_ranks.scored_by(shards.module, temperature=1.0)[0].cpu()
        shards.let_go()
    require_close(
        found_S,
        expected_S,
        scorer.compute_dtype,
        f"{where}.model.path: the scores of {type(scorer.model).__name__} on {ranks.mesh.world_size} ranks differ from "
        "those on one rank",
        "set sequence_parallel_size=1" if ranks.ulysses else "this backend cannot shard it",
    )
    return shards


@torch.no_grad()
def _require_packed_attention(model: PreTrainedModel, where: str, section: str) -> None:
    """Raises ConfigError if the attention of Ulysses ignores a setting of a layer. The model keeps its attention."""
    chosen, tokens_BL = str(model.config._attn_implementation), torch.zeros(1, 12, dtype=torch.int64)
    _, fault = with_eager_attention(model, lambda: model.base_model(tokens_BL), packed_attention_of_rows)
    model.set_attn_implementation(chosen)
    if fault is not None:
        raise ConfigError(f"{where}.model.path: split over ranks, {fault}; set {section}.sequence_parallel_size=1")
