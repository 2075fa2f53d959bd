"""Refuses what Megatron-Core 0.16.1 or this package cannot run or computes wrongly, if possible before any process
starts.

Every check is a function of the resolved values, whichever section set them, and returns an error or None.
The checks of parallel sizes are in `mesh_checks`. Imports no torch.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

from rl_core.errors import ConfigError
from rl_core.interfaces import WorkerSpec
from rl_megatron.checks.lora_targets import FEED_FORWARD, QUERY_KEY_VALUE
from rl_megatron.checks.mesh_checks import refuse_mesh
from rl_megatron.checks.model_setup import Check, Setup, first_complaint, setup_of


def refuse(spec: WorkerSpec, world_size: int, model: Any = None) -> None:
    """Raises ConfigError for the first setting that cannot run or would compute wrong numbers; see `setup_of`."""
    refuse_setup(setup_of(spec, world_size, model))


def refuse_setup(setup: Setup) -> None:
    """Like `refuse`, for a setup that was already built."""
    refuse_mesh(setup)
    if (complaint := first_complaint(_CHECKS, setup)) is not None:
        raise complaint


_NO_CUDA_GRAPHS = "a graph is captured for one shape, and micro-batches have different lengths"
FIXED_FIELDS: dict[str, tuple[Any, str]] = {
    "calculate_per_token_loss": (True, "losses are sums over the mini-batch; Megatron would average micro-batches"),
    "attention_dropout": (0.0, "log-probs would differ from the engine's and depend on the micro-batches"),
    "hidden_dropout": (0.0, "log-probs would differ from the engine's and depend on the micro-batches"),
    "moe_input_jitter_eps": (None, "the router would see noise that the engine does not have"),
    "moe_router_force_load_balancing": (False, "it routes randomly; meant for benchmarks"),
    "pipeline_model_parallel_layout": (
        None,
        "data and router replay do not support a free layout; use num_layers_in_first_pipeline_stage and "
        "num_layers_in_last_pipeline_stage",
    ),
    "moe_expert_capacity_factor": (
        None,
        "tokens above the capacity would be dropped, so log-probs would depend on the micro-batches",
    ),
    **dict.fromkeys(("moe_token_dropping", "moe_pad_expert_input_to_capacity"), (False, "experts drop no tokens here")),
    "mtp_num_layers": (None, "multi-token prediction is not trained here"),
    "mtp_loss_scaling_factor": (0.1, "multi-token prediction is not trained here, so its loss has no effect"),
    "dsa_indexer_loss_coeff": (None, "indexers of sparse attention are not trained here"),
    "qk_clip": (False, "only Megatron's own training loop clips, so it would have no effect"),
    "fp16": (False, "there is no loss scaling here; use trainer.bf16"),
    "fp8": (None, "log-probs would depend on the micro-batches"),
    "fp4": (None, "log-probs would depend on the micro-batches"),
    "test_mode": (False, "its check of query and key norms fails for RMS norms, which have no bias"),
    "enable_autocast": (False, "it would replace chosen dtypes, such as moe_router_dtype"),
    "perform_initialization": (True, "without it the gradient norm leaves out all tensor ranks but the first"),
    "softmax_type": (
        "vanilla",
        "models with attention sinks do not run here, and the gradient norm leaves out the sinks",
    ),
    "num_microbatches_with_partial_activation_checkpoints": (
        None,
        "router replay must know which layers are computed again",
    ),
    "num_distributed_optimizer_instances": (1, "copies of the distributed optimizer are not tested"),
    **dict.fromkeys(("enable_cuda_graph", "external_cuda_graph"), (False, _NO_CUDA_GRAPHS)),
    "cuda_graph_impl": ("none", _NO_CUDA_GRAPHS),
    "tp_comm_overlap": (
        False,
        "it needs buffers that Megatron's training program makes, for micro-batches of one fixed length",
    ),
    "overlap_moe_expert_parallel_comm": (False, "it requires Megatron's own forward step"),
    "delay_wgrad_compute": (False, "it needs overlap_moe_expert_parallel_comm, which cannot be used"),
}
"""Fields for which only one value is right here, and why."""
_OF_THE_MODEL = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "num_moe_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_shared_expert_intermediate_size",
    "multi_latent_attention",
)
_OF_THE_TRAINER = {
    "bf16": "trainer.bf16",
    "params_dtype": "trainer.bf16",
    "pipeline_dtype": "trainer.bf16",
    "autocast_dtype": "trainer.bf16",
}
_TRANSFORMER_ENGINE_FIELDS = (
    "apply_rope_fusion",
    "masked_softmax_fusion",
    "moe_permute_fusion",
    "moe_router_fusion",
    "moe_shared_expert_overlap",
    "use_te_activation_func",
    "use_te_rng_tracker",
)
"""Fields that can be used only with Transformer Engine."""
ATTENTION_BACKENDS = ("auto", "flash", "fused", "unfused")
"""Values of `attention_backend` that can be used: names of Megatron's `AttnBackend`."""
GRADIENT_KERNEL = "fused_weight_gradient_mlp_cuda"
"""Module of Apex with the kernel that adds a weight's gradient to its main gradient."""


