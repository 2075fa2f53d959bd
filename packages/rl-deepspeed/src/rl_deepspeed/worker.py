"""Runs one rank of a Hugging Face model under DeepSpeed."""

from __future__ import annotations

import os

import torch

from rl_core.interfaces import RankInfo, WorkerSpec
from rl_core.layout.mesh import Mesh
from rl_core.rank_kit.process_group import own_device
from rl_deepspeed.options import asked_replay_key, replay_key
from rl_deepspeed.starting import start_engine
from rl_transformers.rank.rank_mesh import RankMesh
from rl_transformers.rank.start import start_shards
from rl_transformers.rank.worker import ScoringWorker


class DeepSpeedWorker(ScoringWorker):
    """A `ScoringWorker` whose parameters DeepSpeed manages. A single rank uses DeepSpeed too, because DeepSpeed may
    offload its parameters."""

    def __init__(self, spec: WorkerSpec, rank: RankInfo):
        if spec.num_threads is not None:
            torch.set_num_threads(spec.num_threads)
        device = own_device(rank)
        # DeepSpeed uses LOCAL_RANK as the device's index, which is 0 if this rank sees only one GPU.
        os.environ.update(LOCAL_RANK=str(device.index or 0), RANK=str(rank.rank), WORLD_SIZE=str(rank.world_size))
        os.environ.update(MASTER_ADDR=rank.master_address, MASTER_PORT=str(rank.master_port))
        mesh = Mesh(world_size=rank.world_size, sequence=spec.options.sequence_parallel_size)
        ranks = RankMesh.join(rank, device, mesh)
        shards = start_shards(
            spec,
            ranks,
            lambda scorer: start_engine(scorer, spec, ranks),
            section="deepspeed_config",
            routes_key=asked_replay_key(spec),
            keeps_float32=False,
        )
        super().__init__(spec, device, ranks, shards, routes_key=replay_key(spec.role))
