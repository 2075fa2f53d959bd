"""Keys that other trainers know and this one spells otherwise or does not have, each with its successor or the reason.

Users bring launch scripts. A key of theirs either loads, or the error says what to write instead; a switch that stands
where it changes nothing (`trainer.flash_attn=true`) is dropped with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from rl_core.config.layers import ConfigWarning, Given, Layer
from rl_core.errors import ConfigError, Mistakes

ALIASES = {
    "trainer.remove_microbatch_padding": "trainer.use_sample_packing",
    "trainer.policy.megatron_config.async_dist_ckpt_save": "trainer.async_save",
    "trainer.policy.megatron_config.lora_config.merge_lora": "trainer.policy.model.lora.merge_lora",
    "trainer.policy.sequence_parallel_size": "trainer.policy.fsdp_config.sequence_parallel_size",
    "trainer.ref.sequence_parallel_size": "trainer.ref.fsdp_config.sequence_parallel_size",
    "trainer.critic.sequence_parallel_size": "trainer.critic.fsdp_config.sequence_parallel_size",
}
"""Other spellings, accepted as they are."""

VALUE_ALIASES: Mapping[tuple[str, Any], Any] = {
    ("trainer.strategy", "fsdp2"): "fsdp",
    ("trainer.resume_mode", None): "none",
}
"""Other spellings of a value, accepted as they are."""

RENAMED = {
    "trainer.policy.gradient_checkpointing": "trainer.gradient_checkpointing",
    "trainer.policy.use_sample_packing": "trainer.use_sample_packing",
    "trainer.fully_async.max_staleness_steps": "trainer.max_staleness",
    "trainer.fully_async.num_parallel_generation_workers": "generator.max_concurrency",
    "trainer.algorithm.use_tis": "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
    "trainer.algorithm.tis_imp_ratio_cap": "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high",
    "trainer.algorithm.sapo.tau_pos": "trainer.algorithm.policy_loss_params.tau_pos",
    "trainer.algorithm.sapo.tau_neg": "trainer.algorithm.policy_loss_params.tau_neg",
    "trainer.algorithm.clip_cov": "trainer.algorithm.policy_loss_params",
    "trainer.algorithm.kl_cov": "trainer.algorithm.policy_loss_params",
    "trainer.algorithm.cispo": "trainer.algorithm.policy_loss_params",
    "trainer.algorithm.dppo": "trainer.algorithm.policy_loss_params",
    "trainer.num_logger_train_samples": "trainer.num_logged_samples",
    "trainer.log_path": "trainer.run_dir",
    "environment.skyrl_gym": "environment.options",
}
"""Key, or section → what to write instead."""


@attrs.frozen
class Unsupported:
    """A key, or a section, that is known elsewhere and has no counterpart here."""

    reason: str
    harmless: Sequence[Any] = ()
    """With these values it asks for nothing that is missing: a warning, not an error."""


_ONE_RANK = "the selected backend's own section says how sequences are split over ranks"
_CHUNKS = "trainer.logprobs_chunk_size bounds the logits that exist at a time"
_LOCAL_ONLY = "no engine of this version has it"

UNSUPPORTED: dict[str, Unsupported] = {
    "deepspeed_config": Unsupported("there is no DeepSpeed backend yet; choose trainer.strategy=fsdp"),
    "trainer.algorithm.value_head_prefix": Unsupported("a critic's head is called value_head", ("value_head",)),
    "trainer.sequence_parallel_backend": Unsupported(_ONE_RANK),
    "trainer.use_expandable_segments": Unsupported("set PYTORCH_ALLOC_CONF in the environment", (False,)),
    "trainer.policy.use_torch_compile": Unsupported("the policy is not compiled", (False,)),
    "trainer.policy.record_memory": Unsupported("memory is not recorded", (False,)),
    "trainer.policy.torch_profiler_config": Unsupported("there is no profiler", (None,)),
    "trainer.policy.model_config_kwargs": Unsupported("a model is used as its directory says", (None, {})),
    "trainer.policy.language_model_only": Unsupported("models of text only", (False, True)),
    "trainer.policy.inference_only_init": Unsupported("a policy is trained", (False,)),
    "trainer.policy.model.fake_int4_qat": Unsupported("there is no quantisation-aware training"),
    "trainer.policy.model.lora.lora_sync_path": Unsupported(
        "an adapter needs no folder: it goes the way of the weights, merged into them or, with "
        "trainer.policy.model.lora.merge_lora=false, alone"
    ),
    "trainer.critic.model.lora.lora_sync_path": Unsupported("a critic is not sent to the engines"),
    "trainer.ref.model.lora": Unsupported("the reference has no adapters"),
    "trainer.mtp": Unsupported("there is no multi-token prediction", (None,)),
    "trainer.mtp.enabled": Unsupported("there is no multi-token prediction", (False,)),
    "trainer.fully_async": Unsupported("trainer.max_staleness says how asynchronous a run is", (None,)),
    "trainer.fully_async.enabled": Unsupported("trainer.max_staleness above 0 makes a run asynchronous", (False,)),
    "trainer.gradient_checkpointing_use_reentrant": Unsupported("checkpointing is never reentrant", (False,)),
    "trainer.recompute_old_logprobs_per_minibatch": Unsupported("they are computed once per batch", (False,)),
    "trainer.update_ref_every_epoch": Unsupported("the reference stays what it was", (False,)),
    "trainer.flash_attn": Unsupported("the backend's own section chooses the attention", (True,)),
    "trainer.disable_fast_tokenizer": Unsupported("tokenizers are the fast ones", (False,)),
    "trainer.enable_ray_gpu_monitor": Unsupported("there is no GPU monitor", (False,)),
    "trainer.dump_data_batch": Unsupported("samples.jsonl has the samples", (False,)),
    "trainer.dump_eval_results": Unsupported("samples.jsonl has the samples", (True,)),
    "trainer.print_example_interval": Unsupported("samples.jsonl has the samples"),
    "trainer.log_example_interval": Unsupported("samples.jsonl has the samples", (-1,)),
    "trainer.num_logger_eval_samples": Unsupported("samples.jsonl has the samples", (-1,)),
    "trainer.vocab_entropy_chunk_size": Unsupported(_CHUNKS),
    "trainer.vocab_entropy_chunk_memory_mb": Unsupported(_CHUNKS),
    "trainer.fused_lm_head_logprob": Unsupported(_CHUNKS, (False,)),
    "trainer.fused_lm_head_logprob_backend": Unsupported(_CHUNKS),
    "trainer.algorithm.zero_variance_filter_tol": Unsupported("groups are compared exactly", (0, 0.0)),
    "data.dataloader": Unsupported("prompts are read into memory", (None,)),
    "generator.batched": Unsupported("prompts are generated one by one, all at the same time", (False,)),
    "generator.use_conversation_multi_turn": Unsupported("what was said is never written anew as text", (True,)),
    "generator.append_eos_token_after_stop_str_in_multi_turn": Unsupported(
        "a turn that a stop string ended is closed as the chat template closes turns", (True,)
    ),
    "generator.vision_language_generator": Unsupported("models of text only", (False,)),
    "generator.use_cache_salt": Unsupported(_LOCAL_ONLY, (True, False)),
    "generator.chat_template": Unsupported("the model's own chat template is used", (None,)),
    "generator.chat_template.name_or_path": Unsupported("the model's own chat template is used", (None,)),
    "generator.inference_engine.run_engines_locally": Unsupported("engines are started by the run", (True,)),
    "generator.inference_engine.async_engine": Unsupported("it is always so here", (True,)),
    "generator.inference_engine.weight_transfer_threshold_cuda_ipc_GB": Unsupported("see weight_bucket_bytes"),
    "generator.inference_engine.delta_weight_sync": Unsupported("all weights are sent", (None,)),
    "generator.inference_engine.enable_pd": Unsupported(_LOCAL_ONLY, (False,)),
    "generator.inference_engine.num_prefill": Unsupported(_LOCAL_ONLY, (0,)),
    "generator.inference_engine.language_model_only": Unsupported("models of text only", (False, True)),
}
for _model in ("policy", "ref", "critic"):
    UNSUPPORTED[f"trainer.{_model}.fsdp_config.wrap_policy"] = Unsupported("every decoder layer is a unit", ({}, None))
for _name, _unsupported in {
    "vllm_v1_disable_multiproc": Unsupported("the engine's core always has a process of its own", (True, False)),
    "enable_ray_prometheus_stats": Unsupported("every server has vLLM's metrics at /metrics", (True, False)),
    "offload_kv_for_weight_sync": Unsupported("set trainer.placement.colocate_all=true", (False,)),
    "use_expandable_segments": Unsupported("set PYTORCH_ALLOC_CONF in the environment", (False,)),
    "speculative_config": Unsupported("give it to vLLM in generator.inference_engine.engine_init_kwargs", (None,)),
    "external_proxy_url": Unsupported("give the servers themselves in external_server_urls", (None,)),
    "router_init_kwargs": Unsupported("the router has no options", ({},)),
}.items():
    UNSUPPORTED[f"generator.inference_engine.{_name}"] = _unsupported
for _section in ("generator.sampling_params", "generator.eval_sampling_params"):
    UNSUPPORTED[f"{_section}.logprobs"] = Unsupported("those of the sampled tokens are always returned", (None, 0, 1))
    UNSUPPORTED[f"{_section}.repetition_penalty"] = Unsupported("no engine of this version has penalties", (1, 1.0))
    UNSUPPORTED[f"{_section}.additional_kwargs"] = Unsupported("write the sampling keys themselves", (None,))


def translated(layer: Layer, mistakes: Mistakes, is_of_a_plugin: Callable[[str], bool] = lambda path: False) -> Layer:
    """The layer in this project's keys. A key that needs its author is left out, and one of the `mistakes`.

    Args:
        is_of_a_plugin: a plug-in brings the key, whatever it means elsewhere; asked of keys of the tables alone.
    """
    kept: Layer = []
    for path, given in layer:
        with mistakes.gathered():
            if not _is_dropped(path, given, is_of_a_plugin):
                kept.append((ALIASES.get(path, path), _translated_value(path, given)))
    return kept


def _translated_value(path: str, given: Given) -> Given:
    is_hashable = given.value is None or isinstance(given.value, str)
    if is_hashable and (path, given.value) in VALUE_ALIASES:
        return attrs.evolve(given, value=VALUE_ALIASES[path, given.value], text=None)
    return given


def _is_dropped(path: str, given: Given, is_of_a_plugin: Callable[[str], bool]) -> bool:
    renamed, unsupported = _entry(path, RENAMED), _entry(path, UNSUPPORTED)
    if (renamed is None and unsupported is None) or is_of_a_plugin(path):
        return False
    if renamed is not None:
        section, successor = renamed
        raise ConfigError(f"{path}: is not a key here; write {successor}{path.removeprefix(section)} ({given.source})")
    assert unsupported is not None
    reason = unsupported[1].reason
    if any(type(given.value) is type(value) and given.value == value for value in unsupported[1].harmless):
        warnings.warn(f"{path}: has no effect and can go: {reason} ({given.source})", ConfigWarning, stacklevel=2)
        return True
    raise ConfigError(f"{path}: not supported by this version: {reason} ({given.source})")


def _entry(path: str, table: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The entry of the key itself or of the nearest section above it."""
    section = path
    while section:
        if section in table:
            return section, table[section]
        section = section.rpartition(".")[0]
    return None
