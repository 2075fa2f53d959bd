"""Builds this rank's part of a Megatron model and loads the weights of a Hugging Face model into it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model
from torch import Tensor
from transformers import AutoConfig

from rl_core.errors import ConfigError
from rl_core.interfaces import WorkerSpec
from rl_core.rank_kit.weight_buckets import broken_weights_file
from rl_core.rank_kit.worker_specs import SECTIONS
from rl_megatron.checks.refusals import GRADIENT_KERNEL, refuse
from rl_megatron.model.bridge import HAS_TRANSFORMER_ENGINE, AutoBridge
from rl_megatron.model.layers import layer_specs
from rl_megatron.model.lora import add_adapters
from rl_megatron.model.rotary import rotary_fields, set_frequencies
from rl_megatron.model.trained import freeze_others, keep_input_gradients
from rl_megatron.model.value_head import ValueHead, load_head, put_heads
from rl_megatron.options import transformer_fields
from rl_megatron.place import Place, embedding_group

_WITHOUT_TRANSFORMER_ENGINE: dict[str, Any] = {
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "cross_entropy_loss_fusion": False,
    "masked_softmax_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_shared_expert_overlap": False,
    "persist_layer_norm": False,
}
"""Fields of `TransformerConfig` that select kernels of Transformer Engine, and related optimisations."""


def open_bridge(spec: WorkerSpec, world_size: int) -> Any:
    """Opens the model of `spec` with Megatron-Bridge. Raises ConfigError if it is missing, damaged or refused."""
    path, where = spec.model.path, f"{SECTIONS[spec.role]}.model.path"
    assert path is not None
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path!r} is not a Hugging Face model: {error}", key=where) from error
    if (broken := broken_weights_file(path)) is not None:
        raise ConfigError(
            f"{broken} is truncated or not a safetensors file; download or save the model again", key=where
        )
    if Path(path).is_dir() and not any(Path(path).glob("*.safetensors")):
        raise ConfigError(
            f"{path} has no .safetensors file, and Megatron-Bridge 0.3.1 reads no other format; load the model with "
            "transformers and save it again (save_pretrained)",
            key=where,
        )
    refuse(spec, world_size, config)  # the model may have been downloaded only now
    bridge = AutoBridge.from_hf_pretrained(path, torch_dtype=torch.float32)
    if config.model_type == "mistral":
        # Bridge 0.3.1 requires a field that transformers 5 keeps in `rope_parameters`.
        bridge.hf_pretrained.config.rope_theta = config.rope_parameters["rope_theta"]
    return bridge


def build_chunks(bridge: Any, spec: WorkerSpec, place: Place) -> list[Any]:
    """Returns this rank's model, or one model per virtual stage, with the weights of the checkpoint."""
    provider = bridge.to_megatron_provider(load_weights=False)
    for name, value in _provider_fields(provider, bridge.hf_pretrained.config, spec, place).items():
        setattr(provider, name, value)
    provider.finalize()
    with contextlib.redirect_stdout(io.StringIO()):  # Megatron prints the number of parameters
        chunks = provider.provide_distributed_model(
            model_type=ModelType.encoder_or_decoder,
            wrap_with_ddp=False,
            use_cpu_initialization=place.device.type == "cpu",
            bf16=spec.bf16,
            pre_wrap_hook=partial(_fill, bridge, spec),
        )
    set_frequencies(unwrap_model(chunks), bridge.hf_pretrained.config)
    _exclude_padding_token(chunks, bridge.hf_pretrained.config.get_text_config().pad_token_id)
    if spec.model.trainable is not None and chunks[0].config.recompute_granularity is not None:
        keep_input_gradients(chunks)
    return chunks


def _fill(bridge: Any, spec: WorkerSpec, models: list[Any]) -> list[Any]:
    """Loads weights, adds a critic's head and adapters, and freezes what is not trained."""
    where = SECTIONS[spec.role]
    if spec.role == "critic":
        put_heads(models)
    load_weights(bridge, models, where, is_critic=spec.role == "critic")
    if spec.role == "critic":
        load_head(models, str(spec.model.path), where)
    if spec.model.trainable is not None and spec.optimizer is not None:
        freeze_others(bridge, models, spec.model.trainable, f"{where}.model.trainable")
    if spec.model.lora.rank > 0:
        models = add_adapters(models, spec.model.lora, spec.options.lora_config.lora_type, where)
        for head in (module for model in models for module in model.modules() if isinstance(module, ValueHead)):
            head.requires_grad_(True)
    if spec.options.freeze_moe_router:
        for router in (module for model in models for module in model.modules() if isinstance(module, TopKRouter)):
            router.requires_grad_(False)
    return models


