"""Checks that need only the values of a configuration. They use no processes, devices or files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from rl_core.config.resolving import RULES, value_at, with_value
from rl_core.config.tree import Config
from rl_core.errors import ConfigError, Mistakes
from rl_core.interfaces import LoraConfig

# key → smallest and largest allowed value; None: no bound.
BOUNDS: dict[str, tuple[float | None, float | None]] = {
    "trainer.placement.policy_num_nodes": (1, None),
    "trainer.placement.policy_num_gpus_per_node": (1, None),
    "trainer.placement.ref_num_nodes": (1, None),
    "trainer.placement.ref_num_gpus_per_node": (1, None),
    "trainer.placement.critic_num_nodes": (1, None),
    "trainer.placement.critic_num_gpus_per_node": (1, None),
    **{
        f"trainer.{model}.{key}": bounds
        for model in ("policy", "critic")
        for key, bounds in {
            "optimizer_config.weight_decay": (0, None),
            "optimizer_config.max_grad_norm": (0, None),
            "optimizer_config.num_warmup_steps": (0, None),
            "model.lora.rank": (0, None),
            "model.lora.dropout": (0, 1),
            "model.lora.max_loras": (1, None),
            "model.lora.max_cpu_loras": (1, None),
        }.items()
    },
    "trainer.algorithm.gamma": (0, 1),
    "trainer.algorithm.lambd": (0, 1),
    "trainer.algorithm.eps_clip_low": (0, 1),
    "trainer.algorithm.eps_clip_high": (0, None),
    "trainer.algorithm.clip_ratio_c": (1, None),
    "trainer.algorithm.value_clip": (0, None),
    "trainer.algorithm.kl_loss_coef": (0, None),
    "trainer.algorithm.entropy_loss_coef": (0, None),
    "trainer.algorithm.off_policy_sequence_mask": (0, None),
    "trainer.algorithm.kl_ctrl.horizon": (1, None),
    "trainer.algorithm.dynamic_sampling.max_sample_batches": (1, None),
    "trainer.algorithm.dynamic_sampling.min_replace_ratio": (0, 1),
    "trainer.epochs": (1, None),
    "trainer.max_training_steps": (1, None),
    "trainer.train_batch_size": (1, None),
    "trainer.policy_mini_batch_size": (1, None),
    "trainer.critic_mini_batch_size": (1, None),
    "trainer.update_epochs_per_batch": (1, None),
    "trainer.micro_train_batch_size_per_gpu": (1, None),
    "trainer.micro_forward_batch_size_per_gpu": (1, None),
    "trainer.logprobs_chunk_size": (1, None),
    "trainer.num_threads": (1, None),
    "trainer.max_staleness": (0, None),
    "trainer.pipeline_depth": (0, None),
    "trainer.max_consecutive_nonfinite_steps": (1, None),
    "trainer.max_prompt_length": (1, None),
    "trainer.eval_batch_size": (1, None),
    "trainer.num_logged_samples": (0, None),
    "trainer.entropy_interval": (0, None),
    "trainer.max_failure_rate": (0, 1),
    "environment.num_workers": (1, None),
    "trainer.seed": (0, None),
    "generator.n_samples_per_prompt": (1, None),
    "generator.eval_n_samples_per_prompt": (1, None),
    "generator.max_turns": (1, None),
    "generator.max_input_length": (1, None),
    "generator.sampling_params.max_generate_length": (1, None),
    "generator.sampling_params.min_p": (0, 1),
    "generator.eval_sampling_params.max_generate_length": (1, None),
    "generator.eval_sampling_params.temperature": (0, None),
    "generator.eval_sampling_params.min_p": (0, 1),
    "generator.inference_engine.num_engines": (1, None),
    "generator.inference_engine.max_num_seqs": (1, None),
    "generator.inference_engine.weight_bucket_bytes": (1, None),
    "generator.inference_engine.weight_sync_whole_interval": (1, None),
    "generator.inference_engine.weight_verification.interval": (0, None),
    "generator.inference_engine.weight_verification.num_tokens": (256, None),
}
# key → largest allowed value. A larger value would exhaust the memory, or a step would never end. Comments state other
# reasons.
LARGEST: dict[str, float] = {
    "trainer.seed": 2**63 - 1,  # the largest int64
    "trainer.num_threads": 1024,
    "trainer.train_batch_size": 2**20,
    "trainer.update_epochs_per_batch": 1000,
    "trainer.policy.model.lora.rank": 2**16,
    "trainer.critic.model.lora.rank": 2**16,
    "generator.max_turns": 2**16,
    "generator.n_samples_per_prompt": 2**16,
    "generator.eval_n_samples_per_prompt": 2**16,
    "generator.inference_engine.weight_verification.num_tokens": 2**20,
    # `prove_at_start` increases its noise until the log-probs change by 1.5 nats, and fails if they change by less than
    # nine times the limit. With a limit above 1.5 / 9, it could fail although every tensor arrives.
    "generator.inference_engine.weight_verification.limit": 0.16,
    # About 32 years. Python's threads refuse to wait for 300 years or longer, and Ray refuses infinity.
    **dict.fromkeys(
        (
            "trainer.generation_timeout_s",
            "trainer.worker_timeout_s",
            "trainer.worker_start_timeout_s",
            "trainer.worker_silence_s",
            "environment.timeout_s",
        ),
        10**9,
    ),
}
FINITE = (
    "trainer.algorithm.kl_loss_coef",
    "trainer.algorithm.entropy_loss_coef",
    "trainer.algorithm.temperature",
    "generator.sampling_params.temperature",
    "generator.eval_sampling_params.temperature",
)
"""Keys whose infinite value would make losses NaN, or make every token equally likely."""
_LARGEST_RATE = 10.0
"""AdamW moves each weight by about the learning rate in every step. With a higher learning rate than this, the weights
are noise after one step and NaN after three."""
ABOVE_ZERO = (
    "trainer.policy.optimizer_config.lr",
    "trainer.critic.optimizer_config.lr",
    "trainer.policy.optimizer_config.eps",
    "trainer.critic.optimizer_config.eps",
    "generator.sampling_params.temperature",
    "trainer.algorithm.temperature",
    "trainer.algorithm.kl_ctrl.kl_target",
    "trainer.generation_timeout_s",
    "environment.timeout_s",
    "generator.inference_engine.weight_verification.limit",
    "trainer.worker_timeout_s",
    "trainer.worker_start_timeout_s",
    "trainer.worker_silence_s",
    "generator.sampling_params.top_p",
    "generator.eval_sampling_params.top_p",
)
_PLAYING_READS = (
    "generator.",
    "environment.",
    "trainer.max_prompt_length",
    "trainer.eval_batch_size",
    "trainer.generation_timeout_s",
    "trainer.num_threads",
    "trainer.seed",
)
"""Prefixes of the keys that evaluation and generation without training read."""
_TRAINING = ("generator.sampling_params.temperature", "generator.inference_engine.weight_")
"""Exceptions to `_PLAYING_READS`: prefixes of keys whose bounds apply only in training, because only training sends and
verifies weights, and only training refuses temperature 0."""
ESTIMATORS_OF_GROUPS = (
    "best_minus_second",
    "grpo",
    "maxrl",
    "opo",
    "pass_at_k",
    "reinforce++_baseline",
    "rloo",
    "turn_level",
)
"""Estimators that compare the samples of a group."""

LOSSES_WITHOUT_ADVANTAGES = ("cross_entropy", "dpo", "reward_model")
"""Losses that read no advantages, so that the estimator has no effect on them."""


def check_values(config: Config) -> None:
    """Runs the checks that need only the values. Raises ConfigError, or ConfigErrors for several mistakes."""
    mistakes = Mistakes()
    gather_values(config, mistakes)
    mistakes.raise_found()


def gather_values(config: Config, mistakes: Mistakes) -> None:
    """Records the errors that `check_values` would raise."""
    gather_directories(config, mistakes)
    gather_out_of_bounds(config, mistakes)
    for check, keys in _VALUE_CHECKS.items():
        if not mistakes.about(*keys):
            mistakes.add(*check(config))


def gather_playing_values(config: Config, mistakes: Mistakes) -> None:
    """Records those mistakes of `gather_values` that affect evaluation or generation without training."""
    gather_directories(config, mistakes)
    gather_out_of_bounds(
        config, mistakes, is_read=lambda key: key.startswith(_PLAYING_READS) and not key.startswith(_TRAINING)
    )
    mistakes.add(*_reward_functions(config))
    temperature = config.generator.sampling_params.temperature
    if not 0 <= temperature < math.inf:
        message = f"got {temperature}; expected a finite number, at least 0"
        mistakes.add(ConfigError(f"{message}", key="generator.sampling_params.temperature"))
    if not mistakes.about("generator.sampling_params", "generator.eval_sampling_params"):
        mistakes.add(*_sampling(config))


def gather_out_of_bounds(
    config: Config, mistakes: Mistakes, *, is_read: Callable[[str], bool] = lambda key: True
) -> None:
    """Records every key for which `is_read` is true and whose value is out of bounds. Skips keys that are None (some
    are, before `resolve`) and keys with the value that their rule derives from another key."""
    bounded = {*BOUNDS, *LARGEST, *FINITE, *ABOVE_ZERO}
    for rule in RULES:
        if rule.key in bounded and value_at(config, rule.key) == rule.value(config):
            config = with_value(config, rule.key, None)
    for key, (low, high) in BOUNDS.items():
        value = value_at(config, key) if is_read(key) else None
        if value is not None and ((low is not None and value < low) or (high is not None and value > high)):
            expected = f"between {low} and {high}" if low is not None and high is not None else f"at least {low}"
            mistakes.add(ConfigError(f"got {value}; expected {expected}", key=key))
    for key, largest in LARGEST.items():
        value = value_at(config, key) if is_read(key) else None
        if value is not None and value > largest:
            mistakes.add(ConfigError(f"got {value}; expected at most {largest}", key=key))
    for key in FINITE:
        if is_read(key) and value_at(config, key) == math.inf:
            mistakes.add(ConfigError("got inf; expected a finite number", key=key))
    for key in ABOVE_ZERO:
        value = value_at(config, key) if is_read(key) else None
        if value is not None and not value > 0:
            remedy = " (at 0, all samples of a prompt would be the same; evaluation is greedy by default)"
            is_sampling = key == "generator.sampling_params.temperature"
            mistakes.add(ConfigError(f"got {value}; expected above 0{remedy * is_sampling}", key=key))


def gather_directories(config: Config, mistakes: Mistakes) -> None:
    """Records an error for an empty path, and for a run's name that cannot be the name of a directory in `runs`. An
    empty path would mean the current directory, and an empty name `runs` itself."""
    for key in ("trainer.run_dir", "trainer.ckpt_path", "trainer.export_path"):
        if value_at(config, key) == "":
            mistakes.add(ConfigError("got an empty path; expected a directory (. is the current one)", key=key))
    name = config.trainer.run_name
    if not name.strip() or name.startswith(".") or "/" in name or "\0" in name:
        mistakes.add(
            ConfigError(
                f"got {name!r}; expected a name that is not empty, does not begin with a dot and contains neither a "
                "slash nor a NUL, e.g. trainer.run_name=first_try; to choose the directory of the run, set "
                "trainer.run_dir",
                key="trainer.run_name",
            )
        )


def _optimizers(config: Config) -> Iterator[ConfigError]:
    for key in ("trainer.policy.optimizer_config", "trainer.critic.optimizer_config"):
        for name in ("lr", "weight_decay", "eps"):
            value = value_at(config, f"{key}.{name}")
            if value == math.inf:
                yield ConfigError(f"got {value}; expected a finite number", key=f"{key}.{name}")
            elif name == "lr" and value > _LARGEST_RATE:
                yield ConfigError(f"got {value:g}; expected at most {_LARGEST_RATE:g}, e.g. 1e-6", key=f"{key}.{name}")
        betas = value_at(config, f"{key}.adam_betas")
        if not all(0 <= beta < 1 for beta in betas):
            yield ConfigError(f"got {list(betas)}; expected two numbers from 0 to below 1", key=f"{key}.adam_betas")


def _sampling(config: Config) -> Iterator[ConfigError]:
    for key in ("generator.sampling_params", "generator.eval_sampling_params"):
        top_p, top_k = value_at(config, f"{key}.top_p"), value_at(config, f"{key}.top_k")
        if top_p > 1:
            yield ConfigError(f"got {top_p}; expected above 0 and at most 1 (1 takes all tokens)", key=f"{key}.top_p")
        if top_k != -1 and top_k < 1:
            yield ConfigError(f"got {top_k}; expected at least 1, or -1 for all tokens", key=f"{key}.top_k")
    training, evaluation = config.generator.sampling_params.stop, config.generator.eval_sampling_params.stop
    named = {"generator.sampling_params.stop": training}
    if evaluation != training:  # otherwise derived from it
        named["generator.eval_sampling_params.stop"] = evaluation or ()
    for key, stop in named.items():
        if "" in stop:
            yield ConfigError(
                "got an empty text, with which every response ends at its first token; remove it", key=key
            )


def _lora(config: Config) -> Iterator[ConfigError]:
    """Refuses a `max_cpu_loras` below `max_loras`, and LoRA keys that have no effect because no adapter is sent
    separately from the base weights."""
    policy, critic = config.trainer.policy.model.lora, config.trainer.critic.model.lora
    defaults = LoraConfig()
    for key in ("merge_lora", "max_loras", "max_cpu_loras"):
        if getattr(critic, key) != getattr(defaults, key):
            yield ConfigError(
                "a critic is not sent to the engines; remove this key", key=f"trainer.critic.model.lora.{key}"
            )
    where = "trainer.policy.model.lora"
    if not policy.merge_lora and policy.rank == 0:
        yield ConfigError(
            f"got false, but there is no adapter to send; set {where}.rank above 0, or merge_lora=true",
            key=f"{where}.merge_lora",
        )
    for key in ("max_loras", "max_cpu_loras"):
        if policy.merge_lora and getattr(policy, key) != getattr(defaults, key):
            yield ConfigError(
                f"got {getattr(policy, key)}, but an engine with merged weights serves no adapters; remove this key, "
                f"or set {where}.merge_lora=false",
                key=f"{where}.{key}",
            )
    if policy.max_cpu_loras is not None and policy.max_cpu_loras < policy.max_loras:
        yield ConfigError(
            f"{policy.max_cpu_loras} is less than max_loras={policy.max_loras}, the number of adapters in one batch; "
            "set it to at least max_loras, or remove it",
            key=f"{where}.max_cpu_loras",
        )


def _placement(config: Config) -> Iterator[ConfigError]:
    algorithm = config.trainer.algorithm
    if algorithm.use_kl_loss or algorithm.use_kl_in_reward:
        yield from reference_apart(config)


def reference_apart(config: Config) -> Iterator[ConfigError]:
    """Refuses a reference that shares the policy's devices but has a different number of nodes or of ranks per node."""
    placement = config.trainer.placement
    policy, reference = placement.policy_shape, placement.ref_shape
    is_on_ranks = config.trainer.ref.inference_backend is None
    if placement.colocate_policy_ref and is_on_ranks and policy != reference:
        yield ConfigError(
            "colocate_policy_ref=true needs a reference with the policy's nodes × ranks per node; the policy has "
            f"{policy[0]} × {policy[1]}, but ref_num_nodes × ref_num_gpus_per_node is {reference[0]} × {reference[1]}. "
            "Remove both reference keys, or set colocate_policy_ref=false",
            key="trainer.placement",
        )


