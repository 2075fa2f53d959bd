"""Finds mistakes in a resolved configuration before a run starts processes, uses devices or writes files.

`value_checks` checks values only, `file_checks` checks files, and this module checks plug-ins. Every error says what to
do. A check is skipped if it reads a key for which another check has found a mistake. `check_plugins` and
`gather_plugins` import torch; `check_function_params` does so only if parameters are set.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

from rl_core import plugins
from rl_core.config.checking import passes
from rl_core.config.context import EVALUATION, TRAINING, require_room_for_responses
from rl_core.config.file_checks import gather_data, gather_policy_model
from rl_core.config.function_params import (
    advantage_params,
    correction_params,
    loss_params,
    needs_critic,
    needs_greedy_answers,
    needs_reference,
    objective_of,
    unread_params,
)
from rl_core.config.layers import ConfigWarning
from rl_core.config.named_plugins import GROUPS, names_at
from rl_core.config.optimizer_checks import require_usable_optimizer
from rl_core.config.resolving import value_at
from rl_core.config.served_models import require_servable_models
from rl_core.config.specs import engine_spec, generator_spec, needs_engine, reference_engine_spec
from rl_core.config.tree import Config
from rl_core.config.value_checks import gather_playing_values, reference_apart, undivided_batch
from rl_core.errors import ConfigError, Mistakes
from rl_core.rank_kit.optimizer_steps import STEPS_WITH_ADAM

if TYPE_CHECKING:
    from rl_core.algorithms.objective import Objective

_LOSS, _ESTIMATOR = "trainer.algorithm.policy_loss_type", "trainer.algorithm.advantage_estimator"
_GREEDY_TOP_P = 1e-6
"""Up to this top_p, the most likely token is the only one: of a million tokens, one has this probability or more."""
_TRANSPORT = "generator.inference_engine.weight_sync_backend"
_PLAYING = ("generator.type", "environment.env_class", "generator.inference_engine.backend")
"""Keys that name the plug-ins that generate and score responses."""


def gather_playing(
    config: Config, mistakes: Mistakes, *, reads: str, makes: Container[str] = (), needs: str = ""
) -> None:
    """Records every mistake that prevents generating and scoring responses without training. Keys that only training
    needs may be missing or wrong.

    Args:
        reads: the key of the prompts, such as `data.val_data`.
        makes: paths that may be missing because they will be created.
        needs: how to get the data files, for the message.
    """
    gather_playing_values(config, mistakes)
    gather_data(config, [reads], mistakes, makes=makes, needs=needs)
    gather_policy_model(config, mistakes, makes=makes)
    _gather_unloadable(config, _PLAYING, mistakes)
    _gather_refusals(config, mistakes)


def check_plugins(config: Config, *, chosen: Container[str] | None = None) -> None:
    """Checks that every named plug-in and function can be imported and accepts the configuration. Imports torch.

    Args:
        chosen: keys that the user set. Only these cause a warning if they have no effect; None: all keys can cause one.

    Raises:
        ConfigError, PluginError: a plug-in cannot be imported, or refuses the configuration.
        ConfigErrors: several such errors.
    """
    mistakes = Mistakes()
    gather_plugins(config, mistakes, chosen=chosen)
    mistakes.raise_found()


def gather_plugins(config: Config, mistakes: Mistakes, *, chosen: Container[str] | None = None) -> None:
    """Records the errors that `check_plugins` would raise. Leaves out errors that follow from earlier mistakes."""
    _gather_unloadable(config, GROUPS, mistakes)
    has_loss = passes(mistakes, _check_loss, config)
    if has_loss:
        passes(mistakes, _check_correction, config)
    _gather_optimizers(config, mistakes, chosen=chosen)
    passes(mistakes, _check_routes, config)
    if _has_engine(config, mistakes):
        passes(mistakes, _check_sampled_distribution, config)
        passes(mistakes, _check_transport, config)
    if passes(mistakes, advantage_params, config):
        passes(mistakes, needs_greedy_answers, config)
        if needs_critic(config):
            _gather_critic(config, mistakes)
        if has_loss:
            _warn_of_unread_params(config, chosen)
            if needs_reference(config):
                _gather_reference(config, mistakes)
    _gather_refusals(config, mistakes)


def _gather_reference(config: Config, mistakes: Mistakes) -> None:
    """Records every mistake that prevents the reference from computing log-probs, on ranks or in an engine."""
    passes(mistakes, reference_apart, config)
    reference = config.trainer.ref
    if reference.inference_backend is None and reference.inference_options:
        mistakes.add(
            ConfigError(
                f"got {', '.join(reference.inference_options)} without an engine; set trainer.ref.inference_backend, "
                "or remove the options, so that ranks compute the reference's log-probs",
                key="trainer.ref.inference_options",
            )
        )
    if reference.inference_backend is not None:
        passes(mistakes, _validate_reference_engine, config)


def _validate_reference_engine(config: Config) -> None:
    found = reference_engine_spec(config)
    assert found is not None, "called only for a reference in an engine"
    if config.temperature != 1.0:
        raise ConfigError(
            f"got {config.temperature:g} with trainer.ref.inference_backend={config.trainer.ref.inference_backend}; "
            "engines score tokens at temperature 1 only. Set this key and generator.sampling_params.temperature to 1, "
            "or remove trainer.ref.inference_backend, so that ranks compute the reference's log-probs",
            key="trainer.algorithm.temperature",
        )
    if config.generator.sampling_params.is_truncated:
        named = " and ".join(config.generator.sampling_params.truncating)
        raise ConfigError(
            f"got {config.trainer.ref.inference_backend}, but engines score tokens in the whole distribution, and "
            f"generator.sampling_params sets {named}; remove one of the two",
            key="trainer.ref.inference_backend",
        )
    engine, spec = found
    try:
        engine.validate(spec)
    except ConfigError as error:  # its message names keys of generator.inference_engine
        raise ConfigError(
            "the reference is served by one engine, which takes its keys from here instead of "
            f"generator.inference_engine: {error}",
            key="trainer.ref.inference_options",
        ) from error


def _gather_unloadable(config: Config, keys: Iterable[str], mistakes: Mistakes) -> None:
    for key in keys:
        for name in names_at(config, key):
            mistakes.passes(plugins.load, GROUPS[key], name, key=key)


def _gather_refusals(config: Config, mistakes: Mistakes) -> None:
    """Records the errors that the generator and the engine raise for their specs."""
    passes(mistakes, _validate_generator, config)
    gather_room(config, mistakes)
    if _has_engine(config, mistakes) and passes(mistakes, _validate_engine, config):
        passes(mistakes, require_servable_models, config)


def _has_engine(config: Config, mistakes: Mistakes) -> bool:
    """Whether a run starts an engine. True if the generator is unknown."""
    return bool(mistakes.about("generator.type")) or needs_engine(config)


def _validate_generator(config: Config) -> None:
    generator, spec = generator_spec(config)
    generator.validate(spec)


def _validate_engine(config: Config) -> None:
    engine, spec = engine_spec(config)
    engine.validate(spec)


def gather_room(config: Config, mistakes: Mistakes) -> None:
    """Records a maximum response length that does not fit into the model's context. Skipped if the context is not
    known."""
    lengths: list[int | None] = []
    for sampling in (TRAINING, EVALUATION):
        key = f"{sampling}.max_generate_length"
        # By default, evaluation has the maximum length of training. The same mistake is recorded only once.
        if value_at(config, key) not in lengths:
            passes(mistakes, require_room_for_responses, config, sampling)
        lengths.append(value_at(config, key))


def check_function_params(config: Config) -> None:
    """Checks that loss and estimator accept the parameters that the configuration sets for them. Imports torch if any
    are set.

    Raises ConfigError or PluginError if the loss or the estimator cannot be used with its parameters, ConfigErrors if
    neither can.
    """
    mistakes = Mistakes()
    if config.trainer.algorithm.policy_loss_params:
        mistakes.passes(loss_params, config)
    if config.trainer.algorithm.advantage_params:
        mistakes.passes(advantage_params, config)
    _gather_optimizers(config, mistakes, chosen=())
    mistakes.raise_found()


def _gather_optimizers(config: Config, mistakes: Mistakes, *, chosen: Container[str] | None) -> None:
    for model in ("policy", "critic"):
        key = f"trainer.{model}.optimizer_config"
        optimizer = value_at(config, key)
        if (optimizer.name != "adamw" or optimizer.params) and not mistakes.about(key):
            mistakes.passes(require_usable_optimizer, optimizer, key)
        for name in ("adam_betas", "eps") if optimizer.name not in STEPS_WITH_ADAM else ():
            if chosen is not None and f"{key}.{name}" in chosen:
                warnings.warn(f"{key}.{name}: has no effect with {optimizer.name}", ConfigWarning, stacklevel=2)


def _warn_of_unread_params(config: Config, chosen: Container[str] | None) -> None:
    algorithm = config.trainer.algorithm
    for key in unread_params(config):
        if chosen is None or key in chosen:
            message = f"{key}: has no effect with {algorithm.advantage_estimator!r} advantages and "
            warnings.warn(f"{message}the {algorithm.policy_loss_type!r} loss", ConfigWarning, stacklevel=2)


def _check_routes(config: Config) -> None:
    """Requires that the engine returns routes if and only if the policy follows them."""
    backend = plugins.load("rl_core.backends", config.trainer.strategy, key="trainer.strategy")
    section = backend.config_section
    trainer, returned = config.trainer, config.generator.inference_engine.enable_return_routed_experts
    engine_key, key = "generator.inference_engine.enable_return_routed_experts", f"{section}.moe_enable_routing_replay"
    for name, model in (("ref", trainer.ref), ("critic", trainer.critic)):
        if backend.follows_routes(model.options(section)):
            raise ConfigError(
                "got true, but only the policy can follow an engine's routes; the other models compute their own. Set "
                f"this key to false; for the policy, set trainer.policy.{key}",
                key=f"trainer.{name}.{key}",
            )
    options = trainer.policy.options(section)
    if backend.follows_routes(options) != returned:
        state = "returns routes that the policy does not follow" if returned else "returns no routes to follow"
        remedy = (
            f"set both {engine_key} and trainer.policy.{key} to true, or both to false"
            if hasattr(options, "moe_enable_routing_replay")
            else f"trainer.strategy={trainer.strategy} has no router replay: set {engine_key}=false"
        )
        raise ConfigError(f"{str(returned).lower()}, so the engine {state}; {remedy}", key=engine_key)


def _check_sampled_distribution(config: Config) -> None:
    """Requires that the trainer's log-probs are those of the distribution from which the engine samples."""
    sampling, trainer = config.generator.sampling_params, config.trainer
    if sampling.temperature != config.temperature:
        raise ConfigError(
            f"got {config.temperature:g}, but responses are sampled with "
            f"generator.sampling_params.temperature={sampling.temperature:g}, so the trainer would score another "
            "distribution; remove this key",
            key="trainer.algorithm.temperature",
        )
    if sampling.extra_args and not config.generator.inference_engine.weight_verification.prove_at_start:
        raise ConfigError(
            "got false, but only this proof shows that generator.sampling_params.extra_args "
            f"({', '.join(sampling.extra_args)}) keeps log-probs exact; set prove_at_start=true, or remove extra_args",
            key="generator.inference_engine.weight_verification.prove_at_start",
        )
    if not sampling.is_truncated:
        return
    greedy = {"top_k": sampling.top_k == 1, "top_p": sampling.top_p <= _GREEDY_TOP_P, "min_p": sampling.min_p >= 1.0}
    for name in (name for name, leaves_one in greedy.items() if leaves_one):
        raise ConfigError(
            f"got {getattr(sampling, name):g}, which leaves only the most likely token: each sampled token then has "
            "the log-prob 0 whatever the weights are, so training would change nothing. Let it keep several tokens, or "
            "remove it; generator.eval_sampling_params may set it",
            key=f"generator.sampling_params.{name}",
        )
    engine, backend = config.generator.inference_engine.backend, trainer.strategy
    plugin = plugins.load("rl_core.inference", engine, key="generator.inference_engine.backend")
    trains = plugins.load("rl_core.backends", backend, key="trainer.strategy")
    can = {
        f"the engine {engine!r} does not return the kept tokens": plugin.returns_kept_tokens,
        f"trainer.strategy={backend} cannot use them": trains.replays_kept_tokens,
    }
    lacking = [reason for reason, is_able in can.items() if not is_able]
    if lacking:
        set_keys = ", ".join(f"{name}={getattr(sampling, name):g}" for name in sampling.truncating)
        raise ConfigError(
            f"got {set_keys}, so only the most likely tokens are sampled. The trainer's log-probs are exact only if it "
            f"knows which tokens were kept, and {lacking[0]}. Remove {' and '.join(sampling.truncating)}; "
            "generator.eval_sampling_params may set them",
            key="generator.sampling_params",
        )


