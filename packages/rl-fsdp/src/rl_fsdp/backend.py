"""The entry point of this package. Imports no torch: it is loaded to check a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from rl_core.errors import ConfigError
from rl_core.interfaces import CONTRACT_VERSION, RankInfo, Worker, WorkerSpec

if TYPE_CHECKING:
    from rl_core.layout.mesh import Mesh

SECTIONS = {"policy": "trainer.policy", "reference": "trainer.ref", "critic": "trainer.critic"}


@attrs.frozen(kw_only=True)
class FsdpOptions:
    """`fsdp_config`"""

    cpu_offload: bool = False
    """Keep the parameters in CPU memory between uses. On a machine without accelerators they are there anyway."""


@attrs.frozen(kw_only=True)
class FsdpBackend:
    """Trains any Hugging Face causal language model."""

    name: str = "fsdp"
    contract_version: int = CONTRACT_VERSION
    config_section: str = "fsdp_config"
    options_class: type = FsdpOptions

    def mesh(self, options: FsdpOptions, world_size: int) -> Mesh:
        """All ranks are data parallel."""
        from rl_core.layout.mesh import Mesh

        _require_one_rank(self.name, world_size)
        return Mesh(world_size=world_size)

    def validate(self, spec: WorkerSpec, world_size: int) -> None:
        """Raises ConfigError for what cannot be trained; reads no model file."""
        section = SECTIONS[spec.role]
        _require_one_rank(f"{section}: strategy {self.name!r}", world_size)
        if spec.role == "critic":
            raise ConfigError(
                f"{section}: this version of {self.name!r} has no value head; use an estimator without one (grpo, rloo)"
            )
        if spec.model.path is None:
            raise ConfigError(
                f"{section}.model.path: no model was given; expected a Hugging Face model directory or name"
            )
        if spec.model.lora.rank > 0:
            raise ConfigError(
                f"{section}.model.lora.rank: {spec.model.lora.rank} was given; this version of {self.name!r}"
                " trains all weights (rank 0)"
            )
        if spec.logprobs_chunk_size < 1:
            raise ConfigError(f"logprobs_chunk_size: expected at least 1 token, got {spec.logprobs_chunk_size}")
        if spec.optimizer is not None:
            _validate_schedule(spec, f"{section}.optimizer_config")

    def needs_own_process(self) -> bool:
        """One rank patches nothing and shares the controller's process."""
        return False

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        """Loads the model in the calling process and thread."""
        from rl_fsdp.worker import FsdpWorker

        self.validate(spec, rank.world_size)
        return FsdpWorker(spec, rank)


def _require_one_rank(where: str, world_size: int) -> None:
    if world_size != 1:
        raise ConfigError(
            f"{where}: {world_size} ranks were asked for, this version trains on one rank: set their number to 1"
        )


def _validate_schedule(spec: WorkerSpec, where: str) -> None:
    optimizer, total = spec.optimizer, spec.total_optimizer_steps
    assert optimizer is not None
    if optimizer.num_warmup_steps < 0:
        raise ConfigError(f"{where}.num_warmup_steps: expected 0 or more, got {optimizer.num_warmup_steps}")
    if optimizer.scheduler == "constant_with_warmup":
        return
    if total is None:
        raise ConfigError(
            f"{where}.scheduler: {optimizer.scheduler!r} needs the length of the run; use constant_with_warmup"
        )
    if optimizer.num_warmup_steps >= total:
        raise ConfigError(
            f"{where}.num_warmup_steps: {optimizer.num_warmup_steps} of {total} leave none for {optimizer.scheduler}"
        )


fsdp = FsdpBackend()
