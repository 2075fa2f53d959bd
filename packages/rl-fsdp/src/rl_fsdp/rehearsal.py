"""Rehearses one rank's step with FSDP2's own sharding, on tensors without values."""

from __future__ import annotations

from rl_core.batch import Batch
from rl_core.interfaces import LossSpec, Plan, RehearsedPhase, WorkerSpec
from rl_core.layout.mesh import Mesh
from rl_fsdp.sharding import shard
from rl_fsdp.shards import TensorShards
from rl_transformers.rank.rank_mesh import RankMesh
from rl_transformers.rank.rehearsal import rehearse
from rl_transformers.rank.token_scorer import Scorer


def rehearse_rank(
    spec: WorkerSpec, mesh: Mesh, batch: Batch, plan: Plan, loss: LossSpec | None, *, section: str
) -> tuple[RehearsedPhase, ...]:
    """See `rl_transformers.rank.rehearsal`; a single rank shards nothing, as in `FsdpWorker`."""

    def shards(scorer: Scorer, ranks: RankMesh) -> TensorShards:
        if mesh.world_size == 1:
            return TensorShards(scorer, spec)
        return shard(scorer, spec.options, ranks, spec)

    return rehearse(spec, mesh, shards, batch, plan, loss, section=section)