def _check_transport(config: Config) -> None:
    """Requires that the named transport can send weights from this machine."""
    transport = plugins.load("rl_core.weight_transports", config.weight_transport, key=_TRANSPORT)
    if config.generator.inference_engine.weight_sync_delta:
        _check_delta(config)
    if config.trainer.policy.model.lora.is_sent_alone:
        _check_adapter(config)
    transport.validate()
    transport.validate_nodes(config.trainer.placement.policy_num_nodes)


def _check_adapter(config: Config) -> None:
    """Requires that the engine accepts syncs that send only the policy's adapter."""
    engine = config.generator.inference_engine.backend
    if not plugins.load("rl_core.inference", engine, key="generator.inference_engine.backend").receives_adapters:
        raise ConfigError(
            f"got false, but the engine {engine!r} accepts only whole weights; set it to true, or choose "
            "generator.inference_engine.backend=vllm",
            key="trainer.policy.model.lora.merge_lora",
        )


def _check_delta(config: Config) -> None:
    """Requires that the engine accepts delta syncs, and that syncs send whole weights instead of an adapter."""
    key, engine = "generator.inference_engine.weight_sync_delta", config.generator.inference_engine.backend
    if config.trainer.policy.model.lora.is_sent_alone:
        raise ConfigError(
            "got true with trainer.policy.model.lora.merge_lora=false: a sync then sends only the adapter, always as a "
            "whole; set weight_sync_delta=false",
            key=key,
        )
    plugin = plugins.load("rl_core.inference", engine, key="generator.inference_engine.backend")
    if not plugin.receives_deltas:
        raise ConfigError(f"got true, but the engine {engine!r} accepts only whole weights; set it to false", key=key)


