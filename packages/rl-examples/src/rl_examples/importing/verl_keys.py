"""Tables of verl's keys: those with a counterpart in this project, and those without effect here. A key that is in
neither table is listed as not translated. `clip_ratio` is an exception: it sets two keys, and `translation` handles it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs


@attrs.frozen
class Here:
    """This project's counterpart of a verl key."""

    key: str
    value: Callable[[Any], Any] = lambda value: value
    """Converts verl's value to this project's. Raises ValueError for a value without a counterpart."""


def _one_of(names: Mapping[Any, Any]) -> Callable[[Any], Any]:
    def value(given: Any) -> Any:
        if given not in names:
            raise ValueError(f"has no counterpart here (known: {', '.join(map(str, names))})")
        return names[given]

    return value


def _negated(value: Any) -> Any:
    return not value


_ACTOR, _ROLLOUT, _REF = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.ref."
_ALGORITHM, _ENGINE, _POLICY = "trainer.algorithm.", "generator.inference_engine.", "trainer.policy."
_STRATEGIES = {"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}
_REDUCTIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}
_KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_ESTIMATORS = {
    "gae": "gae",
    "grpo": "grpo",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++_baseline",
    "remax": "remax",
    "rloo": "rloo",
    "opo": "opo",
    "grpo_passk": "pass_at_k",
}
_LOSSES = {"vanilla": "regular", "gspo": "gspo", "clip_cov": "clip_cov", "kl_cov": "kl_cov", "cispo": "cispo"}
_RESUME = {"auto": "latest", "disable": "none", "resume_path": "from_path"}