def _fixed_fields(setup: Setup) -> ConfigError | None:
    for name, (right, reason) in FIXED_FIELDS.items():
        value = setup.fields.get(name, right)
        if value is not None and value != right:
            return ConfigError(
                f"got {value!r}, only {right!r} can be used: {reason}. Leave it out", key=setup.key(name)
            )
    return None


def _attention_backend(setup: Setup) -> ConfigError | None:
    name = "attention_backend"
    value = setup.fields.get(name) or "auto"
    if value not in ATTENTION_BACKENDS:
        return ConfigError(f"got {value!r}; expected one of {', '.join(ATTENTION_BACKENDS)}", key=setup.key(name))
    if value != "auto" and find_spec("transformer_engine") is None:
        return ConfigError(
            "chooses among kernels of Transformer Engine, which is not installed here (docs/install_gpu.md); leave it "
            "out",
            key=setup.key(name),
        )
    return None


def _recomputation(setup: Setup) -> ConfigError | None:
    name = "recompute_granularity"
    if not setup.recomputes or setup.fields.get(name) != "selective":
        return None
    return ConfigError(
        "selective, but trainer.gradient_checkpointing=true recomputes whole layers; set "
        "trainer.gradient_checkpointing=false",
        key=setup.key(name),
    )


def _fields_set_elsewhere(setup: Setup) -> ConfigError | None:
    for name in sorted(setup.passed):
        if name in _OF_THE_MODEL:
            return ConfigError(
                "the model's configuration sets it; leave it out, or choose another model", key=setup.key(name)
            )
        if name in _OF_THE_TRAINER:
            return ConfigError(f"leave it out and set {_OF_THE_TRAINER[name]}", key=setup.key(name))
        if name == "variable_seq_lengths":
            return ConfigError("the numbers of stages and chunks determine it; leave it out", key=setup.key(name))
    return None


def _transformer_engine(setup: Setup) -> ConfigError | None:
    for name in _TRANSFORMER_ENGINE_FIELDS:
        if setup.fields.get(name) and find_spec("transformer_engine") is None:
            return ConfigError(
                "can be used only with Transformer Engine, which is not installed here (docs/install_gpu.md); leave it "
                "out",
                key=setup.key(name),
            )
    return None


def _fused_gradients(setup: Setup) -> ConfigError | None:
    """Refuses fused gradient accumulation without Apex's kernel. Even with Transformer Engine, the output layer is
    Megatron's own, which accumulates gradients with a kernel of Apex."""
    name = "gradient_accumulation_fusion"
    if setup.fields.get(name) and find_spec(GRADIENT_KERNEL) is None:
        return ConfigError(
            f"needs Apex's kernel {GRADIENT_KERNEL}, which is not installed here; leave it out", key=setup.key(name)
        )
    return None


def _sequence_parallelism(setup: Setup) -> ConfigError | None:
    name, tensor = "sequence_parallel", setup.size("tensor_model_parallel_size")
    value = setup.fields.get(name)
    if value is False and tensor > 1:
        return ConfigError(
            f"false with tensor_model_parallel_size={tensor}: Megatron-Core 0.16.1 then sums the gradients of some "
            "norms twice (latent attention) and refuses experts. Leave it out: it is on with tensor parallelism",
            key=setup.key(name),
        )
    if value is True and tensor == 1:
        return ConfigError("true needs tensor_model_parallel_size above 1, got 1. Leave it out", key=setup.key(name))
    return None