def _check_loss(config: Config) -> None:
    key, name = _LOSS, config.trainer.algorithm.policy_loss_type
    objective = objective_of(config)
    if "predicted_values" in objective.reads and not getattr(objective.function, "is_pairwise", False):
        raise ConfigError(
            f"{name!r} trains a critic, and a run with trainer.algorithm.advantage_estimator=gae trains its critic "
            "with value_clip automatically; choose a loss for the policy, e.g. regular",
            key=key,
        )
    if "predicted_values" in objective.reads and needs_engine(config):
        raise ConfigError(
            f"{name!r} trains a model with a value head, which cannot sample; use stored pairs, with "
            "generator.type=dataset",
            key=key,
        )
    _require_values_of_terms(config, objective)
    if getattr(objective.function, "is_pairwise", False):
        _require_pairs(config)


def _require_values_of_terms(config: Config, objective: Objective) -> None:
    """Refuses terms and masks of the objective whose inputs a run with this loss does not have."""
    algorithm, name = config.trainer.algorithm, config.trainer.algorithm.policy_loss_type
    if algorithm.off_policy_sequence_mask is not None and "advantages" not in objective.required_columns:
        raise ConfigError(
            f"got {algorithm.off_policy_sequence_mask:g}, but the loss {name!r} reads no advantages, whose sign "
            "decides what is masked; set it to null, or choose another loss",
            key="trainer.algorithm.off_policy_sequence_mask",
        )
    for key in ("use_kl_loss", "use_kl_in_reward", "use_entropy_loss"):
        if "predicted_values" in objective.reads and getattr(algorithm, key):
            raise ConfigError(
                f"got true, but the loss {name!r} trains a model with a value head, which predicts no tokens; set it "
                "to false",
                key=f"trainer.algorithm.{key}",
            )


