"""What no single key can say: combinations that cannot work, found before any process, device or file is taken.

Every check is made on the resolved values and raises one ConfigError that says what to do: on values alone
(`value_checks`), on files (`file_checks`), and here on plug-ins. Only `check_plugins` imports torch, for the functions
that a run calls.
"""

from __future__ import annotations

import warnings
from collections.abc import Container
from pathlib import Path

from rl_core import plugins
from rl_core.config.file_checks import check_files, require_files, require_model, require_policy_model
from rl_core.config.function_params import correction_params, loss_params, needs_critic, unread_params
from rl_core.config.layers import ConfigWarning
from rl_core.config.resolving import value_at
from rl_core.config.specs import engine_spec, generator_spec
from rl_core.config.tree import Config
from rl_core.config.value_checks import check_values, require_bounds, require_divides_batch, require_run_name
from rl_core.errors import ConfigError, PluginError
from rl_core.interfaces import LossSpec, RouteFollowing


def check(config: Config, *, reads: str = "data.train_data") -> None:
    """All checks of a run that reads the data under the key `reads`, the cheap ones first.

    Raises ConfigError or PluginError for the first that fails; warns of what runs but looks unintended.
    """
    check_values(config)
    check_files(config, reads=reads)
    check_plugins(config)


def check_playing(config: Config, *, reads: str, makes: Container[str] = ()) -> None:
    """Every check of what plays the prompts of `reads` without training; what only a training run needs may be
    missing or wrong.

    Raises ConfigError or PluginError.
    """
    require_run_name(config)
    require_bounds(config)
    if not value_at(config, reads):
        raise ConfigError(f"{reads}: no file is given; give e.g. {reads}=prompts.parquet")
    require_files(config, reads, makes)
    require_policy_model(config)
    if config.policy_model_path not in makes or Path(config.policy_model_path).exists():
        require_model("trainer.policy.model.path", config.policy_model_path)
    _validate_rollout_plugins(config)


def check_plugins(config: Config, *, chosen: Container[str] | None = None) -> None:
    """Every plug-in and function that is named can be imported, and accepts the configuration. Imports torch.

    Args:
        chosen: keys that the user gave, the only ones to warn of where they have no effect; None: all.
    """
    trainer = config.trainer
    _load_rollout_plugins(config)
    transport_key = "generator.inference_engine.weight_sync_backend"
    plugins.load("rl_core.weight_transports", value_at(config, transport_key), key=transport_key)
    for name in trainer.logger:
        plugins.load("rl_core.trackers", name, key="trainer.logger")
    for name in trainer.callbacks:
        plugins.import_object(name, "trainer.callbacks: ")
    _check_loss(config)
    _check_routes(config)
    if needs_critic(config):
        _check_critic(config)
    for key in unread_params(config):
        if chosen is None or key in chosen:
            message = f"{key}: has no effect with {trainer.algorithm.advantage_estimator!r} advantages and "
            warnings.warn(f"{message}the {trainer.algorithm.policy_loss_type!r} loss", ConfigWarning, stacklevel=2)
    _validate_rollout_plugins(config)


def _check_routes(config: Config) -> None:
    """The engine returns routes exactly where the policy follows them."""
    backend = plugins.load("rl_core.backends", config.trainer.strategy, key="trainer.strategy")
    section = backend.config_section
    trainer, returned = config.trainer, config.generator.inference_engine.enable_return_routed_experts
    follows = backend.follows_routes if isinstance(backend, RouteFollowing) else lambda options: False
    engine_key, key = "generator.inference_engine.enable_return_routed_experts", f"{section}.moe_enable_routing_replay"
    for name, model in (("ref", trainer.ref), ("critic", trainer.critic)):
        if follows(model.options(section)):
            raise ConfigError(
                f"trainer.{name}.{key}: routes are the policy's, the other models choose experts by themselves; set it "
                "for trainer.policy"
            )
    if follows(trainer.policy.options(section)) != returned:
        state = "returns routes that the policy does not follow" if returned else "returns no routes to follow"
        remedy = (
            f"set both, {engine_key} and trainer.policy.{key}, to true or to false"
            if isinstance(backend, RouteFollowing)
            else f"trainer.strategy={trainer.strategy} has no router replay: set {engine_key}=false"
        )
        raise ConfigError(f"{engine_key}: {str(returned).lower()}, so the engine {state}; {remedy}")


def _load_rollout_plugins(config: Config) -> None:
    """Engine, generator and environment are there."""
    generator = config.generator
    plugins.load("rl_core.generators", generator.type, key="generator.type")
    if config.environment.env_class is not None:
        plugins.load("rl_core.environments", config.environment.env_class, key="environment.env_class")
    plugins.load("rl_core.inference", generator.inference_engine.backend, key="generator.inference_engine.backend")


def _validate_rollout_plugins(config: Config) -> None:
    """They are there, and engine and generator accept what they would be told."""
    _load_rollout_plugins(config)
    generator, generator_told = generator_spec(config)
    engine, engine_told = engine_spec(config)
    generator.validate(generator_told)
    engine.validate(engine_told)


def _check_loss(config: Config) -> None:
    from rl_core.rank_kit.objectives import objective_from_spec  # imports torch

    key, name = "trainer.algorithm.policy_loss_type", config.trainer.algorithm.policy_loss_type
    params = loss_params(config)
    try:
        objective = objective_from_spec(LossSpec(name=name, params=params), key=key)
    except (PluginError, ConfigError) as error:
        raise (error if str(error).startswith(key) else type(error)(f"{key}: {name!r}: {error}")) from error
    if "predicted_values" in objective.reads:
        raise ConfigError(
            f"{key}: {name!r} trains a critic, not a policy, and does so by itself with "
            "trainer.algorithm.advantage_estimator=gae; for the policy choose e.g. regular"
        )
    _check_correction(config)


def _check_critic(config: Config) -> None:
    require_divides_batch(config, "trainer.critic_mini_batch_size")
    placement = config.trainer.placement
    policy, critic = placement.policy_shape, placement.critic_shape
    if placement.colocate_all and policy != critic:
        raise ConfigError(
            "trainer.placement: colocate_all=true needs as many critic ranks as policy ranks; the policy has "
            f"{policy[0]} nodes × {policy[1]}, critic_num_nodes × critic_num_gpus_per_node is {critic[0]} × "
            f"{critic[1]}. Leave those two out, or set colocate_all=false"
        )


def _check_correction(config: Config) -> None:
    import torch

    from rl_core.algorithms.corrections import off_policy_correction

    no_tokens, no_mask, no_index = torch.empty(0), torch.empty(0, dtype=torch.bool), torch.empty(0, dtype=torch.int64)
    params = correction_params(config)
    if params is None:
        return
    try:
        off_policy_correction(no_tokens, no_tokens, no_mask, no_index, **params)
    except ConfigError as error:
        raise ConfigError(f"trainer.algorithm.off_policy_correction: {error}") from error
