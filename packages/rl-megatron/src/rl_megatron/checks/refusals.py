"""Refuses what Megatron-Core 0.16.1 or this package cannot run or computes wrongly, if possible before any process
starts.

Every check is a function of the resolved values, whichever section set them, and returns an error message or None.
The checks of parallel sizes are in `mesh_checks`. Imports no torch.
"""

from __future__ import annotations

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
        raise ConfigError(complaint)


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
    "mtp_num_layers": (None, "multi-token prediction is not trained here"),
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


def _fixed_fields(setup: Setup) -> str | None:
    for name, (right, reason) in FIXED_FIELDS.items():
        value = setup.fields.get(name, right)
        if value is not None and value != right:
            return f"{setup.key(name)}: got {value!r}, only {right!r} can be used: {reason}. Leave it out"
    return None


def _attention_backend(setup: Setup) -> str | None:
    name = "attention_backend"
    value = setup.fields.get(name) or "auto"
    if value not in ATTENTION_BACKENDS:
        return f"{setup.key(name)}: got {value!r}; expected one of {', '.join(ATTENTION_BACKENDS)}"
    if value != "auto" and find_spec("transformer_engine") is None:
        return (
            f"{setup.key(name)}: chooses among kernels of Transformer Engine, which is not installed here "
            "(docs/install_gpu.md); leave it out"
        )
    return None


def _recomputation(setup: Setup) -> str | None:
    name = "recompute_granularity"
    if not setup.recomputes or setup.fields.get(name) != "selective":
        return None
    return (
        f"{setup.key(name)}: selective, but trainer.gradient_checkpointing=true recomputes whole layers; set "
        "trainer.gradient_checkpointing=false"
    )


def _fields_set_elsewhere(setup: Setup) -> str | None:
    for name in sorted(setup.passed):
        if name in _OF_THE_MODEL:
            return f"{setup.key(name)}: the model's configuration sets it; leave it out, or choose another model"
        if name in _OF_THE_TRAINER:
            return f"{setup.key(name)}: leave it out and set {_OF_THE_TRAINER[name]}"
        if name == "variable_seq_lengths":
            return f"{setup.key(name)}: the numbers of stages and chunks determine it; leave it out"
    return None


def _transformer_engine(setup: Setup) -> str | None:
    for name in _TRANSFORMER_ENGINE_FIELDS:
        if setup.fields.get(name) and find_spec("transformer_engine") is None:
            return (
                f"{setup.key(name)}: can be used only with Transformer Engine, which is not installed here "
                "(docs/install_gpu.md); leave it out"
            )
    return None


def _fused_gradients(setup: Setup) -> str | None:
    """Refuses fused gradient accumulation without Apex's kernel. Even with Transformer Engine, the output layer is
    Megatron's own, which accumulates gradients with a kernel of Apex."""
    name = "gradient_accumulation_fusion"
    if setup.fields.get(name) and find_spec(GRADIENT_KERNEL) is None:
        return f"{setup.key(name)}: needs Apex's kernel {GRADIENT_KERNEL}, which is not installed here; leave it out"
    return None


def _sequence_parallelism(setup: Setup) -> str | None:
    name, tensor = "sequence_parallel", setup.size("tensor_model_parallel_size")
    value = setup.fields.get(name)
    if value is False and tensor > 1:
        return (
            f"{setup.key(name)}: false with tensor_model_parallel_size={tensor}: Megatron-Core 0.16.1 then sums the "
            "gradients of some norms twice (latent attention) and refuses experts. Leave it out: it is on with "
            "tensor parallelism"
        )
    if value is True and tensor == 1:
        return f"{setup.key(name)}: true needs tensor_model_parallel_size above 1, got 1. Leave it out"
    return None


def _interleaved_sends(setup: Setup) -> str | None:
    """Refuses sends that two interleaved stages would mix up. With two stages, the previous and the next stage are the
    same rank, and batched sends to that rank may arrive in the wrong order."""
    if not setup.is_interleaved or setup.size("pipeline_model_parallel_size") != 2:
        return None
    for name, right in (("batch_p2p_comm", False), ("overlap_p2p_comm", True)):
        if setup.fields.get(name, right) is not right:
            return (
                f"{setup.key(name)}: {setup.fields[name]!r} with two pipeline stages and virtual stages mixes up what "
                f"the stages send to each other (gradients are wrong). Leave it out, or use more stages"
            )
    return None