KEYS: dict[str, Here] = {
    "data.train_files": Here("data.train_data"),
    "data.val_files": Here("data.val_data"),
    "data.prompt_key": Here("data.prompt_key"),
    "data.train_batch_size": Here("trainer.train_batch_size"),
    "data.max_prompt_length": Here("trainer.max_prompt_length"),
    "data.max_response_length": Here("generator.sampling_params.max_generate_length"),
    "data.shuffle": Here("data.shuffle"),
    "data.seed": Here("trainer.seed"),
    "data.filter_overlong_prompts": Here("data.on_long_prompt", _one_of({True: "drop", False: "error"})),
    "actor_rollout_ref.model.path": Here(f"{_POLICY}model.path"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": Here("trainer.gradient_checkpointing"),
    "actor_rollout_ref.model.use_remove_padding": Here("trainer.use_sample_packing"),
    "actor_rollout_ref.model.lora_rank": Here(f"{_POLICY}model.lora.rank"),
    "actor_rollout_ref.model.lora_alpha": Here(f"{_POLICY}model.lora.alpha"),
    "actor_rollout_ref.model.target_modules": Here(f"{_POLICY}model.lora.target_modules"),
    f"{_ACTOR}strategy": Here("trainer.strategy", _one_of(_STRATEGIES)),
    f"{_ACTOR}optim.lr": Here(f"{_POLICY}optimizer_config.lr"),
    f"{_ACTOR}optim.weight_decay": Here(f"{_POLICY}optimizer_config.weight_decay"),
    f"{_ACTOR}optim.betas": Here(f"{_POLICY}optimizer_config.adam_betas"),
    f"{_ACTOR}optim.clip_grad": Here(f"{_POLICY}optimizer_config.max_grad_norm"),
    f"{_ACTOR}optim.lr_warmup_steps": Here(f"{_POLICY}optimizer_config.num_warmup_steps"),
    f"{_ACTOR}grad_clip": Here(f"{_POLICY}optimizer_config.max_grad_norm"),
    f"{_ACTOR}ppo_mini_batch_size": Here("trainer.policy_mini_batch_size"),
    f"{_ACTOR}ppo_micro_batch_size_per_gpu": Here("trainer.micro_train_batch_size_per_gpu"),
    f"{_ACTOR}ppo_epochs": Here("trainer.update_epochs_per_batch"),
    f"{_ACTOR}ppo_max_token_len_per_gpu": Here("trainer.max_tokens_per_microbatch"),
    f"{_ACTOR}clip_ratio_low": Here(f"{_ALGORITHM}eps_clip_low"),
    f"{_ACTOR}clip_ratio_high": Here(f"{_ALGORITHM}eps_clip_high"),
    f"{_ACTOR}clip_ratio_c": Here(f"{_ALGORITHM}clip_ratio_c"),
    f"{_ACTOR}policy_loss.loss_mode": Here(f"{_ALGORITHM}policy_loss_type", _one_of(_LOSSES)),
    f"{_ACTOR}loss_agg_mode": Here(f"{_ALGORITHM}loss_reduction", _one_of(_REDUCTIONS)),
    f"{_ACTOR}use_kl_loss": Here(f"{_ALGORITHM}use_kl_loss"),
    f"{_ACTOR}kl_loss_coef": Here(f"{_ALGORITHM}kl_loss_coef"),
    f"{_ACTOR}kl_loss_type": Here(f"{_ALGORITHM}kl_estimator_type", _one_of(_KL)),
    f"{_ACTOR}ulysses_sequence_parallel_size": Here(f"{_POLICY}fsdp_config.sequence_parallel_size"),
    f"{_ACTOR}fsdp_config.fsdp_size": Here(f"{_POLICY}fsdp_config.fsdp_size"),
    f"{_ACTOR}fsdp_config.offload_policy": Here(f"{_POLICY}fsdp_config.cpu_offload"),
    f"{_ACTOR}fsdp_config.reshard_after_forward": Here(f"{_POLICY}fsdp_config.reshard_after_forward"),
    f"{_REF}log_prob_micro_batch_size_per_gpu": Here("trainer.micro_forward_batch_size_per_gpu"),
    f"{_REF}fsdp_config.param_offload": Here("trainer.ref.fsdp_config.cpu_offload"),
    f"{_ROLLOUT}name": Here(f"{_ENGINE}backend", _one_of({"vllm": "vllm", "hf": "local"})),
    f"{_ROLLOUT}n": Here("generator.n_samples_per_prompt"),
    f"{_ROLLOUT}temperature": Here("generator.sampling_params.temperature"),
    f"{_ROLLOUT}top_p": Here("generator.sampling_params.top_p"),
    f"{_ROLLOUT}top_k": Here("generator.sampling_params.top_k"),
    f"{_ROLLOUT}response_length": Here("generator.sampling_params.max_generate_length"),
    f"{_ROLLOUT}prompt_length": Here("trainer.max_prompt_length"),
    f"{_ROLLOUT}gpu_memory_utilization": Here(f"{_ENGINE}gpu_memory_utilization"),
    f"{_ROLLOUT}tensor_model_parallel_size": Here(f"{_ENGINE}tensor_parallel_size"),
    f"{_ROLLOUT}pipeline_model_parallel_size": Here(f"{_ENGINE}pipeline_parallel_size"),
    f"{_ROLLOUT}data_parallel_size": Here(f"{_ENGINE}data_parallel_size"),
    f"{_ROLLOUT}expert_parallel_size": Here(f"{_ENGINE}expert_parallel_size"),
    f"{_ROLLOUT}max_num_batched_tokens": Here(f"{_ENGINE}max_num_batched_tokens"),
    f"{_ROLLOUT}max_num_seqs": Here(f"{_ENGINE}max_num_seqs"),
    f"{_ROLLOUT}max_model_len": Here(f"{_ENGINE}engine_init_kwargs.max_model_len"),
    f"{_ROLLOUT}enforce_eager": Here(f"{_ENGINE}enforce_eager"),
    f"{_ROLLOUT}enable_chunked_prefill": Here(f"{_ENGINE}enable_chunked_prefill"),
    f"{_ROLLOUT}enable_prefix_caching": Here(f"{_ENGINE}enable_prefix_caching"),
    f"{_ROLLOUT}dtype": Here(f"{_ENGINE}model_dtype"),
    f"{_ROLLOUT}log_prob_micro_batch_size_per_gpu": Here("trainer.micro_forward_batch_size_per_gpu"),
    f"{_ROLLOUT}multi_turn.max_assistant_turns": Here("generator.max_turns"),
    f"{_ROLLOUT}val_kwargs.n": Here("generator.eval_n_samples_per_prompt"),
    f"{_ROLLOUT}val_kwargs.temperature": Here("generator.eval_sampling_params.temperature"),
    f"{_ROLLOUT}val_kwargs.top_p": Here("generator.eval_sampling_params.top_p"),
    f"{_ROLLOUT}val_kwargs.top_k": Here("generator.eval_sampling_params.top_k"),
    "critic.model.path": Here("trainer.critic.model.path"),
    "critic.optim.lr": Here("trainer.critic.optimizer_config.lr"),
    "critic.optim.weight_decay": Here("trainer.critic.optimizer_config.weight_decay"),
    "critic.optim.lr_warmup_steps": Here("trainer.critic.optimizer_config.num_warmup_steps"),
    "critic.grad_clip": Here("trainer.critic.optimizer_config.max_grad_norm"),
    "critic.ppo_mini_batch_size": Here("trainer.critic_mini_batch_size"),
    "critic.cliprange_value": Here(f"{_ALGORITHM}value_clip"),
    "algorithm.adv_estimator": Here(f"{_ALGORITHM}advantage_estimator", _one_of(_ESTIMATORS)),
    "algorithm.gamma": Here(f"{_ALGORITHM}gamma"),
    "algorithm.lam": Here(f"{_ALGORITHM}lambd"),
    "algorithm.norm_adv_by_std_in_grpo": Here(f"{_ALGORITHM}grpo_norm_by_std"),
    "algorithm.use_kl_in_reward": Here(f"{_ALGORITHM}use_kl_in_reward"),
    "algorithm.kl_penalty": Here(f"{_ALGORITHM}kl_estimator_type", _one_of(_KL)),
    "algorithm.kl_ctrl.type": Here(f"{_ALGORITHM}kl_ctrl.type"),
    "algorithm.kl_ctrl.target_kl": Here(f"{_ALGORITHM}kl_ctrl.kl_target"),
    "algorithm.kl_ctrl.horizon": Here(f"{_ALGORITHM}kl_ctrl.horizon"),
    "algorithm.filter_groups.enable": Here(
        f"{_ALGORITHM}dynamic_sampling.type", _one_of({True: "filter", False: None})
    ),
    "algorithm.filter_groups.max_num_gen_batches": Here(f"{_ALGORITHM}dynamic_sampling.max_sample_batches"),
    "algorithm.rollout_correction.rollout_is": Here(
        f"{_ALGORITHM}off_policy_correction.tis_ratio_type",
        _one_of({"token": "token", "sequence": "sequence", None: "off"}),
    ),
    "algorithm.rollout_correction.rollout_is_threshold": Here(
        f"{_ALGORITHM}off_policy_correction.token_tis_ratio_clip_high"
    ),
    "trainer.nnodes": Here("trainer.placement.policy_num_nodes"),
    "trainer.n_gpus_per_node": Here("trainer.placement.policy_num_gpus_per_node"),
    "trainer.total_epochs": Here("trainer.epochs"),
    "trainer.total_training_steps": Here("trainer.max_training_steps"),
    "trainer.save_freq": Here("trainer.ckpt_interval"),
    "trainer.test_freq": Here("trainer.eval_interval"),
    "trainer.val_before_train": Here("trainer.eval_before_train"),
    "trainer.project_name": Here("trainer.project_name"),
    "trainer.experiment_name": Here("trainer.run_name"),
    "trainer.default_local_dir": Here("trainer.run_dir"),
    "trainer.logger": Here("trainer.logger"),
    "trainer.resume_mode": Here("trainer.resume_mode", _one_of(_RESUME)),
    "trainer.resume_from_path": Here("trainer.resume_path"),
    "trainer.max_actor_ckpt_to_keep": Here("trainer.max_ckpts_to_keep"),
}
for _name, _section in (("actor", "policy"), ("ref", "ref")):
    for _size in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    ):
        KEYS[f"actor_rollout_ref.{_name}.megatron.{_size}"] = Here(f"trainer.{_section}.megatron_config.{_size}")

