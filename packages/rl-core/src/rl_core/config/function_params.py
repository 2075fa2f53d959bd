"""The keyword parameters with which a run calls its policy loss and its advantage estimator."""

from __future__ import annotations

import inspect
from typing import Any

import attrs

from rl_core import plugins
from rl_core.config.tree import AlgorithmConfig, Config
from rl_core.errors import ConfigError

LOSSES = "rl_core.policy_losses"
ESTIMATORS = "rl_core.advantage_estimators"
_FUNCTION_KEYS = ("grpo_norm_by_std", "gamma", "lambd", "eps_clip_low", "eps_clip_high", "clip_ratio_c", "value_clip")
"""Keys of `trainer.algorithm` that nothing but such functions and the critic reads."""


def loss_params(config: Config) -> dict[str, Any]:
    """Of the policy loss: from `policy_loss_params`, else the key `trainer.algorithm.<parameter>`, else the default.

    Raises ConfigError for a parameter that the function does not have, or needs and did not get; PluginError for an
    unknown function.
    """
    algorithm = config.trainer.algorithm
    return _params(LOSSES, "policy_loss_type", "policy_loss_params", algorithm)


def advantage_params(config: Config) -> dict[str, Any]:
    """Of the advantage estimator, by the same rule from `advantage_params`."""
    algorithm = config.trainer.algorithm
    return _params(ESTIMATORS, "advantage_estimator", "advantage_params", algorithm)


def needs_critic(config: Config) -> bool:
    """The advantage estimator reads values: it has the positional parameter `values_T`."""
    key, name = "trainer.algorithm.advantage_estimator", config.trainer.algorithm.advantage_estimator
    estimator = plugins.load_function(ESTIMATORS, name, advantage_params(config), key=key)
    return "values_T" in plugins.positional_parameters(estimator)


def _params(group: str, name_field: str, params_field: str, algorithm: AlgorithmConfig) -> dict[str, Any]:
    key, name = f"trainer.algorithm.{name_field}", getattr(algorithm, name_field)
    function = plugins.load(group, name, key=key)
    known = plugins.keyword_parameters(function) if callable(function) else {}
    shared = {field.name: getattr(algorithm, field.name) for field in attrs.fields(AlgorithmConfig)}
    params = {param: shared[param] for param in known if param in shared} | dict(getattr(algorithm, params_field))
    for param, default in known.items():
        if default is inspect.Parameter.empty and param not in params:
            raise ConfigError(
                f"{key}: {name!r} needs the parameter {param!r}; add e.g. trainer.algorithm.{params_field}.{param}=2"
            )
    plugins.load_function(group, name, params, key=key)
    return params


def unread_params(config: Config) -> list[str]:
    """Keys below `trainer.algorithm` that were changed for a function that does not read them."""
    taken = {*loss_params(config), *advantage_params(config), *(["value_clip"] if needs_critic(config) else [])}
    algorithm, defaults = config.trainer.algorithm, AlgorithmConfig()
    return [
        f"trainer.algorithm.{name}"
        for name in _FUNCTION_KEYS
        if name not in taken and getattr(algorithm, name) != getattr(defaults, name)
    ]
