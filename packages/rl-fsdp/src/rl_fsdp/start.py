"""From a model on disk to the shards of every rank, and the proof that they compute what the model does."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch

from rl_core.interfaces import WorkerSpec
from rl_core.rank_kit.process_group import agree, from_first
from rl_core.rank_kit.worker_specs import SECTIONS
from rl_fsdp.attention import PACKED_ATTENTION
from rl_fsdp.model import load_scorer, require_close, two_sequences
from rl_fsdp.rank_mesh import RankMesh
from rl_fsdp.shards import Shards
from rl_fsdp.ulysses import require_heads

Generation = Literal["fsdp2", "fsdp1"]


def start_shards(spec: WorkerSpec, ranks: RankMesh, generation: Generation) -> Shards:
    """Rank 0 reads the model and tries it; the others make its structure without memory and get their shards.

    Raises:
        ConfigError: there is no such model, its code cannot do what is asked, or sharding changes what it computes. On
            all ranks alike.
    """
    where = SECTIONS[spec.role]
    scorer = agree(lambda: load_scorer(spec, torch.device("cpu" if ranks.is_first else "meta")))
    if ranks.ulysses is not None:
        num_heads, group = scorer.model.config.get_text_config().num_attention_heads, ranks.ulysses
        agree(lambda: require_heads(num_heads, group, f"{where}.fsdp_config"))
    inputs = partial(two_sequences, scorer.model, use_sample_packing=spec.use_sample_packing)
    with torch.no_grad():
        expected_S = from_first(lambda: scorer(inputs(device=torch.device("cpu")), temperature=1.0)[0])
        if ranks.ulysses is not None:
            scorer.model.set_attn_implementation(PACKED_ATTENTION)
        if generation == "fsdp2":
            from rl_fsdp.sharding import shard
        else:
            from rl_fsdp.fsdp1 import shard_fsdp1 as shard
        shards = shard(scorer, spec.options, ranks, bf16=spec.bf16)
        own = inputs(device=ranks.device, ulysses=ranks.ulysses)
        found_S = own.scored_by(shards.module, temperature=1.0)[0].cpu()
        shards.let_go()
    require_close(
        found_S,
        expected_S,
        scorer.compute_dtype,
        f"{where}.model.path: what {type(scorer.model).__name__} computes on {ranks.mesh.world_size} ranks differs "
        "from what it computes on one",
        "set sequence_parallel_size=1" if ranks.ulysses else "this backend cannot shard it",
    )
    return shards
