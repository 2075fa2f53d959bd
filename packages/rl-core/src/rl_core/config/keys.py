"""Translates the keys of other trainers, so that users can bring their launch scripts. Loaded only for a key that the
core does not declare, and by `rl import-config`.

A foreign key that has another name here is loaded under that name, or is an error that says what to write instead.
Loading causes a warning; only `ALIASES` and `MODELS_OF` cause none. A foreign key without a counterpart is an error
that gives the reason. If its value changes nothing here (`trainer.flash_attn=true`), it is dropped with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

from rl_core.config.layers import ConfigWarning, Given, Layer, own_spelling
from rl_core.errors import ConfigError, Mistakes

ALIASES = {
    "trainer.remove_microbatch_padding": "trainer.use_sample_packing",
    "trainer.eval.interval": "trainer.eval_interval",
    "trainer.eval.before_train": "trainer.eval_before_train",
    "trainer.eval.batch_size": "trainer.eval_batch_size",
    "trainer.policy.megatron_config.async_dist_ckpt_save": "trainer.async_save",
    "trainer.policy.megatron_config.lora_config.merge_lora": "trainer.policy.model.lora.merge_lora",
    "trainer.policy.sequence_parallel_size": "trainer.policy.fsdp_config.sequence_parallel_size",
    "trainer.ref.sequence_parallel_size": "trainer.ref.fsdp_config.sequence_parallel_size",
    "trainer.critic.sequence_parallel_size": "trainer.critic.fsdp_config.sequence_parallel_size",
}
"""Alternative spelling → key; accepted without a warning."""

MODELS_OF = {"train": ("policy", "critic"), "eval": ("ref",)}
"""`<backend>_config.train.<key>` sets the key in the backend section of each model that is listed here for `train`. The
same holds for `eval`."""

_ENGINE = "generator.inference_engine."
_ASYNC = "trainer.fully_async."

TAKEN_AS = {
    "trainer.policy.gradient_checkpointing": "trainer.gradient_checkpointing",
    "trainer.policy.use_sample_packing": "trainer.use_sample_packing",
    "environment.skyrl_gym": "environment.options",
    "generator.num_inference_engines": f"{_ENGINE}num_engines",
    "generator.remote_inference_engine_urls": f"{_ENGINE}external_server_urls",
    "generator.remote_urls": f"{_ENGINE}external_server_urls",
    f"{_ENGINE}remote_urls": f"{_ENGINE}external_server_urls",
    **{
        f"generator.inference_engine_{kind}_parallel_size": f"{_ENGINE}{kind}_parallel_size"
        for kind in ("tensor", "pipeline", "data", "expert")
    },
    **{
        f"generator.{name}": f"{_ENGINE}{name}"
        for name in (
            "backend",
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "enforce_eager",
            "engine_init_kwargs",
            "fully_sharded_loras",
            "gpu_memory_utilization",
            "max_num_batched_tokens",
            "max_num_seqs",
            "model_dtype",
            "served_model_name",
            "weight_sync_backend",
        )
    },
}
"""Foreign key or section → its name here, under which it is loaded with a warning."""


@attrs.frozen
class Successor:
    """The key of this project that replaces a foreign key, and the translation of its values."""

    key: str
    values: Mapping[Any, Any] = attrs.field(factory=dict)
    """Foreign value → value here. None: the key is dropped, because this value changes nothing here. All other values
    are kept."""
    reason: str = ""
    """Why a value that maps to None is dropped."""


SUCCESSORS = {
    "trainer.algorithm.use_tis": Successor(
        "trainer.algorithm.off_policy_correction.tis_ratio_type",
        {True: "token", False: None},
        "off_policy_correction.tis_ratio_type decides whether samples are corrected; to never correct, set it to off",
    ),
    "trainer.algorithm.tis_imp_ratio_cap": Successor(
        "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high",
        {-1: None},
        "-1 sets no cap; the cap is the value of off_policy_correction.token_tis_ratio_clip_high",
    ),
    "trainer.num_logger_train_samples": Successor(
        "trainer.num_logged_samples", {-1: None}, "the default of trainer.num_logged_samples applies"
    ),
}
"""Foreign key → its replacement."""

LOSS_SECTIONS = {f"trainer.algorithm.{name}": name for name in ("sapo", "clip_cov", "kl_cov", "cispo", "dppo")}
"""Foreign section with the parameters of one policy loss → that loss. Here, the selected loss reads its parameters from
`policy_loss_params`."""

RENAMED = {
    "trainer.fully_async.max_staleness_steps": "trainer.max_staleness",
    "trainer.algorithm.clip_ratio": "trainer.algorithm.eps_clip_low",
    "trainer.algorithm.clip_ratio_low": "trainer.algorithm.eps_clip_low",
    "trainer.algorithm.clip_ratio_high": "trainer.algorithm.eps_clip_high",
    "trainer.algorithm.eps_clip": "trainer.algorithm.eps_clip_low",
    "trainer.algorithm.cliprange": "trainer.algorithm.eps_clip_low",
    "trainer.algorithm.cliprange_value": "trainer.algorithm.value_clip",
    "trainer.algorithm.adv_estimator": "trainer.algorithm.advantage_estimator",
    "trainer.algorithm.lam": "trainer.algorithm.lambd",
    "trainer.algorithm.kl_coef": "trainer.algorithm.kl_loss_coef",
    "trainer.algorithm.entropy_coeff": "trainer.algorithm.entropy_loss_coef",
    "trainer.learning_rate": "trainer.policy.optimizer_config.lr",
    "trainer.batch_size": "trainer.train_batch_size",
    "trainer.mini_batch_size": "trainer.policy_mini_batch_size",
    "trainer.ppo_mini_batch_size": "trainer.policy_mini_batch_size",
    "trainer.ppo_epochs": "trainer.update_epochs_per_batch",
    "trainer.save_freq": "trainer.ckpt_interval",
    "trainer.test_freq": "trainer.eval_interval",
    "trainer.val_before_train": "trainer.eval_before_train",
    "trainer.total_epochs": "trainer.epochs",
    "trainer.total_training_steps": "trainer.max_training_steps",
    "trainer.experiment_name": "trainer.run_name",
    "trainer.default_local_dir": "trainer.run_dir",
    "trainer.n_gpus_per_node": "trainer.placement.policy_num_gpus_per_node",
    "trainer.nnodes": "trainer.placement.policy_num_nodes",
    "data.train_files": "data.train_data",
    "data.val_files": "data.val_data",
    "data.max_response_length": "generator.sampling_params.max_generate_length",
}
"""Foreign key or section → what to write instead. Using the foreign name is an error."""


@attrs.frozen
class Unsupported:
    """Entry for a foreign key or section that has no counterpart in this project."""

    reason: str
    harmless: Sequence[Any] = ()
    """Values that change nothing here. They cause a warning instead of an error."""
    is_harmless: bool = False
    """Whether all values are harmless."""


_SUPPORT = (
    "training log-probs are always those of the distribution that was sampled, also with top_p, top_k or min_p; where "
    "that is impossible, the run is refused"
)
_FP8 = "models are not trained in 8 bits, because log-probs would depend on the micro-batches"
_ONE_RANK = "all modules have adapters of the same rank, which vLLM serves with one strength"
_EXPERT_ADAPTERS = "each expert has its own adapter; settings under which experts would share one are refused"
_PROFILER = "there is no profiler; run torch.profiler in a callback (trainer.callbacks)"
_QAT = "there is no quantisation-aware training"
_MTP = "there is no multi-token prediction"
_SIMULATED = "training is not simulated"
_MEGATRON_FSDP = "for sharded parameters choose trainer.strategy=fsdp"
_NCCL_BUFFERS = "torch allocates the buffers, so that they can be moved to the CPU while inference uses the device"
_OWN_SECTION = "how sequences are split over ranks is set in the backend's own section"
_CHUNKS = "trainer.logprobs_chunk_size limits how many tokens' logits are in memory at a time"
_NO_ENGINE = "no engine of this version supports it"
_PENALTY = "only evaluation can have it: set generator.eval_sampling_params.extra_args.repetition_penalty"
_SAMPLES = "samples are written to samples.jsonl"
_OVERLONG = "the environment adds such a penalty to its reward; the recipe dapo does this with soft_overlong_penalty"
_AGENTS = "set generator.inference_engine.router_port if agents outside the run use the policy"
_ALLOCATOR = "set PYTORCH_ALLOC_CONF=expandable_segments:True in the environment"

UNSUPPORTED: dict[str, Unsupported] = {
    "hydra": Unsupported("Hydra is not used; a run writes everything to trainer.run_dir", is_harmless=True),
    "trainer.algorithm.value_head_prefix": Unsupported("a critic's head is called value_head", ("value_head",)),
    "trainer.sequence_parallel_backend": Unsupported(_OWN_SECTION, ("ulysses",)),
    "trainer.use_expandable_segments": Unsupported(_ALLOCATOR, is_harmless=True),
    "trainer.policy.use_torch_compile": Unsupported("models are not compiled", (True, False)),
    "trainer.policy.record_memory": Unsupported("memory is not recorded", (False,)),
    "trainer.policy.torch_profiler_config": Unsupported(_PROFILER, is_harmless=True),
    "trainer.policy.torch_profiler_config.enable": Unsupported(_PROFILER, (False,)),
    "trainer.policy.model_config_kwargs": Unsupported("the model's own config.json is used unchanged", (None, {})),
    "trainer.policy.language_model_only": Unsupported("only text models are supported", (False, True)),
    "trainer.policy.inference_only_init": Unsupported("a model has no inference-only initialisation", (False,)),
    "trainer.policy.model.fake_int4_qat": Unsupported(_QAT, is_harmless=True),
    "trainer.policy.model.fake_int4_qat.enabled": Unsupported(_QAT, (False,)),
    "trainer.policy.model.lora.lora_sync_path": Unsupported(
        "adapters need no folder: they are sent through the weight transport, merged into the weights or, with "
        "trainer.policy.model.lora.merge_lora=false, separately",
        is_harmless=True,
    ),
    "trainer.policy.model.lora.sync_mode": Unsupported(
        "adapters are sent through the weight transport, never through a folder", is_harmless=True
    ),
    **{
        f"trainer.{model}.model.lora.share_expert_adapters": Unsupported(_EXPERT_ADAPTERS, is_harmless=True)
        for model in ("policy", "critic")
    },
    **{
        f"trainer.critic.model.lora.{name}": Unsupported("a critic is not sent to the engines", is_harmless=True)
        for name in ("lora_sync_path", "sync_mode")
    },
    "trainer.algorithm.enable_sample_support_replay": Unsupported(_SUPPORT, (True, False)),
    "trainer.ref.model.lora": Unsupported("the reference has no adapters"),
    "trainer.mtp": Unsupported(_MTP, is_harmless=True),
    "trainer.mtp.enabled": Unsupported(_MTP, (False,)),
    "trainer.fully_async": Unsupported("trainer.max_staleness says how asynchronous a run is", (None, False)),
    "trainer.fully_async.num_parallel_generation_workers": Unsupported(
        "set generator.max_concurrency, which counts episodes, to the workers times generator.n_samples_per_prompt"
    ),
    "trainer.fully_async.sample_full_batch": Unsupported(
        "trainer.algorithm.dynamic_sampling.type=filter samples until a batch is full", (False,)
    ),
    "trainer.fully_async.clear_kv_cache_on_weight_sync": Unsupported(
        "a weight sync always clears the prefix cache", is_harmless=True
    ),
    "trainer.fully_async.simulate_training_step_seconds": Unsupported(_SIMULATED, is_harmless=True),
    "trainer.fully_async.simulate_weight_sync_seconds": Unsupported(_SIMULATED, is_harmless=True),
    "trainer.fully_async.enabled": Unsupported("trainer.max_staleness above 0 makes a run asynchronous", (False,)),
    "trainer.gradient_checkpointing_use_reentrant": Unsupported("checkpointing is never reentrant", (False,)),
    "trainer.recompute_old_logprobs_per_minibatch": Unsupported("old log-probs are computed once per batch", (False,)),
    "trainer.update_ref_every_epoch": Unsupported("the reference model is never updated", (False,)),
    "trainer.flash_attn": Unsupported(
        "the backend selects an attention kernel that the device and the dtype support; it needs no flash-attn package",
        (True, False),
    ),
    "trainer.disable_fast_tokenizer": Unsupported("fast tokenizers are always used", (False,)),
    "trainer.enable_ray_gpu_monitor": Unsupported("there is no GPU monitor", is_harmless=True),
    "trainer.log_path": Unsupported("a run writes everything to trainer.run_dir", is_harmless=True),
    "trainer.dump_data_batch": Unsupported(_SAMPLES, (True, False)),
    "trainer.dump_eval_results": Unsupported(_SAMPLES, (True, False)),
    "trainer.print_example_interval": Unsupported(_SAMPLES, is_harmless=True),
    "trainer.log_example_interval": Unsupported(_SAMPLES, is_harmless=True),
    "trainer.num_logger_eval_samples": Unsupported(_SAMPLES, is_harmless=True),
    "trainer.eval.dump_results": Unsupported(_SAMPLES, (True, False)),
    "trainer.eval.num_logger_samples": Unsupported(_SAMPLES, is_harmless=True),
    "trainer.vocab_entropy_chunk_size": Unsupported(_CHUNKS, is_harmless=True),
    "trainer.vocab_entropy_chunk_memory_mb": Unsupported(_CHUNKS, is_harmless=True),
    "trainer.fused_lm_head_logprob": Unsupported(_CHUNKS, is_harmless=True),
    "trainer.fused_lm_head_logprob_backend": Unsupported(_CHUNKS, is_harmless=True),
    "trainer.algorithm.overlong_buffer": Unsupported(_OVERLONG),
    "trainer.algorithm.overlong_buffer_len": Unsupported(_OVERLONG),
    "trainer.algorithm.overlong_buffer_penalty_factor": Unsupported(_OVERLONG),
    "trainer.algorithm.zero_variance_filter_tol": Unsupported(
        "rewards of a group that differ by at most 1e-6 count as equal", (0, 0.0, 1e-6)
    ),
    "data.dataloader": Unsupported("all prompts are read into memory at the start", is_harmless=True),
    "generator.batched": Unsupported("each prompt is a separate request, and all run concurrently", is_harmless=True),
    "generator.use_conversation_multi_turn": Unsupported(
        "responses are kept as tokens and never re-rendered as text; turns are messages if the prompt is a list of "
        "messages, and continue the text if it is text",
        (True,),
    ),
    "generator.append_eos_token_after_stop_str_in_multi_turn": Unsupported(
        "if a stop string ends a turn, the chat template closes the turn", (True,)
    ),
    "generator.vision_language_generator": Unsupported("only text models are supported", (False,)),
    "generator.use_cache_salt": Unsupported(_NO_ENGINE, is_harmless=True),
    "generator.chat_template": Unsupported("the model's own chat template is used", (None,)),
    "generator.chat_template.name_or_path": Unsupported("the model's own chat template is used", (None,)),
    "generator.chat_template.source": Unsupported("the model's own chat template is used", ("name",)),
    "environment.skyrl_gym.max_env_workers": Unsupported(
        "environment.placement says where environments run; environment.num_workers limits concurrent episodes",
        is_harmless=True,
    ),
    "generator.inference_engine.run_engines_locally": Unsupported("the run starts the engines", (True,)),
    "generator.inference_engine.async_engine": Unsupported("requests are always asynchronous", (True, False)),
    "generator.inference_engine.weight_transfer_threshold_cuda_ipc_GB": Unsupported(
        "weight_bucket_bytes limits how much is sent at a time", is_harmless=True
    ),
    "generator.inference_engine.delta_weight_sync": Unsupported(
        "set weight_sync_delta, which works with any transport", (None,)
    ),
    "generator.inference_engine.enable_pd": Unsupported(_NO_ENGINE, (False,)),
    "generator.inference_engine.num_prefill": Unsupported(_NO_ENGINE, (0,)),
    "generator.inference_engine.prefill_init_kwargs": Unsupported(_NO_ENGINE, ({},)),
    "generator.inference_engine.decode_init_kwargs": Unsupported(_NO_ENGINE, ({},)),
    "generator.inference_engine.fp8_weight_sync_mode": Unsupported(
        "weights are sent in generator.inference_engine.model_dtype", (None,)
    ),
    "generator.inference_engine.language_model_only": Unsupported("only text models are supported", (False, True)),
}
for _model in ("policy", "ref", "critic"):
    UNSUPPORTED[f"trainer.{_model}.fsdp_config.wrap_policy"] = Unsupported(
        "every decoder layer is wrapped as one FSDP unit", ({}, None)
    )
    UNSUPPORTED[f"trainer.{_model}.fsdp_config.mixed_precision.buffer_dtype"] = Unsupported(
        "buffers keep the dtype that the model gives them, float32", ("fp32", "float32")
    )
    for _name, _unsupported in {
        "ddp_config.average_in_collective": Unsupported(
            "tokens are weighted before the batch is split, and gradients are only summed",
            (True, False),
        ),
        "hf_export_config": Unsupported(
            "ranks send their parts bucket by bucket, and rank 0 writes the model", (None,)
        ),
        "hf_export_config.distributed_save": Unsupported("rank 0 writes the model, bucket by bucket", (False,)),
        "hf_export_config.save_every_n_ranks": Unsupported("rank 0 writes the model, bucket by bucket", (1,)),
        "model_config_kwargs": Unsupported("the model's own config.json is used unchanged", (None, {})),
        "dist_ckpt_optim_fully_reshardable": Unsupported("a checkpoint loads on any mesh", (True, False)),
        "lora_config.experts_shared_outer_loras": Unsupported(_EXPERT_ADAPTERS, (False,)),
        "lora_config.normalize_moe_lora": Unsupported(_ONE_RANK, (False,)),
        "fp8": Unsupported(_FP8, (None,)),
        "fp8_recipe": Unsupported(_FP8, is_harmless=True),
        "fp8_param": Unsupported(_FP8, (None, False)),
        "fp8_amax_compute_algo": Unsupported(_FP8, is_harmless=True),
        "freeze_dsa_indexer": Unsupported(
            "no model with an indexer of sparse attention trains with Megatron", (True, False)
        ),
        "mtp_num_layers": Unsupported(_MTP, (None, 0)),
        "mtp_loss_weight": Unsupported(_MTP, is_harmless=True),
        "mtp_loss_chunk_size": Unsupported(_MTP, is_harmless=True),
        "mtp_loss_topk": Unsupported(_MTP, is_harmless=True),
        "async_dist_ckpt_strategy": Unsupported("trainer.async_save has only one strategy", is_harmless=True),
        "async_save_prestage_to_cpu": Unsupported("trainer.async_save copies to CPU memory first", is_harmless=True),
    }.items():
        UNSUPPORTED[f"trainer.{_model}.megatron_config.{_name}"] = _unsupported
    for _name, _unsupported in {
        "use_distributed_optimizer": Unsupported("the optimizer's state is always split over data ranks", (True,)),
        "bucket_size": Unsupported("gradients are summed once per step, in one piece", is_harmless=True),
        "gradient_reduce_div_fusion": Unsupported("gradients are summed and not divided", is_harmless=True),
        "align_param_gather": Unsupported("all ranks gather parameters at the end of a step", is_harmless=True),
        "check_for_nan_in_grad": Unsupported(
            "a step whose gradient is not finite is skipped and counted (trainer.max_consecutive_nonfinite_steps)",
            is_harmless=True,
        ),
        "check_for_large_grads": Unsupported("the gradient's norm is reported and clipped instead", is_harmless=True),
        "num_distributed_optimizer_instances": Unsupported("the optimizer's state is split over all data ranks", (1,)),
        "reduce_scatter_with_fp32_accumulation": Unsupported("set ddp_config.grad_reduce_in_fp32=true", (False,)),
        "fp8_param_gather": Unsupported("parameters are gathered in the compute dtype", (False,)),
        "reuse_grad_buf_for_mxfp8_param_ag": Unsupported("parameters are not gathered in 8 bits", (False,)),
        "use_megatron_fsdp": Unsupported(_MEGATRON_FSDP, (False,)),
        "use_custom_fsdp": Unsupported(_MEGATRON_FSDP, (False,)),
        "data_parallel_sharding_strategy": Unsupported(_MEGATRON_FSDP, ("no_shard",)),
        "outer_dp_sharding_strategy": Unsupported(_MEGATRON_FSDP, ("no_shard",)),
        "suggested_communication_unit_size": Unsupported(_MEGATRON_FSDP, (None,)),
        "preserve_fp32_weights": Unsupported(_MEGATRON_FSDP, (True,)),
        "fsdp_double_buffer": Unsupported(_MEGATRON_FSDP, (False,)),
        "keep_fp8_transpose_cache": Unsupported("parameters are not kept in 8 bits", (False,)),
        "nccl_ub": Unsupported(_NCCL_BUFFERS, (False,)),
        "disable_symmetric_registration": Unsupported(_NCCL_BUFFERS, (False,)),
        "fsdp_manual_registration": Unsupported(_NCCL_BUFFERS, (False,)),
        "delay_wgrad_compute": Unsupported("gradients are summed after the backward pass", (False,)),
    }.items():
        UNSUPPORTED[f"trainer.{_model}.megatron_config.ddp_config.{_name}"] = _unsupported
for _key in ("trainer.ref", "trainer.critic"):
    _section = f"{_key}.megatron_config"
    UNSUPPORTED[f"{_section}.async_dist_ckpt_save"] = Unsupported("trainer.async_save applies to all models", (False,))
    UNSUPPORTED[f"{_section}.lora_config.merge_lora"] = Unsupported("engines do not get this model", is_harmless=True)
    for _name in (
        "language_model_only",
        "model_config_kwargs",
        "model.fake_int4_qat",
        "model.fake_int4_qat.enabled",
        "record_memory",
        "torch_profiler_config",
        "torch_profiler_config.enable",
        "use_torch_compile",
        "inference_only_init",
    ):
        UNSUPPORTED[f"{_key}.{_name}"] = UNSUPPORTED[f"trainer.policy.{_name}"]
for _name, _unsupported in {
    "enable_return_sample_support_set": Unsupported(_SUPPORT, (True, False)),
    "enable_http_endpoint": Unsupported(_AGENTS, (False,)),
    "http_endpoint_host": Unsupported("set generator.inference_engine.host", ("127.0.0.1",)),
    "http_endpoint_port": Unsupported(_AGENTS, (8000,)),
    "override_existing_update_group": Unsupported("every run has a new group for weight syncs", is_harmless=True),
    "vllm_v1_disable_multiproc": Unsupported("the engine core always has its own process", (True, False)),
    "enable_ray_prometheus_stats": Unsupported("every server has vLLM's metrics at /metrics", (True, False)),
    "offload_kv_for_weight_sync": Unsupported("set trainer.placement.colocate_all=true", (False,)),
    "use_expandable_segments": Unsupported(_ALLOCATOR, is_harmless=True),
    "speculative_config": Unsupported("pass it to vLLM in generator.inference_engine.engine_init_kwargs", (None,)),
    "external_proxy_url": Unsupported("list the servers in external_server_urls", (None,)),
    "router_init_kwargs": Unsupported("the router has no options", ({},)),
}.items():
    UNSUPPORTED[f"generator.inference_engine.{_name}"] = _unsupported
for _name, _entry_of_name in list(UNSUPPORTED.items()):
    # Older scripts have the engine's keys directly in `generator`.
    if _name.startswith(_ENGINE) and "." not in _name.removeprefix(_ENGINE):
        UNSUPPORTED.setdefault(f"generator.{_name.removeprefix(_ENGINE)}", _entry_of_name)
for _section in ("generator.sampling_params", "generator.eval_sampling_params"):
    UNSUPPORTED[f"{_section}.logprobs"] = Unsupported("log-probs of sampled tokens are always returned", (None, 0, 1))
    UNSUPPORTED[f"{_section}.repetition_penalty"] = Unsupported(_PENALTY, (1, 1.0))
    UNSUPPORTED[f"{_section}.additional_kwargs"] = Unsupported("set extra_args", (None,))


def translated(
    layer: Layer,
    mistakes: Mistakes,
    is_of_a_plugin: Callable[[str], bool] = lambda path: False,
    values: Mapping[str, Any] = MappingProxyType({}),
) -> Layer:
    """Translates the foreign keys of a layer. A key that the user must correct is left out, and its error is added to
    `mistakes`.

    Args:
        is_of_a_plugin: returns whether a plug-in declares a key. Such a key keeps its name. Called only for keys that
            the tables above contain.
        values: the values of all layers by path. Some translations depend on other keys, such as the selected loss,
            because parameters of other losses are dropped.
    """
    kept: Layer = []
    for path, given in layer:
        with mistakes.gathered():
            for key in _keys(path):
                found = _here(key, given, is_of_a_plugin, values)
                kept += [(here, own_spelling(here, value)) for here, value in found]
    return kept


def _keys(path: str) -> Sequence[str]:
    """The keys that `path` sets: several for a key of `<backend>_config.train` or `.eval`, which `MODELS_OF` lists."""
    section, _, below = path.partition(".")
    models, _, key = below.partition(".")
    if section.endswith("_config") and models in MODELS_OF and key:
        return [f"trainer.{model}.{section}.{key}" for model in MODELS_OF[models]]
    return [path]


def _here(
    path: str, given: Given, is_of_a_plugin: Callable[[str], bool], values: Mapping[str, Any]
) -> list[tuple[str, Given]]:
    """Translates one key. Returns a list with the translated key and its value, or an empty list if the key has no
    effect. Raises ConfigError if the key is refused."""
    path = ALIASES.get(path, path)
    entries = [(table, *entry) for table in _TABLES if (entry := _entry(path, table)) is not None]
    if not entries or is_of_a_plugin(path):
        return [(path, given)]
    if path.startswith(_ASYNC) and (found := _asynchronous(path, given, values)) is not None:
        return found
    table, section, entry = max(entries, key=lambda found: len(found[1]))  # the most specific entry
    below = path.removeprefix(section)
    if table is UNSUPPORTED:
        return _without_effect(path, given, entry)
    if table is LOSS_SECTIONS:
        if values.get("trainer.algorithm.policy_loss_type") != entry:
            return _dropped(path, given, f"only trainer.algorithm.policy_loss_type={entry} reads it")
        return _taken(path, f"trainer.algorithm.policy_loss_params{below}", given)
    if table is SUCCESSORS:
        return _succeeded(path, given, entry)
    if table is TAKEN_AS:
        return _taken(path, f"{entry}{below}", given)
    raise ConfigError(f"is not a key here; use {entry}{below} ({given.source})", key=path)


def _asynchronous(path: str, given: Given, values: Mapping[str, Any]) -> list[tuple[str, Given]] | None:
    """Translates keys whose meaning depends on the section's switch `enabled`. None: the tables decide, as for other
    keys."""
    is_on = values.get(f"{_ASYNC}enabled")
    if is_on is False and path != f"{_ASYNC}enabled":
        return _dropped(path, given, f"{_ASYNC}enabled is false, so trainer.max_staleness is 0")
    if is_on is True and path == f"{_ASYNC}max_staleness_steps":
        return _taken(path, "trainer.max_staleness", given)
    if is_on is True and path == f"{_ASYNC}enabled" and f"{_ASYNC}max_staleness_steps" in values:
        return _dropped(path, given, "trainer.max_staleness above 0 makes a run asynchronous")
    return None


def _without_effect(path: str, given: Given, unsupported: Unsupported) -> list[tuple[str, Given]]:
    """Drops the key with a warning. Raises ConfigError for a value that is not harmless."""
    values = unsupported.harmless
    if unsupported.is_harmless or any(type(given.value) is type(value) and given.value == value for value in values):
        return _dropped(path, given, unsupported.reason)
    raise ConfigError(f"not supported by this version: {unsupported.reason} ({given.source})", key=path)


def _succeeded(path: str, given: Given, successor: Successor) -> list[tuple[str, Given]]:
    for there, here in successor.values.items():
        if given.value == there and isinstance(given.value, bool) == isinstance(there, bool):
            if here is None:
                return _dropped(path, given, successor.reason)
            return _taken(path, successor.key, attrs.evolve(given, value=here, text=None))
    return _taken(path, successor.key, given)


def _dropped(path: str, given: Given, reason: str) -> list[tuple[str, Given]]:
    warnings.warn(f"{path}: has no effect and can be removed: {reason} ({given.source})", ConfigWarning, stacklevel=2)
    return []


def _taken(path: str, key: str, given: Given) -> list[tuple[str, Given]]:
    warnings.warn(
        f"{path}: is called {key} here and was read as that key ({given.source})", ConfigWarning, stacklevel=2
    )
    return [(key, given)]


def _entry(path: str, table: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The entry of the key itself or of the nearest section above the key, as (key or section, entry); None if neither
    is in the table."""
    section = path
    while section:
        if section in table:
            return section, table[section]
        section = section.rpartition(".")[0]
    return None


_TABLES: tuple[Mapping[str, Any], ...] = (UNSUPPORTED, LOSS_SECTIONS, SUCCESSORS, TAKEN_AS, RENAMED)
