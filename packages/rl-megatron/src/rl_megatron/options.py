"""The options in `megatron_config`, and the fields of Megatron's classes that they set. Imports no torch."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Literal

import attrs

from rl_core.errors import ConfigError
from rl_core.layout.mesh import Mesh
from rl_megatron.megatron_fields import require_fields


@attrs.frozen(kw_only=True)
class DdpOptions:
    """`ddp_config`: how gradients are summed over ranks, once per optimizer step (not per micro-batch)."""

    grad_reduce_in_fp32: bool = True
    """Keep and sum gradients in float32 when `trainer.bf16` is set."""
    overlap_grad_reduce: bool = False
    """True is refused: gradients accumulate over calls of `forward_backward`, so no micro-batch is known to be the
    last."""
    overlap_param_gather: bool = False
    """True is refused: weights must be complete when they are used for scoring, saved or published."""
    pad_buckets_for_high_nccl_busbw: bool = False
    """Pad each gradient bucket to a multiple of 65,536 elements, which NCCL reduces faster over many ranks."""


@attrs.frozen(kw_only=True)
class LoraOptions:
    """`lora_config`: how the adapters of `model.lora` are made."""

    lora_type: Literal["lora", "canonical_lora"] = "lora"
    """`lora`: one adapter per fused matrix (query-key-value, gate-up); `canonical_lora`: one adapter per part of such a
    matrix."""


@attrs.frozen(kw_only=True)
class MegatronOptions:
    """`megatron_config`. A key that sets a field of Megatron's has the field's name. Set other fields in the sections
    that end in `_config_kwargs`."""

    tensor_model_parallel_size: int = 1
    """Ranks that split each matrix and, between matrices, the tokens (sequence parallelism)."""
    pipeline_model_parallel_size: int = 1
    """Ranks that split the layers."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Model chunks on each pipeline stage; more than one switches the interleaved schedule on."""
    num_layers_in_first_pipeline_stage: int | None = None
    """Number of layers on the first pipeline stage; None: an equal share."""
    num_layers_in_last_pipeline_stage: int | None = None
    """Number of layers on the last pipeline stage; None: an equal share."""
    context_parallel_size: int = 1
    """Number n of ranks that split each sequence into 2n chunks; rank i gets chunks i and 2n - 1 - i."""
    expert_model_parallel_size: int = 1
    """Ranks that split the experts of a layer."""
    expert_tensor_parallel_size: int | None = None
    """Ranks that split each expert's matrices; None: as many as `tensor_model_parallel_size`."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens reach their experts' ranks."""
    moe_router_load_balancing_type: str = "none"
    """`none` or `aux_loss`, which balances the load of the experts over each micro-batch of each data-parallel rank."""
    moe_aux_loss_coeff: float = 0.0
    """Weight of the auxiliary loss. The losses of micro-batches are averaged, each weighted by its tokens."""
    moe_grouped_gemm: bool = True
    """Compute all experts of a rank in one grouped matrix product, if Transformer Engine is installed."""
    moe_router_score_function: Literal["softmax", "sigmoid"] | None = None
    """How logits become routing scores; None: as in the model's architecture."""
    moe_router_enable_expert_bias: bool | None = None
    """Add a bias per expert when experts are chosen; None: as in the model's architecture."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = "fp32"
    """Dtype of the router's logits and probabilities; None: the model's dtype (DeepSeek: `fp32`)."""
    moe_enable_routing_replay: bool = False
    """Mixture-of-Experts policy: route tokens to recorded experts in training and recomputation, and also in scoring if
    the engine recorded them."""
    moe_routing_replay_source: Literal["rollout", "scoring"] = "rollout"
    """Where routes are recorded. `rollout`: in the engine (R3; needs
    `generator.inference_engine.enable_return_routed_experts`); `scoring`: in the policy's own scoring pass (R2)."""
    moe_per_layer_logging: bool = False
    """Report auxiliary losses also per layer."""
    freeze_moe_router: bool = False
    """Do not train the routers."""
    lora_config: LoraOptions = LoraOptions()
    """How LoRA adapters are made."""
    ddp_config: DdpOptions = DdpOptions()
    """How gradients are summed."""
    transformer_config_kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    """Further fields of Megatron's `TransformerConfig` (or `MLATransformerConfig`)."""
    optimizer_config_kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    """Fields of Megatron's `OptimizerConfig`; only values that training uses anyway are accepted."""
    empty_cuda_cache: bool = True
    """Release cached memory to the driver when the model is offloaded."""