def _interleaved_sends(setup: Setup) -> ConfigError | None:
    """Refuses sends that two interleaved stages would mix up. With two stages, the previous and the next stage are the
    same rank, and batched sends to that rank may arrive in the wrong order."""
    if not setup.is_interleaved or setup.size("pipeline_model_parallel_size") != 2:
        return None
    for name, right in (("batch_p2p_comm", False), ("overlap_p2p_comm", True)):
        if setup.fields.get(name, right) is not right:
            return ConfigError(
                f"{setup.fields[name]!r} with two pipeline stages and virtual stages mixes up what the stages send to "
                "each other (gradients are wrong). Leave it out, or use more stages",
                key=setup.key(name),
            )
    return None


_BALANCING: dict[str, str | None] = {
    "none": None,
    "aux_loss": None,
    "seq_aux_loss": "its gradient depends on the number of sequences in a micro-batch (Megatron-Core 0.16.1)",
    "global_aux_loss": "it counts the tokens of the micro-batches so far, so its gradient depends on their order",
}
"""Megatron's load-balancing losses → why a loss cannot be used; None: it can. tests/megatron/test_auxiliary_losses.py
measures the differences."""


def _balancing_losses(setup: Setup) -> ConfigError | None:
    name, coefficient = "moe_router_load_balancing_type", "moe_aux_loss_coeff"
    kinds = _as_list(setup.fields.get(name) or "none")
    coefficients = [value or 0.0 for value in _as_list(setup.fields.get(coefficient))]
    if unknown := [kind for kind in kinds if kind not in _BALANCING]:
        return ConfigError(f"got {unknown[0]!r}; expected none or aux_loss", key=setup.key(name))
    if len(kinds) != len(coefficients):
        return ConfigError(
            f"{len(coefficients)} coefficients for {len(kinds)} kinds of loss ({', '.join(kinds)}); set one for each",
            key=setup.key(coefficient),
        )
    if len(set(kinds)) < len(kinds):
        return ConfigError(
            f"got {', '.join(kinds)}; Megatron would use only the first of two equal kinds", key=setup.key(name)
        )
    for kind, value in zip(kinds, coefficients, strict=True):
        if value < 0:
            return ConfigError(f"got {value:g}; expected 0 or more", key=setup.key(coefficient))
        if value and kind == "none":
            return ConfigError(
                f"got {value:g}, but {name} is none; set {setup.key(name)}=aux_loss", key=setup.key(coefficient)
            )
        if value and (reason := _BALANCING[kind]):
            return ConfigError(f"got {kind}, but {reason}; use aux_loss", key=setup.key(name))
    return None


def _losses_of_routers(setup: Setup) -> ConfigError | None:
    """Refuses losses that a model's routers do not have, or whose gradient Megatron-Core 0.16.1 scales down."""
    z_coefficient = setup.fields.get("moe_z_loss_coeff") or 0.0
    weights = {
        "moe_z_loss_coeff": z_coefficient,
        "moe_aux_loss_coeff": any(_as_list(setup.fields["moe_aux_loss_coeff"])),
    }
    used = [name for name, weight in weights.items() if weight]
    if not used:
        return None
    if setup.shape is not None and not setup.shape.is_moe:
        return ConfigError("the model has no experts, so it has no such loss. Leave it out", key=setup.key(used[0]))
    if setup.fields.get("moe_router_fusion"):
        return ConfigError(
            f"with a fused router, the loss of {used[0]} counts padding, and tensor or context parallelism scales it "
            f"down. Leave it out, or set {used[0]}=0",
            key=setup.key("moe_router_fusion"),
        )
    sizes = {name: setup.size(name) for name in ("tensor_model_parallel_size", "context_parallel_size")}
    parts = math.prod(sizes.values())
    if z_coefficient < 0 or (z_coefficient and parts > 1):
        split = " and ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        reason = (
            f"Megatron-Core 0.16.1 adds only 1/{parts} of the z-loss's gradient with {split}. Leave it out, or split "
            "the model only with expert_model_parallel_size and pipeline_model_parallel_size"
        )
        return ConfigError(
            f"got {z_coefficient:g}; {reason if parts > 1 else 'expected 0 or more'}", key=setup.key("moe_z_loss_coeff")
        )
    return None


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _replay(setup: Setup) -> ConfigError | None:
    name = "moe_enable_routing_replay"
    if not setup.fields.get(name):
        return None
    if setup.shape is not None and not setup.shape.is_moe:
        return ConfigError("the model has no experts, so it has no routes to replay. Leave it out", key=setup.key(name))
    if setup.fields.get("moe_router_fusion"):
        return ConfigError(
            f"the fused router chooses experts itself and ignores replayed routes. Leave it out, or set {name}=false",
            key=setup.key("moe_router_fusion"),
        )
    return None