def _exclude_padding_token(chunks: list[Any], pad_token_id: int | None) -> None:
    """Keeps the padding token's input embedding untrained, as in transformers (`padding_idx`). If the embedding is
    zero, the next norm would multiply the embedding's gradient by a thousand."""
    for model in unwrap_model(chunks):
        if pad_token_id is not None and model.pre_process:
            embedding = model.embedding.word_embeddings
            embedding.forward = partial(_embed, embedding, embedding.forward, pad_token_id)


def _embed(embedding: Any, embed: Callable[[Tensor], Tensor], pad_token_id: int, tokens_BS: Tensor) -> Tensor:
    embedded = embed(tokens_BS)
    is_padding = tokens_BS == pad_token_id
    if embedding.reduce_scatter_embeddings:
        # The result is [S / tensor ranks, B, H], for this rank's tokens only.
        group = embedding.tp_group
        is_padding = is_padding.T.chunk(group.size())[group.rank()]
    return torch.where(is_padding[..., None], embedded.detach(), embedded)


def _provider_fields(provider: Any, hf_config: Any, spec: WorkerSpec, place: Place) -> dict[str, Any]:
    where = SECTIONS[spec.role]
    dtype = torch.bfloat16 if spec.bf16 else torch.float32
    fields: dict[str, Any] = {
        **({} if HAS_TRANSFORMER_ENGINE else _WITHOUT_TRANSFORMER_ENGINE),
        # Bridge 0.3.1 switches this on for DeepSeek, and Megatron's own output layer raises if the kernel is missing.
        "gradient_accumulation_fusion": find_spec(GRADIENT_KERNEL) is not None,
        **rotary_fields(hf_config, is_latent=provider.multi_latent_attention),
        "transformer_layer_spec": partial(layer_specs, packs_float32=spec.use_sample_packing and not spec.bf16),
        # Weights come from the checkpoint, but initialisation also marks the weights that are split over tensor ranks;
        # without the marks the gradient norm counts only the first rank's parts.
        "perform_initialization": True,
        "moe_router_bias_update_rate": 0.0,  # the bias stays the checkpoint's, as in the engine
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": None,
        "bf16": spec.bf16,
        "fp16": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "should_pad_vocab": True,
        "make_vocab_size_divisible_by": 1,
        "calculate_per_token_loss": True,
        "sequence_parallel": place.mesh.tensor > 1,
        **_pipeline_fields(place),
    }
    fields |= _model_fields(hf_config)
    if spec.role == "critic":
        fields["share_embeddings_and_output_weights"] = False  # there is no output layer
    if spec.gradient_checkpointing:
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    chosen = transformer_fields(spec.options, f"{where}.megatron_config")
    chosen["expert_tensor_parallel_size"] = place.mesh.expert_tensor
    chosen["moe_enable_routing_replay"] = False  # switches off Megatron's own replay, which `router_replay` replaces
    if not HAS_TRANSFORMER_ENGINE:
        del chosen["moe_grouped_gemm"]
    if chosen.get("attention_backend") is not None:
        chosen["attention_backend"] = AttnBackend[chosen["attention_backend"]]
    return fields | {name: value for name, value in chosen.items() if value is not None}


def _model_fields(config: Any) -> dict[str, Any]:
    """Returns fields that Bridge 0.3.1 does not read from the configurations of some model types, or sets to other
    values."""
    kind = config.model_type
    if kind == "qwen3_moe":
        return {"moe_router_pre_softmax": not config.norm_topk_prob}
    if kind not in ("deepseek_v2", "deepseek_v3"):
        return {}
    fields = {"q_lora_rank": config.q_lora_rank, "share_embeddings_and_output_weights": config.tie_word_embeddings}
    if kind == "deepseek_v3":
        return fields | {"moe_router_score_function": "sigmoid"}  # not a field of transformers 5
    if config.topk_method == "greedy":
        fields |= {"moe_router_num_groups": None, "moe_router_group_topk": None}
    return fields


