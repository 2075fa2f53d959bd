"""Builds the settings of each part of a run from a resolved configuration. Starts nothing and reads no file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from rl_core import plugins
from rl_core.config import (
    Config,
    advantage_params,
    asks_for_correction,
    correction_params,
    engine_spec,
    loss_params,
    needs_critic,
    needs_engine,
    needs_reference,
    objective_of,
)
from rl_core.errors import ConfigError, DataError
from rl_core.interfaces import Backend, LossSpec, ModelConfig, Role, WorkerSpec
from rl_core.trainer.loop.rollouts import RolloutSettings
from rl_core.trainer.loop.training_loop import LoopSettings
from rl_core.trainer.publishing.serving import ServingSettings
from rl_core.trainer.publishing.verification import LIMITS, VerificationSettings
from rl_core.trainer.state.remote_checkpoints import copies_of
from rl_core.trainer.update.batch_advantages import load_estimator
from rl_core.trainer.update.batch_update import UpdateSettings
from rl_core.trainer.update.model_update import ModelUpdateSettings
from rl_core.trainer.update.scoring_pass import scoring_pass
from rl_core.workers import MicroBatchLimits


def num_steps(config: Config, num_rows: int) -> int:
    """Number of steps of a run: `max_training_steps`, or the number of whole batches in all epochs.

    Raises:
        DataError: all epochs together do not fill one batch, and `max_training_steps` is not set.
    """
    trainer = config.trainer
    available = trainer.epochs * num_rows // trainer.train_batch_size
    if trainer.max_training_steps is not None:
        return trainer.max_training_steps
    if available == 0:
        raise DataError(
            f"{trainer.epochs} epochs of {num_rows} rows do not fill one batch of {trainer.train_batch_size} prompts: "
            "lower trainer.train_batch_size or raise trainer.epochs",
            key="data.train_data",
        )
    return available


def model_shapes(config: Config) -> dict[Role, tuple[int, int]]:
    """Model of the run → (nodes, ranks per node). Leaves out a reference that an engine serves."""
    placement = config.trainer.placement
    shapes: dict[Role, tuple[int, int]] = {"policy": placement.policy_shape}
    if needs_reference(config) and config.trainer.ref.inference_backend is None:
        shapes["reference"] = placement.ref_shape
    if needs_critic(config):
        shapes["critic"] = placement.critic_shape
    return shapes


def worker_spec(config: Config, role: Role, *, num_training_steps: int | None) -> tuple[Backend, WorkerSpec]:
    """The backend, and the specification of its ranks for one model.

    Args:
        num_training_steps: the learning-rate schedule ends with this step; None: not known.
    """
    trainer = config.trainer
    backend: Backend = plugins.load("rl_core.backends", trainer.strategy, key="trainer.strategy")
    if role == "reference":
        section, model, optimizer = trainer.ref, ModelConfig(path=trainer.ref.model.path), None
    else:
        section = trainer.policy if role == "policy" else trainer.critic
        model, optimizer = section.model, section.optimizer_config
    # If the policy's loss reads predicted values, the policy has a value head instead of a language-model head.
    has_value_head = role == "policy" and "predicted_values" in objective_of(config).reads
    spec = WorkerSpec(
        role="critic" if has_value_head else role,
        model=model,
        optimizer=optimizer,
        options=section.options(backend.config_section),
        bf16=trainer.bf16,
        gradient_checkpointing=trainer.gradient_checkpointing,
        use_sample_packing=trainer.use_sample_packing,
        share_prefixes=_shares_prefixes(config, backend, section.options(backend.config_section)),
        logprobs_chunk_size=trainer.logprobs_chunk_size,
        total_optimizer_steps=_num_optimizer_steps(config, role, num_training_steps),
        seed=trainer.seed,
        num_threads=trainer.num_threads,
    )
    return backend, spec


def _shares_prefixes(config: Config, backend: Backend, options: Any) -> bool:
    """Whether the ranks compute a shared prefix once for all its sequences, not once per sequence. Raises ConfigError
    if `trainer.share_prefixes=true` and the ranks cannot."""
    asked = config.trainer.share_prefixes
    if asked is False:
        return False
    reason = None
    if not config.trainer.use_sample_packing:
        reason = "the rows of a padded micro-batch are computed separately; set trainer.use_sample_packing=true"
    elif not backend.shares_prefixes(options):
        reason = f"the backend {backend.name!r} computes every sequence separately; choose another backend"
    if asked is True and reason is not None:
        raise ConfigError(f"{reason}, or trainer.share_prefixes=auto", key="trainer.share_prefixes")
    return reason is None


def _num_optimizer_steps(config: Config, role: Role, num_training_steps: int | None) -> int | None:
    trainer = config.trainer
    if num_training_steps is None or role == "reference":
        return None
    mini_batch_size = trainer.policy_mini_batch_size if role == "policy" else trainer.critic_mini_batch_size
    return num_training_steps * -(-trainer.train_batch_size // mini_batch_size) * trainer.update_epochs_per_batch


def loop_settings(config: Config, total_steps: int, fingerprint: Mapping[str, Any] | None = None) -> LoopSettings:
    """Builds the loop's settings. `total_steps`: the run's last step. `fingerprint`: stored in checkpoints."""
    trainer = config.trainer
    return LoopSettings(
        last_step=total_steps,
        eval_interval=trainer.eval_interval,
        eval_before_train=trainer.eval_before_train,
        eval_batch_size=trainer.eval_batch_size,
        ckpt_interval=trainer.ckpt_interval,
        max_ckpts_to_keep=trainer.max_ckpts_to_keep,
        hf_save_interval=trainer.hf_save_interval,
        run_dir=config.run_dir,
        checkpoint_root=config.ckpt_dir,
        export_root=Path(trainer.export_path or ""),
        generation_timeout_s=trainer.generation_timeout_s,
        worker_timeout_s=trainer.worker_timeout_s,
        saves_in_background=trainer.async_save,
        merge_steps=config.generator.step_wise_trajectories and config.generator.merge_stepwise_output,
        stream_groups=trainer.stream_groups,
        fingerprint=fingerprint,
        checkpoint_copies=copies_of(config),
        model_path=Path(trainer.export_path or ""),
    )


def serving_settings(config: Config) -> ServingSettings:
    """Builds the settings of weight syncs and of their verification."""
    engine = config.generator.inference_engine
    return ServingSettings(
        max_bucket_bytes=engine.weight_bucket_bytes,
        pause_mode=engine.weight_sync_pause_mode,
        delta_interval=engine.weight_sync_whole_interval if engine.weight_sync_delta else None,
        only_trained=_sends_only_trained(config),
        verification=_verification(config),
    )


def _sends_only_trained(config: Config) -> bool:
    """Whether some parameters are frozen, and the engine keeps tensors that a sync does not send."""
    engine = config.generator.inference_engine
    if config.trainer.policy.model.trainable is None or engine.weight_sync_delta or not needs_engine(config):
        return False
    return engine_spec(config)[0].receives_deltas


def _verification(config: Config) -> VerificationSettings:
    verification = config.generator.inference_engine.weight_verification
    dtypes = (config.engine_dtype, "bfloat16" if config.trainer.bf16 else "float32")
    return VerificationSettings(
        prove_at_start=verification.prove_at_start,
        interval=verification.interval,
        num_tokens=verification.num_tokens,
        limit=verification.limit if verification.limit is not None else max(LIMITS[dtype] for dtype in dtypes),
        limit_grows=verification.limit is None,
        is_corrected=asks_for_correction(config),
        engine_options=tuple(config.generator.inference_engine.engine_init_kwargs),
        extra_args=config.generator.sampling_params.extra_args,
        seed=config.trainer.seed,
        limits=_limits(config, config.trainer.micro_forward_batch_size_per_gpu),
    )


def train_rollouts(config: Config, *, plays_greedy: bool = False) -> RolloutSettings:
    """Builds the settings for playing training prompts. `plays_greedy`: whether to play a greedy answer to each prompt
    too, because the advantage estimator reads its reward."""
    dynamic = config.trainer.algorithm.dynamic_sampling
    filters = dynamic.type == "filter"
    batches = dynamic.max_sample_batches if dynamic.type is not None else 1
    rule = "one batch of trainer.train_batch_size"
    if dynamic.type is not None:
        rule = "trainer.algorithm.dynamic_sampling.max_sample_batches × trainer.train_batch_size"
    return RolloutSettings(
        num_samples=config.generator.n_samples_per_prompt,
        params=config.generator.sampling_params.to_params(),
        seed=config.trainer.seed,
        drop_zero_variance=filters,
        max_dropped_groups=batches * config.trainer.train_batch_size,
        limit_rule=rule,
        plays_greedy=plays_greedy,
        max_failure_rate=config.trainer.max_failure_rate,
        samples_per_step=config.trainer.train_batch_size * config.generator.n_samples_per_prompt,
    )


def eval_rollouts(config: Config) -> RolloutSettings:
    """Builds the settings for playing held-out prompts. They differ from the settings of training in two
    ways: sampling parameters and number of samples are the evaluation's, and groups of equal rewards are kept."""
    params = config.generator.eval_sampling_params
    assert params is not None, "resolve() sets generator.eval_sampling_params"
    return attrs.evolve(
        train_rollouts(config),
        num_samples=config.generator.eval_n_samples_per_prompt,
        params=params.to_params(),
        drop_zero_variance=False,
    )