def _mini_batches(config: Config) -> Iterator[ConfigError]:
    yield from undivided_batch(config, "trainer.policy_mini_batch_size")


def _pipeline(config: Config) -> Iterator[ConfigError]:
    depth, bound = config.trainer.pipeline_depth, config.trainer.max_staleness
    if depth is not None and depth > bound:
        yield ConfigError(
            f"{depth} steps ahead is more than trainer.max_staleness={bound} allows, so groups could become too old to "
            f"be trained on; set it to at most {bound}, or set trainer.max_staleness={depth}",
            key="trainer.pipeline_depth",
        )


def _token_budget(config: Config) -> Iterator[ConfigError]:
    budget, (prompt_key, prompt) = config.trainer.max_tokens_per_microbatch, longest_prompt(config)
    response = config.generator.sampling_params.max_generate_length
    if budget != -1 and budget < prompt + response:
        yield ConfigError(
            f"{budget} tokens cannot hold the longest sequence, {prompt_key}={prompt} + "
            f"generator.sampling_params.max_generate_length={response}; set it to at least {prompt + response}, or -1 "
            "to count sequences instead",
            key="trainer.max_tokens_per_microbatch",
        )


def longest_prompt(config: Config) -> tuple[str, int]:
    """The key that limits the longest prompt, of the first turn or a later one, and its value."""
    first, later = config.trainer.max_prompt_length, config.generator.max_input_length
    if config.generator.max_turns > 1 and later is not None and later > first:
        return "generator.max_input_length", later
    return "trainer.max_prompt_length", first


