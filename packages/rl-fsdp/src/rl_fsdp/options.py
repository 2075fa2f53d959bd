"""Defines the options of `fsdp_config`, and the key paths that messages name. Imports no torch, because checking a
configuration imports this module."""

from __future__ import annotations

from typing import Literal

import attrs

from rl_core.interfaces import Role, WorkerSpec
from rl_core.rank_kit.worker_specs import SECTIONS


@attrs.frozen(kw_only=True)
class MixedPrecision:
    """Dtypes of gathered parameters and of gradient sums if `trainer.bf16` is set. Without `trainer.bf16`, both are the
    parameters' own dtype."""

    param_dtype: Literal["bf16", "fp32"] = "bf16"
    """Dtype in which parameters are gathered. Matrix products are computed in bfloat16 with either dtype."""
    reduce_dtype: Literal["bf16", "fp32"] = "fp32"
    """Dtype in which gradients are summed over the ranks."""


@attrs.frozen(kw_only=True)
class FsdpOptions:
    """`fsdp_config`: how FSDP shards a model. A single rank shards nothing. Of the options for sharding, it follows
    only `cpu_offload`, and only on an accelerator."""

    fsdp_size: int = -1
    """Number of ranks that share one copy of the parameters; -1: all ranks. If there are several copies (hybrid
    sharding), they split the batch."""
    sequence_parallel_size: int = 1
    """Number of ranks that split each sequence (Ulysses); it must divide the number of attention heads."""
    reshard_after_forward: bool = True
    """Free a layer's gathered parameters between forward and backward. With false, a layer is gathered only once per
    micro-batch, and all layers stay gathered until backward."""
    mixed_precision: MixedPrecision = MixedPrecision()
    """Dtypes of gathered parameters and of gradient sums."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in CPU memory; a layer's parameters are copied to the
    accelerator when the layer is used."""
    moe_enable_routing_replay: bool = False
    """Mixture-of-Experts policy: route tokens to the experts that the engine chose (R3) in scoring, training and
    recomputation; needs `generator.inference_engine.enable_return_routed_experts`."""


def replay_key(role: Role) -> str:
    """Returns the key path that switches router replay on."""
    return f"{SECTIONS[role]}.fsdp_config.moe_enable_routing_replay"


def asked_replay_key(spec: WorkerSpec) -> str | None:
    """Returns `replay_key` if router replay is on, else None."""
    return replay_key(spec.role) if spec.options.moe_enable_routing_replay else None
