"""Runs one rank of a Hugging Face model that FSDP shards."""

from __future__ import annotations

from typing import Literal

import torch

from rl_core.interfaces import RankInfo, WorkerSpec
from rl_core.layout.mesh import Mesh
from rl_core.rank_kit.process_group import own_device
from rl_fsdp.options import asked_replay_key, replay_key
from rl_fsdp.shards import TensorShards
from rl_transformers.rank.rank_mesh import RankMesh
from rl_transformers.rank.start import start_shards
from rl_transformers.rank.token_scorer import load_scorer
from rl_transformers.rank.worker import ScoringWorker

Generation = Literal["fsdp2", "fsdp1"]


class FsdpWorker(ScoringWorker):
    """A `ScoringWorker` whose parameters FSDP shards. A single rank shards nothing. It joins a process group only to
    offload its parameters from an accelerator to CPU memory."""

    def __init__(self, spec: WorkerSpec, rank: RankInfo, generation: Generation = "fsdp2"):
        if spec.num_threads is not None:
            torch.set_num_threads(spec.num_threads)
        device, routes_key = own_device(rank), replay_key(spec.role)
        if rank.world_size > 1 or (spec.options.cpu_offload and device.type != "cpu"):
            mesh = Mesh(world_size=rank.world_size, sequence=spec.options.sequence_parallel_size)
            ranks = RankMesh.join(rank, device, mesh)
            if generation == "fsdp2":
                from rl_fsdp.sharding import shard
            else:
                from rl_fsdp.fsdp1 import shard_fsdp1 as shard
            shards = start_shards(
                spec,
                ranks,
                lambda scorer: shard(scorer, spec.options, ranks, spec),
                section="fsdp_config",
                routes_key=asked_replay_key(spec),
            )
            super().__init__(spec, device, ranks, shards, routes_key=routes_key)
        else:
            scorer = load_scorer(spec, device, routes_key=asked_replay_key(spec))
            super().__init__(spec, device, None, TensorShards(scorer, spec), routes_key=routes_key)
