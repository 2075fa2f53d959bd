"""The entry point. Does not import torch, because it is loaded to check a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from rl_core.errors import ConfigError
from rl_core.interfaces import RankInfo, Worker, WorkerSpec

if TYPE_CHECKING:
    from rl_core.layout.mesh import Mesh


@attrs.frozen(kw_only=True)
class PlainDdpOptions:
    """The options in `plain_ddp_config`."""

    reduce_in_float64: bool = False
    """Add the ranks' gradients in double precision."""


@attrs.frozen(kw_only=True)
class PlainDdpBackend:
    """A training backend in which every rank has the whole model and computes its part of the batch."""

    name: str = "plain_ddp"
    config_section: str = "plain_ddp_config"
    options_class: type = PlainDdpOptions

    def mesh(self, options: PlainDdpOptions, world_size: int) -> Mesh:
        """All ranks are data parallel."""
        from rl_core.layout.mesh import Mesh

        return Mesh(world_size=world_size)

    def validate(self, spec: WorkerSpec, world_size: int) -> None:
        """Refuses what this backend cannot train, and names the key to change."""
        refused = {
            "trainer.use_sample_packing=false: rows are padded": spec.use_sample_packing,
            "trainer.gradient_checkpointing=false: activations are kept": spec.gradient_checkpointing,
            "trainer.bf16=false: it computes in float32": spec.bf16,
            "an advantage estimator without a critic: it has no value head": spec.role == "critic",
            "lora.rank=0: it trains all weights": spec.model.lora.rank > 0,
            "no model.trainable: it trains all weights": spec.model.trainable is not None,
            "optimizer_config.scheduler=constant_with_warmup: it has no other": spec.optimizer is not None
            and spec.optimizer.scheduler != "constant_with_warmup",
        }
        for remedy, is_asked in refused.items():
            if is_asked:
                raise ConfigError(f"trainer.strategy 'plain_ddp' needs {remedy}")

    def needs_own_process(self) -> bool:
        """False: a single rank creates no process group, so it can share the controller's process."""
        return False

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        """Loads the model and creates the rank's worker."""
        from plain_ddp.worker import PlainDdpWorker

        return PlainDdpWorker(spec, rank)


plain_ddp = PlainDdpBackend()
