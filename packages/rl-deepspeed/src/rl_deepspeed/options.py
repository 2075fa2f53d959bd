"""`deepspeed_config`: its classes, and keys that messages name. Imports no torch: it is loaded to check a
configuration."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from rl_core.interfaces import Role, WorkerSpec
from rl_core.rank_kit.worker_specs import SECTIONS


@attrs.frozen(kw_only=True)
class OffloadParam:
    """Where ZeRO-3 keeps its part of the parameters between uses."""

    device: Literal["none", "cpu"] = "none"
    """`cpu`: in CPU memory; a layer's are copied for its use."""
    pin_memory: bool = False
    """Page-locked CPU memory: faster copies, memory that nothing else can have."""


@attrs.frozen(kw_only=True)
class OffloadOptimizer:
    """Where the optimizer's state is, and where its step is computed."""

    device: Literal["none", "cpu"] = "none"
    """`cpu`: in CPU memory, and the step on the CPU."""
    pin_memory: bool = False
    """Page-locked CPU memory: faster copies, memory that nothing else can have."""


@attrs.frozen(kw_only=True)
class ZeroOptimization:
    """DeepSpeed's `zero_optimization`."""

    stage: Literal[1, 2, 3] = 3
    """Ranks share the optimizer's state (1), the gradients too (2), the parameters too (3). A model that is not trained
    is whole on every rank with 1 and 2."""
    offload_param: OffloadParam = OffloadParam()
    """Stage 3."""
    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    """Of a model that is trained."""
    sub_group_size: int = 1_000_000_000
    """Stage 3: parameters that the optimizer steps at a time."""
    reduce_bucket_size: int = 500_000_000
    """Elements whose gradients are summed over the ranks at a time."""
    allgather_bucket_size: int = 500_000_000
    """Stages 1 and 2: elements that are gathered at a time after a step."""
    overlap_comm: bool | None = None
    """Sum gradients while backward goes on; None: DeepSpeed's choice for the stage. Not with stage 1."""
    contiguous_gradients: bool = True
    """Gradients are copied to one buffer as they come."""
    round_robin_gradients: bool = False
    """Stages 1 and 2 with the optimizer in CPU memory: copies of gradients are spread over the ranks."""
    stage3_max_live_parameters: int = 1_000_000_000
    """Parameters that may be whole on a rank at a time."""
    stage3_max_reuse_distance: int = 1_000_000_000
    """A parameter that is used again within so many stays whole."""
    stage3_prefetch_bucket_size: int = 50_000_000
    """Elements that are gathered ahead of their use."""
    stage3_param_persistence_threshold: int = 100_000
    """Parameters with fewer elements stay whole on every rank."""
    zero_hpz_partition_size: int = 1
    """Stage 3: ranks of a node that hold a second copy of the parameters between them; 1: none."""
    memory_efficient_linear: bool = False
    """Stage 3: DeepSpeed's own linear function in place of torch's, in the whole process."""


@attrs.frozen(kw_only=True)
class DeepSpeedOptions:
    """`deepspeed_config`: keys of DeepSpeed's configuration, as its documentation has them."""

    zero_optimization: ZeroOptimization = ZeroOptimization()
    """How the ranks share the model."""
    sequence_parallel_size: int = 1
    """Ranks that split every sequence between them (Ulysses); divides the number of attention heads."""
    moe_enable_routing_replay: bool = False
    """Policy with a Mixture of Experts: tokens go to the experts that the engine sent them to (R3), in scoring, in
    training and in recomputation; together with `generator.inference_engine.enable_return_routed_experts`."""
    extra: dict[str, Any] = attrs.field(factory=dict)
    """Further keys of DeepSpeed's configuration, nested as there; those that other keys here decide are refused."""


def replay_key(role: Role) -> str:
    """The key that switches router replay on."""
    return f"{SECTIONS[role]}.deepspeed_config.moe_enable_routing_replay"


def asked_replay_key(spec: WorkerSpec) -> str | None:
    """`replay_key` where it is on."""
    return replay_key(spec.role) if spec.options.moe_enable_routing_replay else None