def _auxiliary_losses(setup: Setup) -> str | None:
    name = "moe_router_load_balancing_type"
    kinds = _as_list(setup.fields.get(name) or "none")
    coefficients = _as_list(setup.fields.get("moe_aux_loss_coeff", 0.0))
    if unknown := [kind for kind in kinds if kind not in ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")]:
        return f"{setup.key(name)}: got {unknown[0]!r}; expected none, aux_loss, seq_aux_loss or global_aux_loss"
    if len(kinds) != len(coefficients):
        return (
            f"{setup.key('moe_aux_loss_coeff')}: {len(coefficients)} coefficients for {len(kinds)} kinds of loss "
            f"({', '.join(kinds)}); set one for each"
        )
    if ("seq_aux_loss", True) not in [(kind, bool(c)) for kind, c in zip(kinds, coefficients, strict=True)]:
        return None
    tensor = setup.size("tensor_model_parallel_size")
    if tensor > 1:
        return (
            f"{setup.key(name)}: seq_aux_loss with tensor_model_parallel_size={tensor} gives router gradients that "
            "differ from one rank's by 4e-3 in Megatron-Core 0.16.1; use aux_loss, or tensor_model_parallel_size=1"
        )
    if setup.is_packed:
        return (
            f"{setup.key(name)}: seq_aux_loss counts a packed micro-batch as one sequence; use aux_loss, or set "
            "trainer.use_sample_packing=false"
        )
    return None


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _replay(setup: Setup) -> str | None:
    name = "moe_enable_routing_replay"
    if not setup.fields.get(name):
        return None
    if setup.shape is not None and not setup.shape.is_moe:
        return f"{setup.key(name)}: the model has no experts, so it has no routes to replay. Leave it out"
    if setup.fields.get("moe_router_fusion"):
        return (
            f"{setup.key('moe_router_fusion')}: the fused router chooses experts itself and ignores replayed routes. "
            f"Leave it out, or set {name}=false"
        )
    if setup.fields.get("moe_expert_capacity_factor") is not None:
        return (
            f"{setup.key('moe_expert_capacity_factor')}: tokens above the capacity would be dropped from the experts "
            f"that the engine used. Leave it out, or set {name}=false"
        )
    return None


def _dispatcher(setup: Setup) -> str | None:
    name = "moe_token_dispatcher_type"
    kind = setup.fields.get(name)
    if kind == "flex" and find_spec("deep_ep") is None:
        return f"{setup.key(name)}: flex needs DeepEP, which is not installed here; use alltoall"
    if kind == "allgather" and setup.size("pipeline_model_parallel_size") > 1:
        return (
            f"{setup.key(name)}: allgather needs micro-batches of one length, which pipeline stages do not have here; "
            "use alltoall"
        )
    return None


def _adapters_of_latent_attention(setup: Setup) -> str | None:
    adapted = setup.adapted & QUERY_KEY_VALUE
    if not adapted or setup.shape is None or setup.shape.latent is None:
        return None
    return (
        f"{setup.where.rpartition('.')[0]}.model.lora.target_modules: {', '.join(sorted(adapted))} cannot have "
        "adapters here, because the model has latent attention; name others (o_proj, gate_proj, up_proj, down_proj)"
    )


def _adapters_of_experts(setup: Setup) -> str | None:
    adapted = setup.adapted & FEED_FORWARD
    if not adapted or setup.shape is None or not setup.shape.is_moe:
        return None
    complaint = (
        f"{setup.where.rpartition('.')[0]}.model.lora.target_modules: {', '.join(sorted(adapted))} of experts would "
        "have adapters"
    )
    for name in ("expert_model_parallel_size", "tensor_model_parallel_size", "expert_tensor_parallel_size"):
        if setup.size(name) > 1:
            return (
                f"{complaint}, whose checkpoints Megatron-Bridge 0.3.1 cannot write with {name}={setup.size(name)}; "
                "name layers of attention, or set it to 1"
            )
    if find_spec("transformer_engine") is not None and setup.fields.get("moe_grouped_gemm"):
        return (
            f"{complaint}, which all experts of a rank would share in grouped products; name layers of attention, or "
            f"set {setup.key('moe_grouped_gemm')}=false"
        )
    if setup.shape.shared_ffn_hidden_size or len(setup.shape.moe_layers) < setup.shape.num_layers:
        # peft 0.21 takes gate_proj, up_proj and down_proj of such a model for the experts' stacked tensors alone.
        return (
            f"{complaint}, and peft 0.21 would not load the adapters that dense layers or shared experts have under "
            "the same names; name layers of attention"
        )
    return None


def _weights_of_experts(setup: Setup) -> str | None:
    """Refuses a Qwen3-MoE router that contradicts the model's `norm_topk_prob`, which determines whether routers
    normalise before or after they choose experts."""
    if setup.model is None or setup.model.model_type != "qwen3_moe":
        return None
    name, right = "moe_router_pre_softmax", not setup.model.norm_topk_prob
    value = setup.fields.get(name)
    if value is None or value == right:
        return None
    when = "before" if right else "after"
    return (
        f"{setup.key(name)}: got {str(value).lower()}, but the model's routers normalise scores {when} they choose "
        "experts; leave it out"
    )


_CHECKS: tuple[Check, ...] = (
    _fixed_fields,
    _fields_set_elsewhere,
    _attention_backend,
    _recomputation,
    _sequence_parallelism,
    _interleaved_sends,
    _auxiliary_losses,
    _replay,
    _transformer_engine,
    _fused_gradients,
    _dispatcher,
    _adapters_of_latent_attention,
    _adapters_of_experts,
    _weights_of_experts,
)
