"""Refuses what Megatron-Core 0.16.1 or this package cannot run or computes wrongly, if possible before any process
starts.

Every check is a function of the resolved values, whichever section set them, and returns an error message or None.
Checks in `_MESH_CHECKS` find parallel sizes that do not fit together; their messages end with the nearest mesh that
passes all of these checks, if there is one. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import attrs

from rl_core.errors import ConfigError
from rl_core.interfaces import WorkerSpec
from rl_core.layout.mesh import Mesh
from rl_core.layout.stages import LayerRange, pipeline_chunks
from rl_core.rank_kit.model_shapes import ModelShape, model_shape
from rl_core.rank_kit.worker_specs import SECTIONS
from rl_megatron.checks.lora_targets import FEED_FORWARD, QUERY_KEY_VALUE, adapted_layers
from rl_megatron.checks.refused_models import require_not_refused, taken_config
from rl_megatron.options import field_key, transformer_fields

SIZES = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
    "expert_tensor_parallel_size": "expert_tensor",
}
"""Megatron's name of a parallel size → the name in `Mesh`."""


@attrs.frozen(kw_only=True)
class Setup:
    """The settings of one model and its ranks that the checks read."""

    fields: Mapping[str, Any]
    """Fields of Megatron's `TransformerConfig` that are set, whichever section set them."""
    shape: ModelShape | None
    """None if the model is not available yet; checks that need the shape run once it is."""
    model: Any
    """transformers' configuration; None if `shape` is None."""
    world_size: int
    is_packed: bool
    """Whether the sequences of a micro-batch are packed into one stream."""
    where: str
    """Key path of the section `megatron_config`."""
    passed: frozenset[str] = frozenset()
    """Names of the fields that `transformer_config_kwargs` sets."""
    adapted: frozenset[str] = frozenset()
    """Hugging Face's names of the layers that have adapters."""
    recomputes: bool = False
    """Whether `trainer.gradient_checkpointing` is on, which recomputes whole layers."""

    def size(self, name: str) -> int:
        """Returns a parallel size. An unset size is 1, except `expert_tensor_parallel_size`, which then equals the
        tensor-parallel size."""
        default = self.size("tensor_model_parallel_size") if name == "expert_tensor_parallel_size" else 1
        value = self.fields.get(name)
        return default if value is None else value

    def key(self, name: str) -> str:
        """Returns the key path at which the user sets a field."""
        return field_key(name, self.passed, self.where)

    def mesh(self) -> Mesh:
        """Returns the mesh of the ranks. Raises ConfigError if the sizes do not fit the number of ranks."""
        sizes = {ours: self.size(name) for name, ours in SIZES.items()}
        return Mesh(world_size=self.world_size, **sizes)

    def chunks(self, num_layers: int) -> list[LayerRange]:
        """Returns the layers of each model chunk. Raises ConfigError if the fields do not fit the number of layers."""
        return pipeline_chunks(
            num_layers,
            self.size("pipeline_model_parallel_size"),
            virtual_pipeline=self.size("virtual_pipeline_model_parallel_size"),
            num_first=self.fields.get("num_layers_in_first_pipeline_stage"),
            num_last=self.fields.get("num_layers_in_last_pipeline_stage"),
            count_embedding=bool(self.fields.get("account_for_embedding_in_pipeline_split")),
            count_loss=bool(self.fields.get("account_for_loss_in_pipeline_split")),
        )


_PRODUCTS = (
    ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    ("expert_tensor_parallel_size", "expert_model_parallel_size", "pipeline_model_parallel_size"),
)
"""Sizes whose product must divide the number of ranks: of dense layers and of expert layers."""
_END_COUNTS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
Check = Callable[[Setup], "str | None"]
"""Returns `key: what is wrong`, or None."""