_OWN_FIELDS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "moe_token_dispatcher_type",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_grouped_gemm",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_router_dtype",
    "moe_enable_routing_replay",
    "moe_per_layer_logging",
)
"""Options that have the same name as a field of `TransformerConfig`."""


def transformer_fields(options: MegatronOptions, where: str = "megatron_config") -> dict[str, Any]:
    """Fields of `TransformerConfig` that the options set. None keeps the model's own value.

    Raises:
        ConfigError: a field is unknown, or an option and `transformer_config_kwargs` set it to different values.
    """
    passed = options.transformer_config_kwargs
    require_fields(passed, "TransformerConfig", f"{where}.transformer_config_kwargs")
    fields = {name: getattr(options, name) for name in _OWN_FIELDS}
    plain = MegatronOptions()
    for name, value in passed.items():
        if name in fields and fields[name] not in (getattr(plain, name), value):
            raise ConfigError(
                f"got {value!r}, but {where}.{name} is {fields[name]!r}; set only {where}.{name}",
                key=f"{where}.transformer_config_kwargs.{name}",
            )
    return {**fields, **passed}


def field_key(name: str, passed: Container[str], where: str = "megatron_config") -> str:
    """Key path where the user sets a field of `TransformerConfig`; `passed` holds the fields that are in
    `transformer_config_kwargs`."""
    return f"{where}.transformer_config_kwargs.{name}" if name in passed else f"{where}.{name}"


_WITHOUT_EFFECT_ON_LOGPROBS = frozenset(
    {
        "sequence_parallel",
        "attention_backend",
        "batch_p2p_comm",
        "overlap_p2p_comm",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "moe_token_dispatcher_type",
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_enable_routing_replay",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
    }
)
"""Further fields of `TransformerConfig` that do not change the log-probs of a batch without recorded routes. They
determine where, when or with which kernel something is computed, add to the loss, or replay routes."""


def one_rank_options(options: MegatronOptions) -> MegatronOptions:
    """Returns the options with which a single rank computes the same log-probs as all ranks do with `options`."""
    plain = {field.name: field.default for field in attrs.fields(MegatronOptions)}
    mesh = {name for name in _OWN_FIELDS if name.endswith("_size") or name.startswith("num_layers_in")}
    dropped = mesh | _WITHOUT_EFFECT_ON_LOGPROBS
    passed = {name: value for name, value in options.transformer_config_kwargs.items() if name not in dropped}
    return attrs.evolve(
        options,
        **{name: plain[name] for name in sorted(dropped & plain.keys())},
        freeze_moe_router=False,
        lora_config=LoraOptions(),
        optimizer_config_kwargs={},
        transformer_config_kwargs=passed,
    )


def optimizer_fields(options: MegatronOptions, where: str = "megatron_config") -> dict[str, Any]:
    """Returns the fields of `OptimizerConfig` that the options set. Raises ConfigError for an unknown field."""
    require_fields(options.optimizer_config_kwargs, "OptimizerConfig", f"{where}.optimizer_config_kwargs")
    return dict(options.optimizer_config_kwargs)


def mesh_of(options: MegatronOptions, world_size: int, where: str = "megatron_config") -> Mesh:
    """The mesh of `world_size` ranks. Raises ConfigError if the mesh does not fit this number of ranks."""
    fields = transformer_fields(options, where)
    return Mesh(
        world_size=world_size,
        tensor=fields["tensor_model_parallel_size"],
        pipeline=fields["pipeline_model_parallel_size"],
        virtual_pipeline=fields["virtual_pipeline_model_parallel_size"] or 1,
        context=fields["context_parallel_size"],
        expert=fields["expert_model_parallel_size"],
        expert_tensor=fields["expert_tensor_parallel_size"] or 0,
    )