def _pipeline_fields(place: Place) -> dict[str, Any]:
    fields = {"variable_seq_lengths": place.mesh.pipeline > 1}
    if place.mesh.virtual_pipeline > 1:
        # With two stages, batched sends and receives of an interleaved schedule would be matched in the wrong order.
        fields = {"variable_seq_lengths": False, "overlap_p2p_comm": True, "batch_p2p_comm": False}
    if place.device.type == "cpu":
        # gloo sends from the tensor's own memory after the call returns; Megatron would have freed it by then.
        fields["deallocate_pipeline_outputs"] = False
    return fields


def load_weights(bridge: Any, chunks: list[Any], where: str, *, is_critic: bool) -> None:
    """Reads this rank's shards from the checkpoint. Raises ConfigError if the checkpoint lacks a weight, or if its
    vocabulary size differs from that in config.json."""
    converter, source = bridge._model_bridge, bridge.hf_pretrained
    tasks = converter.build_conversion_tasks(source, chunks)
    for task in tasks:
        if task is None and is_critic:
            continue  # the value head, which is loaded separately
        if task is None:
            raise ConfigError(
                f"{source.model_name_or_path} lacks a weight that the model's configuration requires; download or save "
                "the model again",
                key=f"{where}.model.path",
            )
        if task.megatron_module is None:
            continue
        weights = converter.maybe_modify_loaded_hf_weight(task.mapping.hf_param, source.state)
        if is_vocabulary(task.global_param_name):
            if len(weights) != (vocab_size := chunks[0].config.vocab_size):
                raise ConfigError(
                    f"{task.mapping.hf_param} of {source.model_name_or_path} has {len(weights)} rows, but vocab_size "
                    f"in config.json is {vocab_size}; save the model again with matching files",
                    key=f"{where}.model.path",
                )
            weights = _padded(weights, padded_vocabulary(chunks))
        own = task.mapping.hf_to_megatron(weights, task.megatron_module)
        task.param_weight.data.copy_(own)
    _require_all_loaded(chunks, tasks, f"{where}.model.path: {source.model_name_or_path}")
    _share_tied_embedding(chunks)


def _require_all_loaded(chunks: list[Any], tasks: list[Any], model: str) -> None:
    """Raises ConfigError for a parameter whose weight the checkpoint lacks: Bridge skips such a parameter, which would
    leave it as it was initialised."""
    loaded = {id(task.param_weight) for task in tasks if task is not None}
    of_head = {id(p) for chunk in chunks for m in chunk.modules() if isinstance(m, ValueHead) for p in m.parameters()}
    for chunk in unwrap_model(chunks):
        tied = {id(chunk.shared_embedding_or_output_weight())} if chunk.share_embeddings_and_output_weights else set()
        for name, parameter in chunk.named_parameters():
            if id(parameter) not in loaded | of_head | tied:
                raise ConfigError(
                    f"{model} has no weight for Megatron's {name}, which the model's configuration requires; download "
                    "or save the model again"
                )


def is_vocabulary(name: str) -> bool:
    """Whether this is Megatron's name of a weight with one row per token of the vocabulary."""
    return name.endswith(("embedding.word_embeddings.weight", "output_layer.weight"))


def padded_vocabulary(chunks: list[Any]) -> int:
    """Number of rows of a weight for which `is_vocabulary` is true: the vocabulary size, rounded up to a multiple of
    the number of tensor ranks."""
    config = chunks[0].config
    size = config.tensor_model_parallel_size
    return -(-config.vocab_size // size) * size


def _padded(weight_VH: Tensor, num_rows: int) -> Tensor:
    return torch.nn.functional.pad(weight_VH, (0, 0, 0, num_rows - weight_VH.shape[0]))


def _share_tied_embedding(chunks: list[Any]) -> None:
    """Copies a tied embedding from the first stage to the last."""
    models = unwrap_model(chunks)
    group = embedding_group()
    if group is None or group.size() == 1 or not models[0].share_embeddings_and_output_weights:
        return
    weight = next(weight for model in models if (weight := model.shared_embedding_or_output_weight()) is not None)
    dist.broadcast(weight.data, src=dist.get_process_group_ranks(group)[0], group=group)