def undivided_batch(config: Config, key: str) -> Iterator[ConfigError]:
    """Refuses a mini-batch size that does not divide the batch size."""
    batch, mini = config.trainer.train_batch_size, value_at(config, key)
    if mini > batch:
        yield ConfigError(
            f"{mini} prompts are more than trainer.train_batch_size={batch}; set it to at most {batch}", key=key
        )
    elif batch % mini:
        fitting = max(size for size in range(1, mini) if batch % size == 0)
        yield ConfigError(
            f"{mini} does not divide trainer.train_batch_size={batch}; the next smaller divisor is {fitting}", key=key
        )


def _groups(config: Config) -> Iterator[ConfigError]:
    algorithm, num_samples = config.trainer.algorithm, config.generator.n_samples_per_prompt
    if num_samples > 1:
        return
    needs = None
    reads_advantages = algorithm.policy_loss_type not in LOSSES_WITHOUT_ADVANTAGES
    if reads_advantages and algorithm.advantage_estimator in ESTIMATORS_OF_GROUPS:
        needs = f"trainer.algorithm.advantage_estimator={algorithm.advantage_estimator}"
    elif algorithm.dynamic_sampling.type is not None:
        needs = f"trainer.algorithm.dynamic_sampling.type={algorithm.dynamic_sampling.type}"
    elif algorithm.zero_variance_filter:
        needs = "trainer.algorithm.zero_variance_filter"
    if needs:
        yield ConfigError(
            f"got 1; {needs} compares the samples of a prompt and learns nothing from one; set it to at least 2",
            key="generator.n_samples_per_prompt",
        )