def setup_of(spec: WorkerSpec, world_size: int, model: Any = None) -> Setup:
    """Returns the setup that `spec` describes. Raises ConfigError for an unknown field or layer, an unreadable or
    refused model, or `gradient_checkpointing="selective"`.

    Args:
        spec: which model to load and how to train it.
        world_size: number of the model's ranks.
        model: transformers' configuration of the model; None: read it from the model's path if it is there.
    """
    section = SECTIONS[spec.role]
    where = f"{section}.megatron_config"
    if spec.gradient_checkpointing == "selective":
        raise ConfigError(
            f"trainer.gradient_checkpointing=selective: Megatron has its own keys for what is recomputed; set "
            f"{where}.transformer_config_kwargs.recompute_granularity=selective and recompute_modules, with "
            "trainer.gradient_checkpointing=false"
        )
    if model is None:
        model = taken_config(spec.model.path, f"{section}.model.path")
    else:
        require_not_refused(model, spec.model.path, f"{section}.model.path")
    lora = spec.model.lora
    return Setup(
        fields=transformer_fields(spec.options, where),
        shape=None if model is None else model_shape(model.to_dict(), f"{section}.model.path"),
        model=model,
        world_size=world_size,
        is_packed=spec.use_sample_packing,
        where=where,
        passed=frozenset(spec.options.transformer_config_kwargs),
        adapted=frozenset(adapted_layers(lora, section) if lora.rank > 0 else ()),
        recomputes=spec.gradient_checkpointing is True,
    )


def refuse(spec: WorkerSpec, world_size: int, model: Any = None) -> None:
    """Raises ConfigError for the first setting that cannot run or would compute wrong numbers; see `setup_of`."""
    refuse_setup(setup_of(spec, world_size, model))


def refuse_setup(setup: Setup) -> None:
    """Like `refuse`, for a setup that was already built."""
    if (complaint := _sizes_are_positive(setup)) is not None:
        raise ConfigError(complaint)
    if (complaint := _first(_MESH_CHECKS, setup)) is not None:
        raise ConfigError(f"{complaint}. {nearest_mesh(setup)}")
    if (complaint := _first(_CHECKS, setup)) is not None:
        raise ConfigError(complaint)


def nearest_mesh(setup: Setup) -> str:
    """A sentence that names the sizes that pass all mesh checks and are nearest to those of `setup`, or says that no
    sizes pass."""
    names = [name for name in SIZES if (setup.fields.get(name) or 1) > 1]
    best = min(
        (candidate for candidate in _meshes(setup, names) if _first(_MESH_CHECKS, candidate) is None),
        key=lambda candidate: _distance(setup, candidate, names),
        default=None,
    )
    if best is None:
        return f"No mesh of {setup.world_size} ranks fits this model"
    changed = ", ".join(f"{name}={best.size(name)}" for name in names)
    data = best.mesh().data
    counts = "" if all(best.fields.get(n) == setup.fields.get(n) for n in _END_COUNTS) else ", without layer counts"
    return f"Nearest that works on {setup.world_size} ranks: {changed or 'all sizes 1'}{counts} (data parallel {data})"


def _meshes(setup: Setup, names: list[str]) -> Iterator[Setup]:
    """Yields a setup for every combination of sizes whose products divide the number of ranks, on the axes in use, with
    and without virtual stages and layer counts."""
    divisors = [n for n in range(1, setup.world_size + 1) if setup.world_size % n == 0]
    virtual = "virtual_pipeline_model_parallel_size"
    fitting: list[dict[str, int]] = [{}]
    for name in names:
        choices = (setup.size(name), 1) if name == virtual else divisors
        larger = ({**sizes, name: size} for sizes in fitting for size in choices)
        # All combinations of the divisors would be millions on hundreds of ranks.
        fitting = [sizes for sizes in larger if _products_divide(sizes, setup.world_size)]
    even = dict.fromkeys(_END_COUNTS)
    for sizes in fitting:
        chosen = {**setup.fields, **sizes}
        yield attrs.evolve(setup, fields=chosen)
        if any(setup.fields.get(name) is not None for name in _END_COUNTS):
            yield attrs.evolve(setup, fields={**chosen, **even})


