"""Defines the backend, the entry point of this package. Imports no torch, because checking a configuration imports this
module."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from rl_core.errors import ConfigError
from rl_core.interfaces import Backend, RankInfo, RankPlan, Worker, WorkerSpec
from rl_core.rank_kit.worker_specs import SECTIONS, require_model_path
from rl_megatron.checks.refusals import refuse
from rl_megatron.checks.training_checks import require_trainable
from rl_megatron.megatron_fields import require_bridge
from rl_megatron.options import MegatronOptions, mesh_of, one_rank_options, transformer_fields
from rl_transformers.proof.model_proof import code_digest, require_proof, version_of

if TYPE_CHECKING:
    from rl_core.layout.mesh import Mesh


@attrs.frozen(kw_only=True)
class MegatronBackend(Backend):
    """Trains causal language models that Megatron-Bridge converts, and critics built from them."""

    name: str = "megatron"
    replays_kept_tokens: bool = True
    can_plan: bool = True
    config_section: str = "megatron_config"
    options_class: type = MegatronOptions

    def mesh(self, options: MegatronOptions, world_size: int) -> Mesh:
        """Returns the mesh of tensor, context, data and pipeline ranks; expert layers use a second grouping of the same
        ranks."""
        return mesh_of(options, world_size, self.config_section)

    def validate(self, spec: WorkerSpec, world_size: int) -> None:
        """Raises ConfigError if the configuration cannot be trained correctly."""
        require_bridge()
        refuse(spec, world_size)
        require_trainable(spec)
        require_model_path(spec)

    def follows_routes(self, options: MegatronOptions) -> bool:
        """See `Backend.follows_routes`."""
        replays = transformer_fields(options, self.config_section)["moe_enable_routing_replay"]
        return bool(replays) and options.moe_routing_replay_source == "rollout"

    def records_routes(self, options: MegatronOptions) -> bool:
        """See `Backend.records_routes`."""
        replays = transformer_fields(options, self.config_section)["moe_enable_routing_replay"]
        return bool(replays) and options.moe_routing_replay_source == "scoring"

    def has_own_losses(self, options: MegatronOptions) -> bool:
        """See `Backend.has_own_losses`."""
        fields = transformer_fields(options, self.config_section)
        coefficients = fields["moe_aux_loss_coeff"]
        balances = any(coefficients) if isinstance(coefficients, (list, tuple)) else bool(coefficients)
        is_balanced = fields["moe_router_load_balancing_type"] != "none" and balances
        return is_balanced or bool(fields.get("moe_z_loss_coeff"))

    def needs_own_process(self) -> bool:
        """Always True: Megatron keeps one mesh per process, and on a machine without GPUs `patches.platform` changes
        torch."""
        return True

    def plan(
        self, spec: WorkerSpec, world_size: int, *, micro_batch_tokens: int, num_micro_batches: int
    ) -> tuple[RankPlan, ...]:
        """Estimates the memory that each rank would hold."""
        from rl_megatron.plan import plan_ranks

        self.validate(spec, world_size)
        return plan_ranks(spec, world_size, micro_batch_tokens=micro_batch_tokens, num_micro_batches=num_micro_batches)

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        """Builds this rank's model in the calling process, which must not run any other rank."""
        from rl_megatron.rank.worker import MegatronWorker

        self.validate(spec, rank.world_size)
        return MegatronWorker(spec, rank, prove=None if spec.is_proved else partial(_prove, self, spec))

    def prove(self, spec: WorkerSpec) -> str | None:
        """See `Backend.prove`: compares a small copy of the model with transformers."""
        return require_proof(self, spec)

    def proof_basis(self, spec: WorkerSpec) -> Mapping[str, Any]:
        """See `Provable`."""
        return {
            "options": attrs.asdict(one_rank_options(spec.options)),
            "versions": {name: version_of(name) for name in _LIBRARIES},
            "code": code_digest(Path(__file__).parent),
            "on an accelerator": _has_accelerator(),
        }

    def proof_obstacle(self) -> str | None:
        """Returns why models cannot be checked on this machine, or None if they can. Transformer Engine has no kernels
        for CPUs, so models cannot be checked if it is installed on a machine without a GPU."""
        if find_spec("transformer_engine") is not None and not _has_accelerator():
            return "Transformer Engine is installed, but this machine has no GPU to run it on"
        return None

    def proof_worker(self, spec: WorkerSpec) -> Worker:
        """See `Provable`. If Transformer Engine is installed, sequences are not packed, because the check uses
        Transformer Engine's attention, which cannot pack float32."""
        from rl_megatron.rank.worker import MegatronWorker

        is_packed = find_spec("transformer_engine") is None
        options = one_rank_options(spec.options)
        return MegatronWorker(attrs.evolve(spec, options=options, use_sample_packing=is_packed), RankInfo())


def _prove(backend: MegatronBackend, spec: WorkerSpec) -> None:
    """Checks that Megatron computes the model as transformers does. Raises ConfigError if the check fails or cannot
    run."""
    if (reason := backend.prove(spec)) is not None:
        raise ConfigError(
            f"it is not proved that Megatron computes this model correctly: {reason}",
            key=f"{SECTIONS[spec.role]}.model.path",
        )


def _has_accelerator() -> bool:
    import torch

    return torch.cuda.is_available()


_LIBRARIES = ("megatron-core", "megatron-bridge", "transformer-engine", "flash-attn")
megatron = MegatronBackend()
