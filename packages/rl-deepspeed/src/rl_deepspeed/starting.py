"""Turns rank 0's model into a DeepSpeed engine on every rank."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from rl_core.errors import ConfigError
from rl_core.interfaces import WorkerSpec
from rl_core.rank_kit.worker_specs import SECTIONS
from rl_deepspeed.engine_config import engine_config
from rl_deepspeed.fixes import choose_accelerator, expect_deprecated_calls, keep_plain_gloo
from rl_deepspeed.partitions import EvenPartitions, FlatPartitions, WholeParameters
from rl_deepspeed.zero_shards import ZeroShards
from rl_transformers.rank.distributing import decoder_layers, receive, require_same_structure
from rl_transformers.rank.rank_mesh import RankMesh
from rl_transformers.rank.shards import Shards
from rl_transformers.rank.token_scorer import Scorer, TokenScorer

choose_accelerator()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings of DeepSpeed's own code, and of packages that it imports
    import deepspeed
    from deepspeed import zero
logging.getLogger("DeepSpeed").setLevel(logging.WARNING)


def start_engine(scorer: Scorer, spec: WorkerSpec, ranks: RankMesh) -> Shards:
    """Distributes rank 0's weights over the ranks and makes a DeepSpeed engine of them. With stages 1 and 2, a model
    without an optimizer gets no engine: every rank keeps the whole model.

    With stage 3, a rank holds its parts and at most one whole unit at a time: a decoder layer, or all parameters
    outside the layers. Rank 0 also holds the model that it loaded.

    Raises:
        ConfigError: the model is stored in float64 and `spec.bf16` is False; rank 0 loaded another structure than the
            configuration describes; or layers share parameters.
    """
    where = SECTIONS[spec.role]
    if scorer.compute_dtype == torch.float64:
        raise ConfigError(
            "the model is stored in float64, but DeepSpeed keeps weights in float32: train it with "
            "trainer.strategy=fsdp or trainer.bf16=true, or store it in float32",
            key=f"{where}.model.path",
        )
    require_same_structure(scorer)
    keep_plain_gloo()
    expect_deprecated_calls()
    _join(ranks)
    config = engine_config(spec)
    stage = config["zero_optimization"]["stage"]
    done: set[nn.Module] = set()
    for unit in (*decoder_layers(scorer), scorer):
        receive(unit, ranks, leave_out=done)
        done.update(unit.modules())
        if stage == 3:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                zero.Init(module=unit, config_dict_or_path=config)
    if stage != 3 and spec.optimizer is None:
        return ZeroShards(scorer, None, WholeParameters(scorer))
    if stage == 3:
        for weight in _read_outside_their_modules(scorer):
            zero.register_external_parameter(scorer, weight)
    engine = _engine(scorer, spec, config)
    scorer.model.eval()
    return ZeroShards(scorer, engine, EvenPartitions(engine) if stage == 3 else FlatPartitions(engine))


def _join(ranks: RankMesh) -> None:
    """Initializes DeepSpeed's communication on the existing process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        deepspeed.init_distributed(
            dist_backend="nccl" if ranks.device.type == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False
        )


def _engine(scorer: Scorer, spec: WorkerSpec, config: dict[str, Any]) -> Any:
    optimizer = None
    if spec.optimizer is not None:
        settings = spec.optimizer
        optimizer = AdamW(
            [weight for weight in scorer.parameters() if weight.requires_grad],
            lr=settings.lr,
            betas=settings.adam_betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, *_ = deepspeed.initialize(model=scorer, optimizer=optimizer, config=config)
    return engine


def _read_outside_their_modules(scorer: Scorer) -> list[nn.Parameter]:
    """Parameters that the scorer reads directly, without calling their modules."""
    module = scorer.model.get_output_embeddings() if isinstance(scorer, TokenScorer) else scorer.value_head
    assert isinstance(module, nn.Linear)
    return list(module.parameters())
