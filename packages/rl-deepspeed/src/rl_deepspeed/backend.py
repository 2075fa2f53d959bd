"""Defines the backend, the entry point of this package. Imports no torch, because checking a configuration imports this
module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from rl_core.errors import ConfigError
from rl_core.interfaces import Backend, RankInfo, RankPlan, Worker, WorkerSpec
from rl_core.rank_kit.worker_specs import SECTIONS, require_model_path, require_training_settings
from rl_deepspeed.engine_config import require_free_keys
from rl_deepspeed.options import DeepSpeedOptions, replay_key
from rl_transformers.model_checks import require_fitting_model

if TYPE_CHECKING:
    from rl_core.layout.mesh import Mesh


@attrs.frozen(kw_only=True)
class DeepSpeedBackend(Backend):
    """Trains Hugging Face causal language models, and critics built from them, with ZeRO: all weights or only
    adapters."""

    name: str = "deepspeed"
    replays_kept_tokens: bool = True
    can_plan: bool = True
    config_section: str = "deepspeed_config"
    options_class: type = DeepSpeedOptions

    def mesh(self, options: DeepSpeedOptions, world_size: int) -> Mesh:
        """Returns the mesh: adjacent ranks split sequences (Ulysses), and the other axis is data parallel, whatever the
        ZeRO stage."""
        from rl_core.layout.mesh import Mesh

        return Mesh(world_size=world_size, sequence=options.sequence_parallel_size)

    def validate(self, spec: WorkerSpec, world_size: int) -> None:
        """Raises ConfigError if the configuration cannot be trained; reads no model file."""
        self.mesh(spec.options, world_size)
        require_model_path(spec)
        require_training_settings(
            spec, only_adamw="DeepSpeed steps pieces of matrices here, with AdamW, and offloads only AdamW's state"
        )
        _require_zero(spec, f"{SECTIONS[spec.role]}.deepspeed_config")
        if spec.options.moe_enable_routing_replay and spec.role == "critic":
            raise ConfigError("a critic cannot follow the policy's routes; set it to false", key=replay_key("critic"))

    def check_model(self, spec: WorkerSpec, *, longest: int, num_sequences: int) -> None:
        """See `Backend.check_model`; imports torch."""
        require_fitting_model(spec, longest=longest, num_sequences=num_sequences)

    def shares_prefixes(self, options: DeepSpeedOptions) -> bool:
        """See `Backend.shares_prefixes`."""
        return True

    def follows_routes(self, options: DeepSpeedOptions) -> bool:
        """See `Backend.follows_routes`."""
        return options.moe_enable_routing_replay

    def needs_own_process(self) -> bool:
        """Always True: DeepSpeed keeps one process group and one set of parameter hooks per process."""
        return True

    def plan(
        self, spec: WorkerSpec, world_size: int, *, micro_batch_tokens: int, num_micro_batches: int
    ) -> tuple[RankPlan, ...]:
        """Returns what each rank would hold in memory; imports torch. `num_micro_batches` has no effect, because
        micro-batches are computed one after another."""
        from rl_deepspeed.plan import plan_ranks

        self.validate(spec, world_size)
        return plan_ranks(spec, self.mesh(spec.options, world_size), micro_batch_tokens=micro_batch_tokens)

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        """Loads this rank's model in the calling process and thread."""
        from rl_deepspeed.worker import DeepSpeedWorker

        self.validate(spec, rank.world_size)
        return DeepSpeedWorker(spec, rank)


def _require_zero(spec: WorkerSpec, section: str) -> None:
    zero = spec.options.zero_optimization
    where = f"{section}.zero_optimization"
    if zero.offload_param.device != "none" and zero.stage != 3:
        raise ConfigError(
            f"got {zero.offload_param.device!r}, but stage {zero.stage} keeps parameters whole on every rank: set "
            "stage=3",
            key=f"{where}.offload_param.device",
        )
    if zero.overlap_comm and zero.stage == 1:
        raise ConfigError(
            "got true, but with stage 1 gradient sums do not overlap with backward: set stage=2, or leave this key out",
            key=f"{where}.overlap_comm",
        )
    if spec.gradient_checkpointing == "selective" and zero.stage == 3 and spec.optimizer is not None:
        raise ConfigError(
            "selective, but stage 3 gathers parameters inside a layer, and torch cannot "
            f"tell these gathers from the operations that it recomputes: set {where}.stage=2, or "
            "trainer.gradient_checkpointing=true",
            key="trainer.gradient_checkpointing",
        )
    for field in attrs.fields(type(zero)):
        least, value = int(field.name in ("sub_group_size", "reduce_bucket_size")), getattr(zero, field.name)
        if isinstance(value, int) and value < least:
            raise ConfigError(f"got {value}; expected at least {least}", key=f"{where}.{field.name}")
    if zero.stage < 3 and zero.allgather_bucket_size % 2:
        raise ConfigError(
            f"got {zero.allgather_bucket_size}; expected an even number", key=f"{where}.allgather_bucket_size"
        )
    require_free_keys(spec.options.extra, f"{section}.extra")


deepspeed = DeepSpeedBackend()
