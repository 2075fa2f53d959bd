"""Estimates the memory of each rank under ZeRO, from the model's structure without its weights.

Memory that a rank holds from step to step is counted exactly. Memory for gathered tensors is bounded by DeepSpeed's own
settings: its buckets are allocated in full, however small the model is, and stage 3 keeps gathered parameters up to
`stage3_max_live_parameters`.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import nn

from rl_core.interfaces import HeldKind, RankPlan, WorkerSpec
from rl_core.layout.mesh import Mesh
from rl_core.rank_kit.model_shapes import model_shape
from rl_core.rank_kit.worker_specs import SECTIONS
from rl_deepspeed.engine_config import engine_config
from rl_deepspeed.options import asked_replay_key
from rl_transformers.rank.planned_memory import ActivationBytes, units_of
from rl_transformers.rank.token_scorer import Scorer, load_scorer

_ALIGNMENT = 2
"""Stages 1 and 2 pad each rank's part to a multiple of this many elements (`nccl_start_alignment_factor`)."""


def plan_ranks(spec: WorkerSpec, mesh: Mesh, *, micro_batch_tokens: int) -> tuple[RankPlan, ...]:
    """Returns one entry per rank, as `Backend.plan` requires. A rank computes one micro-batch at a time.

    Args:
        spec: the model and how it is trained.
        mesh: the mesh of its ranks.
        micro_batch_tokens: tokens of the largest micro-batch, before Ulysses ranks split it.

    Raises:
        ConfigError: the model does not exist, or `load_scorer` refuses it.
    """
    scorer = load_scorer(spec, torch.device("meta"), routes_key=asked_replay_key(spec), keeps_float32=False)
    shape = model_shape(scorer.model.config.get_text_config().to_dict(), f"{SECTIONS[spec.role]}.model.path")
    zero = _Zero(scorer, spec, mesh.world_size)
    held = ActivationBytes.of(spec, shape, micro_batch_tokens / mesh.sequence)
    is_trained = spec.optimizer is not None
    fullest = (held.at_output, held.in_layer) if is_trained else (held.scoring_output, held.hidden + held.kept)
    whole = sum(p.numel() * p.element_size() for p in scorer.parameters())
    largest = max(p.numel() for p in scorer.parameters())
    return tuple(
        RankPlan(
            rank=rank,
            data_part=mesh.data_rank(rank),
            layers=tuple(range(shape.num_layers)),
            experts=tuple(range(shape.num_experts)),
            place=f"ZeRO-{zero.stage} part {rank} sequence {mesh.coordinates(rank).sequence}",
            num_parameters=zero.num_parameters,
            parameter_bytes=zero.parameter_bytes,
            gradient_bytes=zero.gradient_bytes(rank),
            optimizer_bytes=zero.optimizer_bytes,
            activation_bytes=round(max(fullest)),
            gathered_bytes=zero.gathered_bytes,
            # A whole tensor, its copy, and the checkpoint tensors made from it (one per expert).
            export_bytes=3 * largest * zero.compute_size,
            frees_gradients=zero.stage < 3,
            on_host=zero.on_host,
            loading_host_bytes=whole if rank == 0 and mesh.world_size > 1 else 0,
        )
        for rank in range(mesh.world_size)
    )


@attrs.define
class _Zero:
    """Counts what a rank holds of a model. Parts are padded, so ranks differ only in the memory of gradients."""

    scorer: Scorer
    spec: WorkerSpec
    world_size: int
    settings: dict[str, Any] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.settings = engine_config(self.spec)["zero_optimization"]

    @property
    def stage(self) -> int:
        return self.settings["stage"]

    @property
    def compute_size(self) -> int:
        """Bytes per element in computations."""
        return 2 if self.spec.bf16 else 4

    @property
    def trained(self) -> list[nn.Parameter]:
        return [] if self.spec.optimizer is None else [p for p in self.scorer.parameters() if p.requires_grad]

    @property
    def num_parameters(self) -> int:
        """Number of parameters in the compute dtype that a rank holds between uses."""
        if self.stage < 3:
            return sum(p.numel() for p in self.scorer.parameters())
        return self._part_of_each(list(self.scorer.parameters()))

    @property
    def parameter_bytes(self) -> int:
        return self.num_parameters * self.compute_size

    @property
    def num_stepped(self) -> int:
        """Number of trained elements that a rank's optimizer updates."""
        if self.stage == 3:
            return self._part_of_each(self.trained)
        step = _ALIGNMENT * self.world_size
        return -(-sum(p.numel() for p in self.trained) // step) * _ALIGNMENT

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the float32 copy of the trained elements, which exists even in a float32 run, and of AdamW's two
        moments."""
        return 3 * 4 * self.num_stepped

    def gradient_bytes(self, rank: int) -> int:
        """Returns the bytes of gradients in float32. A rank keeps the gradients of its own part; with stage 1, it keeps
        the gradients of all trained parameters until the step. In a float32 run, stage 2 keeps the whole gradient of
        every parameter that overlaps the rank's part."""
        if self.stage == 1:
            return 4 * sum(p.numel() for p in self.trained)
        if self.stage == 3 or self.spec.bf16:
            return 4 * self.num_stepped
        first, end, total = rank * self.num_stepped, (rank + 1) * self.num_stepped, 0
        at = 0
        for p in self.trained:
            total += p.numel() if at < end and at + p.numel() > first else 0
            at += p.numel()
        return 4 * total

    @property
    def on_host(self) -> tuple[HeldKind, ...]:
        """The kinds of state that are kept in CPU memory; gradients are kept where the optimizer's state is."""
        parameters: tuple[HeldKind, ...] = ("parameters",) if "offload_param" in self.settings else ()
        is_stepped_there = "offload_optimizer" in self.settings and self.trained
        return (*parameters, "gradients", "optimizer") if is_stepped_there else parameters

    @property
    def gathered_bytes(self) -> int:
        """Bytes of gathered parameters, and of gradients before and while they are summed over the ranks."""
        settings, size = self.settings, self.compute_size
        num_elements = sum(p.numel() for p in self.scorer.parameters())
        total = 0
        if self.stage == 3:
            live = max(settings["stage3_max_live_parameters"], max(map(_numel, units_of(self.scorer))))
            total += min(num_elements, live + settings["stage3_prefetch_bucket_size"]) * size
        if not self.trained:
            return total
        num_buckets = 2 if settings["overlap_comm"] and self.stage < 3 else 1
        if settings["contiguous_gradients"]:
            total += num_buckets * settings["reduce_bucket_size"] * size
        if self.spec.bf16:
            # The gradients of a bucket are converted to float32 for their sum, and stage 3 also concatenates them.
            num_copies = 2 if self.stage == 3 else 1
            total += num_copies * min(num_elements, settings["reduce_bucket_size"]) * 4
        return total + max(_numel(p for p in unit if p.requires_grad) for unit in units_of(self.scorer)) * size

    def _part_of_each(self, parameters: list[nn.Parameter]) -> int:
        return sum(-(-p.numel() // self.world_size) for p in parameters)


def _numel(parameters: Any) -> int:
    return sum(p.numel() for p in parameters)