def _kl(config: Config) -> Iterator[ConfigError]:
    algorithm = config.trainer.algorithm
    if algorithm.use_kl_loss and algorithm.use_kl_in_reward:
        yield ConfigError(
            "use_kl_loss and use_kl_in_reward are both true; the KL is used either in the loss or in the reward; set "
            "one of them to false",
            key="trainer.algorithm",
        )
    if algorithm.kl_ctrl.type == "adaptive" and not algorithm.use_kl_in_reward:
        yield ConfigError(
            "adaptive works only for the KL in the reward; set trainer.algorithm.use_kl_in_reward=true, or type=fixed",
            key="trainer.algorithm.kl_ctrl.type",
        )
    estimator = algorithm.kl_estimator_type
    if algorithm.use_kl_in_reward and estimator.endswith(("+", "_unbiased")):
        yield ConfigError(
            f"{estimator} can be used only in the loss, because the KL in the reward has no gradient; use "
            f"{estimator.removesuffix('+').removesuffix('_unbiased')}",
            key="trainer.algorithm.kl_estimator_type",
        )


def _reduction(config: Config) -> Iterator[ConfigError]:
    algorithm = config.trainer.algorithm
    if algorithm.loss_reduction == "seq_mean_token_sum_norm" and not (algorithm.max_seq_len or 0) > 0:
        yield ConfigError(
            f"got {algorithm.max_seq_len}; loss_reduction=seq_mean_token_sum_norm divides by it and needs a number "
            "above 0, e.g. the value of generator.sampling_params.max_generate_length",
            key="trainer.algorithm.max_seq_len",
        )


