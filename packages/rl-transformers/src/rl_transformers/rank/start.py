"""Loads a model into the shards of every rank, and checks that the shards give the same scores as the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from rl_core.errors import ConfigError
from rl_core.interfaces import WorkerSpec
from rl_core.rank_kit.process_group import agree, from_first
from rl_core.rank_kit.worker_specs import SECTIONS
from rl_transformers.attention_proof import with_eager_attention
from rl_transformers.rank.attention import PACKED_ATTENTION, packed_attention_of_rows
from rl_transformers.rank.rank_mesh import RankMesh
from rl_transformers.rank.shards import Shards
from rl_transformers.rank.token_scorer import (
    Scorer,
    load_scorer,
    require_close,
    require_separable_layers,
    two_sequences,
)
from rl_transformers.rank.ulysses import require_heads


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
    inputs = partial(two_sequences, scorer.model, spec)
    with torch.no_grad():
        score = partial(inputs(torch.device("cpu")).scored_by, scorer, temperature=1.0)
        if ranks.ulysses is not None and not spec.use_sample_packing:  # packed attention was not compared yet
            expected_S = from_first(lambda: _scored_by_rows(scorer, score, where, section))
        else:
            expected_S = from_first(lambda: score()[0])
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
        f"the scores of {type(scorer.model).__name__} on {ranks.mesh.world_size} ranks differ from those on one rank",
        "set sequence_parallel_size=1" if ranks.ulysses else "this backend cannot shard it",
        key=f"{where}.model.path",
    )
    return shards


def _scored_by_rows(scorer: Scorer, score: Callable[[], tuple[Tensor, ...]], where: str, section: str) -> Tensor:
    """The scores with eager attention. Raises ConfigError if the attention of Ulysses ignores a setting of a layer."""
    scores, fault = with_eager_attention(scorer.model, score, packed_attention_of_rows)
    if fault is not None:
        raise ConfigError(
            f"split over ranks, {fault}; set {where}.{section}.sequence_parallel_size=1", key=f"{where}.model.path"
        )
    return scores[0]