def _products_divide(sizes: Mapping[str, int], world_size: int) -> bool:
    return all(world_size % math.prod(sizes.get(name, 1) for name in names) == 0 for names in _PRODUCTS)


def _distance(setup: Setup, candidate: Setup, names: list[str]) -> tuple[float, bool, int]:
    steps = sum(abs(math.log2(candidate.size(name) / setup.size(name))) for name in names)
    gives_counts_up = any(candidate.fields.get(name) != setup.fields.get(name) for name in _END_COUNTS)
    return steps, gives_counts_up, candidate.mesh().data


def _first(checks: tuple[Check, ...], setup: Setup) -> str | None:
    return next((complaint for check in checks if (complaint := check(setup)) is not None), None)


# --- the mesh -------------------------------------------------------------------------------------------------------


def _sizes_are_positive(setup: Setup) -> str | None:
    for name in SIZES:
        value = setup.fields.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            return f"{setup.key(name)}: got {value!r}; expected a whole number of at least 1"
    return None


def _ranks_divide(setup: Setup) -> str | None:
    for names in _PRODUCTS:
        sizes = {name: setup.size(name) for name in names if setup.size(name) > 1}
        if setup.world_size % math.prod(sizes.values()):
            product = " × ".join(f"{name} {size}" for name, size in sizes.items())
            total = f" = {math.prod(sizes.values())}" if len(sizes) > 1 else ""
            return f"{setup.where}: {product}{total} does not divide the {setup.world_size} ranks"
    return None


def _virtual_stages_have_stages(setup: Setup) -> str | None:
    virtual, stages = "virtual_pipeline_model_parallel_size", setup.size("pipeline_model_parallel_size")
    if setup.size(virtual) > 1 and stages == 1:
        return f"{setup.key(virtual)}: {setup.size(virtual)} model chunks per stage need more than one pipeline stage"
    return None


def _layers_split(setup: Setup) -> str | None:
    if setup.shape is None:
        return None
    num_layers, stages = setup.shape.num_layers, setup.size("pipeline_model_parallel_size")
    try:
        chunks = setup.chunks(num_layers)
    except ConfigError as error:
        said = str(error).replace("num_first", _END_COUNTS[0]).replace("num_last", _END_COUNTS[1]).rstrip(".")
        return f"{setup.key('pipeline_model_parallel_size')}: the model's {num_layers} layers: {said}"
    counts_ends = any(setup.fields.get(f"account_for_{end}_in_pipeline_split") for end in ("embedding", "loss"))
    for index, chunk in enumerate(chunks):
        if chunk.num_layers == 0 and not (counts_ends and index in (0, len(chunks) - 1)):
            return (
                f"{setup.key('pipeline_model_parallel_size')}: {num_layers} layers on {stages} stages × "
                f"{setup.size('virtual_pipeline_model_parallel_size')} chunks leave chunk {index} without a layer"
            )
    return None


def _tensor_ranks_divide(setup: Setup) -> str | None:
    if setup.shape is None:
        return None
    shape, tensor = setup.shape, setup.size("tensor_model_parallel_size")
    groups = shape.num_heads if shape.latent else shape.num_kv_heads
    sizes = {
        "attention heads": shape.num_heads,
        "key/value heads (each rank needs at least one)": groups,
        "feed-forward units": shape.ffn_hidden_size,
        "units of the shared experts": shape.shared_ffn_hidden_size,
    }
    return _indivisible(setup, "tensor_model_parallel_size", tensor, sizes)


def _expert_ranks_divide(setup: Setup) -> str | None:
    if setup.shape is None or not setup.shape.is_moe:
        return None
    shape, tensor = setup.shape, setup.size("expert_tensor_parallel_size")
    units = {"units of each expert": shape.expert_ffn_hidden_size}
    experts = {"experts": shape.num_experts}
    return _indivisible(setup, "expert_tensor_parallel_size", tensor, units) or _indivisible(
        setup, "expert_model_parallel_size", setup.size("expert_model_parallel_size"), experts
    )


