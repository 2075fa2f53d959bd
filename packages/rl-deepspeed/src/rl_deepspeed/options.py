"""Defines the options of `deepspeed_config`, and the key paths that messages name. Imports no torch, because checking a
configuration imports this module."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from rl_core.interfaces import Role, WorkerSpec
from rl_core.rank_kit.worker_specs import SECTIONS


@attrs.frozen(kw_only=True)
class OffloadParam:
    """Where ZeRO-3 keeps a rank's part of the parameters between uses."""

    device: Literal["none", "cpu"] = "none"
    """`cpu`: in CPU memory; a layer's parameters are copied to the device when the layer is used."""
    pin_memory: bool = False
    """Use page-locked CPU memory: copies are faster, but this memory cannot be swapped out."""


@attrs.frozen(kw_only=True)
class OffloadOptimizer:
    """Where the optimizer's state is kept and the optimizer step is computed."""

    device: Literal["none", "cpu"] = "none"
    """`cpu`: the state is kept in CPU memory, and the step is computed on the CPU."""
    pin_memory: bool = False
    """Use page-locked CPU memory: copies are faster, but this memory cannot be swapped out."""


@attrs.frozen(kw_only=True)
class ZeroOptimization:
    """DeepSpeed's `zero_optimization`."""

    stage: Literal[1, 2, 3] = 3
    """What the ranks partition: with 1 the optimizer's state, with 2 also the gradients, with 3 also the parameters.
    With `trainer.bf16`, 1 trains as 2. With 1 and 2, an untrained model is whole on every rank."""
    offload_param: OffloadParam = OffloadParam()
    """Where parameters are kept; stage 3 only."""
    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    """Where optimizer state is kept; trained models only."""
    sub_group_size: int = 1_000_000_000
    """Stage 3: number of parameters that the optimizer updates at a time."""
    reduce_bucket_size: int = 500_000_000
    """Number of gradient elements that are summed over the ranks at a time."""
    allgather_bucket_size: int = 500_000_000
    """Stages 1 and 2: an even number. No effect: DeepSpeed 0.19.8 gathers all parameters at once after a step."""
    overlap_comm: bool | None = None
    """Overlap gradient sums with backward; None: on with stages 2 and 3 for a trained model. Stage 1 refuses true."""
    contiguous_gradients: bool = True
    """Copy gradients to one contiguous buffer as backward produces them."""
    round_robin_gradients: bool = False
    """Stages 1 and 2 with the optimizer in CPU memory: spread the copying of gradients over the ranks."""
    stage3_max_live_parameters: int = 1_000_000_000
    """Stage 3: number of parameters that may be gathered on a rank at a time."""
    stage3_max_reuse_distance: int = 1_000_000_000
    """Stage 3: a parameter stays gathered if it is used again before this many other parameters are used."""
    stage3_prefetch_bucket_size: int = 50_000_000
    """Stage 3: number of elements that are gathered ahead of their use."""
    stage3_param_persistence_threshold: int = 100_000
    """Stage 3: parameters with fewer elements than this stay whole on every rank."""
    memory_efficient_linear: bool = False
    """Stage 3: use DeepSpeed's own linear function instead of torch's, in the whole process."""


@attrs.frozen(kw_only=True)
class DeepSpeedOptions:
    """`deepspeed_config`: keys of DeepSpeed's configuration, under the names in DeepSpeed's documentation."""

    zero_optimization: ZeroOptimization = ZeroOptimization()
    """How the ranks partition the model."""
    sequence_parallel_size: int = 1
    """Number of ranks that split each sequence (Ulysses); it must divide the number of attention heads."""
    moe_enable_routing_replay: bool = False
    """Mixture-of-Experts policy: route tokens to the experts that the engine chose (R3) in scoring, training and
    recomputation; needs `generator.inference_engine.enable_return_routed_experts`."""
    extra: dict[str, Any] = attrs.field(factory=dict)
    """Further keys of DeepSpeed's configuration, nested as in DeepSpeed's file; keys that other settings determine are
    refused."""


def replay_key(role: Role) -> str:
    """Returns the key path that switches router replay on."""
    return f"{SECTIONS[role]}.deepspeed_config.moe_enable_routing_replay"


def asked_replay_key(spec: WorkerSpec) -> str | None:
    """Returns `replay_key` if router replay is on, else None."""
    return replay_key(spec.role) if spec.options.moe_enable_routing_replay else None