def _require_pairs(config: Config) -> None:
    """Requires the settings that a pairwise loss needs."""
    trainer, key = config.trainer, "trainer.policy_mini_batch_size"
    name = f"{_LOSS}={trainer.algorithm.policy_loss_type}"
    if config.generator.n_samples_per_prompt != 2:
        got = config.generator.n_samples_per_prompt
        raise ConfigError(
            f"got {got}; {name} compares two responses; set it to 2", key="generator.n_samples_per_prompt"
        )
    if trainer.algorithm.loss_reduction != "prompt_token_sum":
        raise ConfigError(
            f"got {trainer.algorithm.loss_reduction}; with {name}, the loss of a pair is the sum over its tokens; set "
            "it to prompt_token_sum",
            key="trainer.algorithm.loss_reduction",
        )
    if trainer.policy_mini_batch_size != trainer.train_batch_size or trainer.update_epochs_per_batch != 1:
        raise ConfigError(
            f"got {trainer.policy_mini_batch_size} of trainer.train_batch_size={trainer.train_batch_size} with "
            f"update_epochs_per_batch={trainer.update_epochs_per_batch}; {name} computes the derivative of each pair's "
            "loss once per batch, which is correct only for a single optimizer step; set both sizes to the same "
            "number, and update_epochs_per_batch=1",
            key=key,
        )


def _gather_critic(config: Config, mistakes: Mistakes) -> None:
    key = "trainer.critic_mini_batch_size"
    passes(mistakes, undivided_batch, config, key)
    placement = config.trainer.placement
    policy, critic = placement.policy_shape, placement.critic_shape
    if placement.colocate_all and policy != critic:
        message = (
            "colocate_all=true needs a critic with the policy's nodes × ranks per node; the policy "
            f"has {policy[0]} × {policy[1]}, but critic_num_nodes × critic_num_gpus_per_node is {critic[0]} × "
            f"{critic[1]}. Remove both critic keys, or set colocate_all=false"
        )
        mistakes.add(ConfigError(message, key="trainer.placement"))


def _check_correction(config: Config) -> None:
    params = correction_params(config)
    if params is None:
        return
    import torch

    from rl_core.algorithms.corrections import off_policy_correction

    no_tokens, no_mask, no_index = torch.empty(0), torch.empty(0, dtype=torch.bool), torch.empty(0, dtype=torch.int64)
    try:
        off_policy_correction(no_tokens, no_tokens, no_mask, no_index, **params)
    except ConfigError as error:
        raise ConfigError(str(error), key="trainer.algorithm.off_policy_correction") from error