def update_settings(config: Config) -> UpdateSettings:
    """Builds the settings of training on a batch: losses, advantages, corrections and batch sizes."""
    trainer, algorithm = config.trainer, config.trainer.algorithm
    params = advantage_params(config)
    uses_max_seq_len = algorithm.loss_reduction == "seq_mean_token_sum_norm"
    control = algorithm.kl_ctrl
    adaptive = {"kl_target": control.kl_target, "horizon": float(control.horizon)}
    policy = ModelUpdateSettings(
        name="policy",
        loss=LossSpec(
            name=algorithm.policy_loss_type,
            params=loss_params(config),
            kl_coef=algorithm.kl_loss_coef if algorithm.use_kl_loss else 0.0,
            kl_estimator=algorithm.kl_estimator_type,
            entropy_coef=algorithm.entropy_loss_coef if algorithm.use_entropy_loss else 0.0,
            off_policy_sequence_mask=algorithm.off_policy_sequence_mask,
        ),
        reduction=algorithm.loss_reduction,
        reduction_params={"max_seq_len": algorithm.max_seq_len} if uses_max_seq_len else {},
        groups_per_mini_batch=trainer.policy_mini_batch_size,
        epochs=trainer.update_epochs_per_batch,
        temperature=config.temperature,
        limits=_limits(config, trainer.micro_train_batch_size_per_gpu),
        entropy_interval=trainer.entropy_interval,
        max_nonfinite_steps=trainer.max_consecutive_nonfinite_steps,
        seed=trainer.seed,
    )
    # The critic's loss is a mean over tokens, whichever reduction the policy's loss uses.
    critic = attrs.evolve(
        policy,
        name="critic",
        loss=LossSpec(name="value_clip", params={"value_clip": algorithm.value_clip}),
        reduction="token_mean",
        reduction_params={},
        groups_per_mini_batch=trainer.critic_mini_batch_size,
    )
    correction, reads_advantages = correction_params(config), "advantages" in objective_of(config).required_columns
    estimator = load_estimator(algorithm.advantage_estimator, params) if reads_advantages else None
    return UpdateSettings(
        policy=policy,
        critic=critic if needs_critic(config) else None,
        scoring=scoring_pass(config, policy.loss, estimator=estimator, is_corrected=correction is not None),
        estimator=estimator,
        estimator_params=params,
        correction_params=correction,
        kl_in_reward=algorithm.kl_estimator_type if algorithm.use_kl_in_reward else None,
        adaptive_kl=adaptive if control.type == "adaptive" else None,
        normalize_advantages=algorithm.advantage_batch_normalize,
        temperature=config.temperature,
        is_truncated=config.generator.sampling_params.is_truncated and needs_engine(config),
        forward_limits=_limits(config, trainer.micro_forward_batch_size_per_gpu),
    )


def _limits(config: Config, max_sequences: int) -> MicroBatchLimits:
    budget = config.trainer.max_tokens_per_microbatch
    return MicroBatchLimits(max_tokens=budget) if budget > 0 else MicroBatchLimits(max_sequences=max_sequences)
