"""`fsdp_config`: its class, and keys that messages name. Imports no torch: it is loaded to check a configuration."""

from __future__ import annotations

from typing import Literal

import attrs

from rl_core.interfaces import Role, WorkerSpec
from rl_core.rank_kit.worker_specs import SECTIONS


@attrs.frozen(kw_only=True)
class MixedPrecision:
    """Dtypes between ranks when `trainer.bf16` is set; in a float32 run all is float32."""

    param_dtype: Literal["bf16", "fp32"] = "bf16"
    """In which parameters are gathered and computed with."""
    reduce_dtype: Literal["bf16", "fp32"] = "fp32"
    """In which gradients are summed over the ranks."""


@attrs.frozen(kw_only=True)
class FsdpOptions:
    """`fsdp_config`. One rank shards nothing: there only `cpu_offload` has a meaning, on an accelerator."""

    fsdp_size: int = -1
    """Ranks that share one copy of the parameters (hybrid sharding: the copies split the batch); -1 for all ranks."""
    sequence_parallel_size: int = 1
    """Ranks that split every sequence between them (Ulysses); divides the number of attention heads."""
    reshard_after_forward: bool = True
    """Let a layer's parameters go between forward and backward; false gathers once and needs memory for all."""
    mixed_precision: MixedPrecision = MixedPrecision()
    """Dtypes of what travels between ranks."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in CPU memory; a layer's parameters are copied for its use."""
    moe_enable_routing_replay: bool = False
    """Policy with a Mixture of Experts: tokens go to the experts that the engine sent them to (R3), in scoring, in
    training and in recomputation; together with `generator.inference_engine.enable_return_routed_experts`."""


def replay_key(role: Role) -> str:
    """The key that switches router replay on."""
    return f"{SECTIONS[role]}.fsdp_config.moe_enable_routing_replay"


def asked_replay_key(spec: WorkerSpec) -> str | None:
    """`replay_key` where it is on."""
    return replay_key(spec.role) if spec.options.moe_enable_routing_replay else None