_LEAVES = "with trainer.placement.colocate_all, idle models move to CPU memory"
_SAMPLES = "samples.jsonl has some samples of each step and each evaluation; trainer.num_logged_samples sets how many"
_REMOTE_CODE = f"only engines have this setting, as {_ENGINE}engine_init_kwargs.trust_remote_code"
NO_EFFECT: dict[str, str] = {
    f"{_ACTOR}use_dynamic_bsz": "trainer.max_tokens_per_microbatch above 0 packs by tokens",
    f"{_ROLLOUT}log_prob_use_dynamic_bsz": "trainer.max_tokens_per_microbatch above 0 packs by tokens",
    f"{_REF}log_prob_use_dynamic_bsz": "trainer.max_tokens_per_microbatch above 0 packs by tokens",
    f"{_ROLLOUT}log_prob_max_token_len_per_gpu": "trainer.max_tokens_per_microbatch applies to scoring too",
    f"{_REF}log_prob_max_token_len_per_gpu": "trainer.max_tokens_per_microbatch applies to scoring too",
    f"{_ACTOR}use_torch_compile": "the policy is not compiled",
    f"{_ACTOR}fsdp_config.param_offload": _LEAVES,
    f"{_ACTOR}fsdp_config.optimizer_offload": _LEAVES,
    f"{_ACTOR}megatron.param_offload": _LEAVES,
    f"{_ACTOR}megatron.optimizer_offload": _LEAVES,
    f"{_ACTOR}megatron.grad_offload": _LEAVES,
    f"{_ACTOR}fsdp_config.forward_prefetch": "torch's fully_shard prefetches by itself",
    f"{_ROLLOUT}calculate_log_probs": "log-probs of sampled tokens are always returned",
    f"{_ROLLOUT}free_cache_engine": "with trainer.placement.colocate_all, vLLM frees its GPUs while training runs",
    f"{_ROLLOUT}load_format": "engines load the model, and get the trainer's weights before they sample",
    f"{_ROLLOUT}mode": "requests are always asynchronous",
    f"{_ROLLOUT}layered_summon": "weights are gathered bucket by bucket",
    f"{_ROLLOUT}disable_log_stats": "every server has vLLM's metrics at /metrics",
    f"{_ROLLOUT}val_kwargs.do_sample": "a temperature above 0 samples",
    "actor_rollout_ref.hybrid_engine": "trainer.placement.colocate_all says whether devices are shared",
    "actor_rollout_ref.model.trust_remote_code": _REMOTE_CODE,
    "actor_rollout_ref.model.use_shm": "model files are not copied to shared memory",
    "data.truncation": "prompts are never cut; data.on_long_prompt decides what happens to long ones",
    "data.trust_remote_code": "no code of a data set is run",
    "data.val_batch_size": "trainer.eval_batch_size limits the prompts that are evaluated at a time",
    "data.reward_fn_key": "environment.env_class or a row's env_class names the environment",
    "data.return_raw_chat": "prompts are always kept as they are in the row, as messages or text",
    "data.filter_overlong_prompts_workers": "prompt lengths are computed in one process",
    "reward_model.enable": "environments give rewards, and may ask a model",
    "reward_model.reward_manager": "an environment gives each episode's reward",
    "trainer.critic_warmup": "critic and policy are both trained from the first step",
    "trainer.balance_batch": "sequences are always balanced over ranks",
    "trainer.device": "the machine's hardware determines the device",
    "trainer.log_val_generations": _SAMPLES,
    "trainer.default_hdfs_dir": "trainer.ckpt_path may be a remote address",
    "trainer.validation_data_dir": _SAMPLES,
    "trainer.rollout_data_dir": _SAMPLES,
}
"""Keys without effect here, each with the reason."""
