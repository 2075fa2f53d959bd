"""The entry point. Does not import torch, because it is loaded to check a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from rl_core.errors import ConfigError
from rl_core.interfaces import Backend, RankInfo, Worker, WorkerSpec

if TYPE_CHECKING:
    from rl_core.layout.mesh import Mesh


@attrs.frozen(kw_only=True)
class PlainDdpOptions:
    """The options in `plain_ddp_config`."""

    reduce_in_float64: bool = False
    """Add the ranks' gradients in double precision."""


@attrs.frozen(kw_only=True)
class PlainDdpBackend(Backend):
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
            "trainer.use_sample_packing": (spec.use_sample_packing, "false: rows are padded"),
            "trainer.gradient_checkpointing": (spec.gradient_checkpointing, "false: activations are kept"),
            "trainer.bf16": (spec.bf16, "false: it computes in float32"),
            "trainer.algorithm.advantage_estimator": (
                spec.role == "critic",
                "an estimator without a critic: it has no value head",
            ),
            "trainer.policy.model.lora.rank": (spec.model.lora.rank > 0, "0: it trains all weights"),
            "trainer.policy.model.trainable": (spec.model.trainable is not None, "null: it trains all weights"),
            "trainer.policy.optimizer_config.scheduler": (
                spec.optimizer is not None and spec.optimizer.scheduler != "constant_with_warmup",
                "constant_with_warmup: it has no other",
            ),
            "trainer.policy.optimizer_config.name": (
                spec.optimizer is not None and spec.optimizer.name != "adamw",
                "adamw: it has no other",
            ),
        }
        for key, (is_asked, needed) in refused.items():
            if is_asked:
                raise ConfigError(f"trainer.strategy 'plain_ddp' needs {needed}", key=key)

    def needs_own_process(self) -> bool:
        """False: a single rank creates no process group, so it can share the controller's process."""
        return False

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        """Loads the model and creates the rank's worker."""
        from plain_ddp.worker import PlainDdpWorker

        return PlainDdpWorker(spec, rank)


plain_ddp = PlainDdpBackend()