def _indivisible(setup: Setup, name: str, size: int, sizes: Mapping[str, int]) -> str | None:
    for what, count in sizes.items():
        if count % size:
            return f"{setup.key(name)}: {size} does not divide the model's {count} {what}"
    return None


def _experts_are_there(setup: Setup) -> str | None:
    name = "expert_model_parallel_size"
    if setup.shape is not None and not setup.shape.is_moe and setup.size(name) > 1:
        return f"{setup.key(name)}: got {setup.size(name)}, but the model has no experts"
    return None


def _expert_gradients_are_summed(setup: Setup) -> str | None:
    """megatron-core 0.16.1, tensor_parallel/layers.py:829: with `expert_model_parallel_size=1`, experts' gradients are
    summed over the ranks that sum the gradients of dense layers. These are the wrong ranks if experts and dense layers
    are split differently; the error is as large as the gradient."""
    expert_tensor, tensor = setup.size("expert_tensor_parallel_size"), setup.size("tensor_model_parallel_size")
    has_experts = setup.shape is None or setup.shape.is_moe
    if has_experts and setup.size("expert_model_parallel_size") == 1 and expert_tensor != tensor:
        return (
            f"{setup.key('expert_tensor_parallel_size')}: {expert_tensor} with tensor_model_parallel_size={tensor} and "
            "expert_model_parallel_size=1: Megatron-Core 0.16.1 then sums the experts' gradients over the wrong ranks. "
            "Leave it out, or split the experts (expert_model_parallel_size of 2 or more)"
        )
    return None


def _two_stages_have_no_counts_with_chunks(setup: Setup) -> str | None:
    """megatron-core 0.16.1, `get_transformer_layer_offset`: with virtual stages, Megatron divides by the number of
    stages without a count. This number is 0 if there are two stages and both have a count."""
    has_both = all(setup.fields.get(name) is not None for name in _END_COUNTS)
    if has_both and setup.size("pipeline_model_parallel_size") == 2 and _is_interleaved(setup):
        return (
            f"{setup.key(_END_COUNTS[0])}: Megatron-Core 0.16.1 splits the layers wrongly with two stages, counts for "
            "both of them and virtual stages: set only one of the counts, or leave "
            "virtual_pipeline_model_parallel_size out"
        )
    return None


_MESH_CHECKS: tuple[Check, ...] = (
    _ranks_divide,
    _virtual_stages_have_stages,
    _experts_are_there,
    _tensor_ranks_divide,
    _expert_ranks_divide,
    _expert_gradients_are_summed,
    _layers_split,
    _two_stages_have_no_counts_with_chunks,
)


def _is_interleaved(setup: Setup) -> bool:
    return setup.size("virtual_pipeline_model_parallel_size") > 1


# --- numbers --------------------------------------------------------------------------------------------------------

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
    """Even with Transformer Engine, the output layer is Megatron's own, which accumulates gradients with a kernel of
    Apex."""
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
    """With two stages, the previous and the next stage are the same rank, and batched sends to that rank may arrive in
    the wrong order."""
    if not _is_interleaved(setup) or setup.size("pipeline_model_parallel_size") != 2:
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
        return f"{setup.key(name)}: the model has no experts whose choice could be replayed. Leave it out"
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
        f"{setup.where.rpartition('.')[0]}.model.lora.target_modules: {', '.join(sorted(adapted))} are not layers "
        "of latent attention, whose projections cannot have adapters here; name others (o_proj, gate_proj, up_proj, "
        "down_proj)"
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
    return None


def _weights_of_experts(setup: Setup) -> str | None:
    """The model's `norm_topk_prob` determines whether Qwen3-MoE's routers normalise before or after they choose
    experts."""
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