def _resume(config: Config) -> Iterator[ConfigError]:
    mode, path = config.trainer.resume_mode, config.trainer.resume_path
    if (mode == "from_path") != (path is not None):
        yield ConfigError(
            f"got {path!r} with trainer.resume_mode={mode}; set both a path and resume_mode=from_path, or neither",
            key="trainer.resume_path",
        )


def _kept_checkpoints(config: Config) -> Iterator[ConfigError]:
    kept = config.trainer.max_ckpts_to_keep
    if kept != -1 and kept < 1:
        yield ConfigError(
            f"got {kept}; expected at least 1, or -1 to keep all. To save none at intervals, set "
            "trainer.ckpt_interval=-1",
            key="trainer.max_ckpts_to_keep",
        )


def _reward_functions(config: Config) -> Iterator[ConfigError]:
    environment, key = config.environment, "environment.reward_functions"
    if environment.reward_functions and environment.env_class != "reward_functions":
        yield ConfigError(
            f"both reward functions and environment.env_class={environment.env_class} are set, but only one of them "
            "can score; set environment.env_class=null to use the functions, or remove the functions",
            key=key,
        )
    if environment.reward_weights and not environment.reward_functions:
        yield ConfigError(
            f"there are no functions to weight; set {key}, or remove the weights", key="environment.reward_weights"
        )


_VALUE_CHECKS: dict[Callable[[Config], Iterator[ConfigError]], tuple[str, ...]] = {
    _optimizers: (),
    _sampling: (),
    _lora: tuple(f"trainer.policy.model.lora.{key}" for key in ("rank", "max_loras", "max_cpu_loras")),
    _placement: ("trainer.placement",),
    _mini_batches: ("trainer.train_batch_size", "trainer.policy_mini_batch_size"),
    _pipeline: ("trainer.max_staleness", "trainer.pipeline_depth"),
    _token_budget: (
        "trainer.max_prompt_length",
        "generator.max_input_length",
        "generator.sampling_params.max_generate_length",
    ),
    _groups: ("generator.n_samples_per_prompt",),
    _kl: (),
    _reduction: (),
    _resume: (),
    _kept_checkpoints: (),
    _reward_functions: (),
}
"""Check → keys that must be valid for the check to make sense. The check is skipped if one of the keys already has a
mistake."""
