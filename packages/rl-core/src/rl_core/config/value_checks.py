"""Checks that need only the values of a configuration. They use no processes, devices or files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs

from rl_core.config.checking import passes
from rl_core.config.resolving import RULES, value_at
from rl_core.config.tree import Config
from rl_core.errors import ConfigError, Mistakes
from rl_core.interfaces import LoraConfig, bounds_of

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
_TRAINING = "generator.inference_engine.weight_"
"""Exception to `_PLAYING_READS`: only training sends and verifies weights."""
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
    for check in _VALUE_CHECKS:
        passes(mistakes, check, config)


def gather_playing_values(config: Config, mistakes: Mistakes) -> None:
    """Records those mistakes of `gather_values` that affect evaluation or generation without training."""
    gather_directories(config, mistakes)
    gather_out_of_bounds(
        config, mistakes, is_read=lambda key: key.startswith(_PLAYING_READS) and not key.startswith(_TRAINING)
    )
    passes(mistakes, _reward_functions, config)
    passes(mistakes, _sampling, config)


def gather_out_of_bounds(
    config: Config, mistakes: Mistakes, *, is_read: Callable[[str], bool] = lambda key: True
) -> None:
    """Records every key for which `is_read` is true and whose value is out of bounds. Skips keys that are None (some
    are, before `resolve`) and keys with the value that their rule derives from another key."""
    derived = {rule.key: rule.value for rule in RULES}
    for section, record, field in _bounded_fields(config, ""):
        key, value = f"{section}.{field.name}", getattr(record, field.name)
        if is_read(key) and not (key in derived and value == derived[key](config)):
            for bound in bounds_of(field):
                try:
                    bound(record, field, value)
                except ConfigError as error:
                    mistakes.add(error.below(section))
                    break


def _bounded_fields(record: Any, section: str) -> Iterator[tuple[str, Any, attrs.Attribute[Any]]]:
    """The fields of a record and of the records in it that have bounds, with the section and the record."""
    for field in attrs.fields(type(record)):
        value = getattr(record, field.name)
        if attrs.has(type(value)):
            yield from _bounded_fields(value, f"{section}.{field.name}" if section else field.name)
        elif bounds_of(field):
            yield section, record, field


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


def _training_temperature(config: Config) -> Iterator[ConfigError]:
    if config.generator.sampling_params.temperature == 0:
        yield ConfigError(
            "got 0; expected above 0 for training (at 0, all samples of a prompt would be the same; evaluation is "
            "greedy by default)",
            key="generator.sampling_params.temperature",
        )


def _sampling(config: Config) -> Iterator[ConfigError]:
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


_VALUE_CHECKS = (
    _training_temperature,
    _sampling,
    _lora,
    _placement,
    _mini_batches,
    _pipeline,
    _token_budget,
    _groups,
    _kl,
    _reduction,
    _resume,
    _reward_functions,
)