def _dispatcher(setup: Setup) -> ConfigError | None:
    name = "moe_token_dispatcher_type"
    kind = setup.fields.get(name)
    if kind == "flex" and find_spec("deep_ep") is None:
        return ConfigError("flex needs DeepEP, which is not installed here; use alltoall", key=setup.key(name))
    if kind == "allgather" and setup.size("pipeline_model_parallel_size") > 1:
        return ConfigError(
            "allgather needs micro-batches of one length, which pipeline stages do not have here; use alltoall",
            key=setup.key(name),
        )
    return None


def _adapters_of_latent_attention(setup: Setup) -> ConfigError | None:
    adapted = setup.adapted & QUERY_KEY_VALUE
    if not adapted or setup.shape is None or setup.shape.latent is None:
        return None
    return ConfigError(
        f"{', '.join(sorted(adapted))} cannot have adapters here, because the model has latent attention; name others "
        "(o_proj, gate_proj, up_proj, down_proj)",
        key=f"{setup.where.rpartition('.')[0]}.model.lora.target_modules",
    )


def _adapters_of_experts(setup: Setup) -> ConfigError | None:
    adapted = setup.adapted & FEED_FORWARD
    if not adapted or setup.shape is None or not setup.shape.is_moe:
        return None
    problem = None
    sizes = ("expert_model_parallel_size", "tensor_model_parallel_size", "expert_tensor_parallel_size")
    if split := next((name for name in sizes if setup.size(name) > 1), None):
        problem = (
            f"whose checkpoints Megatron-Bridge 0.3.1 cannot write with {split}={setup.size(split)}; name layers of "
            "attention, or set it to 1"
        )
    elif find_spec("transformer_engine") is not None and setup.fields.get("moe_grouped_gemm"):
        problem = (
            "which all experts of a rank would share in grouped products; name layers of attention, or set "
            f"{setup.key('moe_grouped_gemm')}=false"
        )
    elif setup.shape.shared_ffn_hidden_size or len(setup.shape.moe_layers) < setup.shape.num_layers:
        # peft 0.21 takes gate_proj, up_proj and down_proj of such a model for the experts' stacked tensors alone.
        problem = (
            "and peft 0.21 would not load the adapters that dense layers or shared experts have under the same names; "
            "name layers of attention"
        )
    if problem is None:
        return None
    return ConfigError(
        f"{', '.join(sorted(adapted))} of experts would have adapters, {problem}",
        key=f"{setup.where.rpartition('.')[0]}.model.lora.target_modules",
    )


def _weights_of_experts(setup: Setup) -> ConfigError | None:
    """Refuses a Qwen3-MoE router that contradicts the model's `norm_topk_prob`, which determines whether routers
    normalise before or after they choose experts."""
    if setup.model is None or setup.model.model_type != "qwen3_moe":
        return None
    name, right = "moe_router_pre_softmax", not setup.model.norm_topk_prob
    value = setup.fields.get(name)
    if value is None or value == right:
        return None
    when = "before" if right else "after"
    return ConfigError(
        f"got {str(value).lower()}, but the model's routers normalise scores {when} they choose experts; leave it out",
        key=setup.key(name),
    )


_CHECKS: tuple[Check, ...] = (
    _fixed_fields,
    _fields_set_elsewhere,
    _attention_backend,
    _recomputation,
    _sequence_parallelism,
    _interleaved_sends,
    _balancing_losses,
    _losses_of_routers,
    _replay,
    _transformer_engine,
    _fused_gradients,
    _dispatcher,
    _adapters_of_latent_attention,
    _adapters_of_experts,
    _weights_of_experts,
)
