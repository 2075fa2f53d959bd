"""Defines the backend, the entry point of this package. Imports no torch, because checking a configuration imports this
module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from rl_core.errors import ConfigError
from rl_core.interfaces import Backend, LossSpec, Plan, RankInfo, RankPlan, RehearsedPhase, Worker, WorkerSpec
from rl_core.rank_kit.worker_specs import SECTIONS, require_model_path, require_training_settings
from rl_fsdp.options import FsdpOptions, replay_key
from rl_transformers.model_checks import require_fitting_model

if TYPE_CHECKING:
    from rl_core.batch import Batch
    from rl_core.layout.mesh import Mesh


_STEPS_PARTS = ("adamw", "muon", "sgd")
"""Optimizers that step parts of weights and read no values; Muon gathers what it needs."""


@attrs.frozen(kw_only=True)
class FsdpBackend(Backend):
    """Trains Hugging Face causal language models (all weights or only LoRA adapters) and critics built from them."""

    name: str = "fsdp"
    replays_kept_tokens: bool = True
    can_plan: bool = True
    can_rehearse: bool = True
    config_section: str = "fsdp_config"
    options_class: type = FsdpOptions
    is_fsdp1: bool = False
    """Whether to use FSDP1 (flat parameters), which is kept for users who depend on it. FSDP2 does everything that
    FSDP1 does, and more."""

    def mesh(self, options: FsdpOptions, world_size: int) -> Mesh:
        """Returns the mesh, in which every `sequence_parallel_size` adjacent ranks form a Ulysses group. The groups are
        data parallel, whatever `fsdp_size` is. Raises ConfigError if either size does not divide `world_size`."""
        from rl_core.layout.mesh import Mesh

        size = options.fsdp_size
        if size != -1 and (size < 1 or world_size % size):
            least = 2 if self.is_fsdp1 else 1
            fitting = ", ".join(str(n) for n in (-1, *range(least, world_size + 1)) if world_size % n == 0)
            raise ConfigError(
                f"{size} does not divide {world_size} ranks; choose one of {fitting}",
                key=f"{self.config_section}.fsdp_size",
            )
        return Mesh(world_size=world_size, sequence=options.sequence_parallel_size)

    def validate(self, spec: WorkerSpec, world_size: int) -> None:
        """Raises ConfigError if the configuration cannot be trained; reads no model file."""
        section = SECTIONS[spec.role]
        self.mesh(spec.options, world_size)
        require_model_path(spec)
        require_training_settings(spec)
        if self.is_fsdp1:
            _validate_fsdp1(spec, section, world_size)
        if spec.options.moe_enable_routing_replay and spec.role == "critic":
            raise ConfigError("a critic cannot follow the policy's routes; set it to false", key=replay_key("critic"))

    def check_model(self, spec: WorkerSpec, *, longest: int, num_sequences: int) -> None:
        """See `Backend.check_model`; imports torch."""
        require_fitting_model(spec, longest=longest, num_sequences=num_sequences)

    def shares_prefixes(self, options: FsdpOptions) -> bool:
        """See `Backend.shares_prefixes`."""
        return True

    def follows_routes(self, options: FsdpOptions) -> bool:
        """See `Backend.follows_routes`."""
        return options.moe_enable_routing_replay

    def needs_own_process(self) -> bool:
        """Always False: a single rank patches nothing and can share the controller's process."""
        return False

    def plan(
        self, spec: WorkerSpec, world_size: int, *, micro_batch_tokens: int, num_micro_batches: int
    ) -> tuple[RankPlan, ...]:
        """Returns what each rank would hold in memory; imports torch. `num_micro_batches` has no effect, because
        micro-batches are computed one after another."""
        from rl_fsdp.plan import plan_flat_ranks, plan_ranks

        self.validate(spec, world_size)
        mesh = self.mesh(spec.options, world_size)
        plan = plan_flat_ranks if self.is_fsdp1 else plan_ranks
        return plan(spec, mesh, micro_batch_tokens=micro_batch_tokens)

    def rehearse(
        self, spec: WorkerSpec, world_size: int, *, batch: Batch, plan: Plan, loss: LossSpec | None
    ) -> tuple[RehearsedPhase, ...]:
        """See `Backend.rehearse`; imports torch."""
        from rl_fsdp.rehearsal import rehearse_rank

        self.validate(spec, world_size)
        _require_rehearsable(spec, SECTIONS[spec.role], is_fsdp1=self.is_fsdp1)
        mesh = self.mesh(spec.options, world_size)
        return rehearse_rank(spec, mesh, batch, plan, loss, section=self.config_section)

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        """Loads this rank's model in the calling process and thread."""
        from rl_fsdp.worker import FsdpWorker

        self.validate(spec, rank.world_size)
        return FsdpWorker(spec, rank, "fsdp1" if self.is_fsdp1 else "fsdp2")


def _validate_fsdp1(spec: WorkerSpec, section: str, world_size: int) -> None:
    if spec.role == "critic":
        raise ConfigError(
            "fsdp1 cannot train a model with a value head, which a critic and a reward model have; set "
            "trainer.strategy=fsdp (FSDP2)",
            key="trainer.strategy",
        )
    refused = {
        "fsdp_config.cpu_offload": spec.options.cpu_offload
        and spec.optimizer is not None
        and "FSDP1 cannot add up the gradients of several micro-batches on the CPU",
        "fsdp_config.fsdp_size": spec.options.fsdp_size == 1 and "FSDP1 does not sum gradients over unsharded copies",
        "optimizer_config.name": world_size > 1
        and spec.optimizer is not None
        and spec.optimizer.name not in _STEPS_PARTS
        and f"{spec.optimizer.name} reads whole weights, which are not gathered from FSDP1's flat parameters",
        "model.lora.rank": spec.model.lora.rank > 0 and "FSDP1 cannot merge adapters into flat parameters",
    }
    for key, reason in refused.items():
        if reason:
            raise ConfigError(f"{reason}; set trainer.strategy=fsdp (FSDP2)", key=f"{section}.{key}")


def _require_rehearsable(spec: WorkerSpec, section: str, *, is_fsdp1: bool) -> None:
    if is_fsdp1:
        raise ConfigError(
            "fsdp1 cannot be rehearsed, because FSDP1 makes its flat parameters from the weights' values; rehearse "
            "trainer.strategy=fsdp, or use only the plan (rl plan)",
            key="trainer.strategy",
        )
    if spec.options.cpu_offload:
        raise ConfigError(
            "a rehearsal cannot tell host memory from device memory; rehearse without it, or use only the plan (rl "
            "plan)",
            key=f"{section}.fsdp_config.cpu_offload",
        )
    if spec.optimizer is not None and spec.optimizer.name not in _STEPS_PARTS:
        raise ConfigError(
            f"got {spec.optimizer.name!r}, which may read values of weights, and a rehearsal has none; rehearse with "
            f"one of {', '.join(_STEPS_PARTS)}, or use only the plan (rl plan)",
            key=f"{section}.optimizer_config.name",
        )
    if spec.options.moe_enable_routing_replay:
        raise ConfigError(
            "routes come from an engine, which a rehearsal does not have; set it to false to rehearse",
            key=replay_key(spec.role),
        )


fsdp = FsdpBackend()
fsdp1 = FsdpBackend(name="fsdp1", is_fsdp1=True)
