"""The keyword parameters with which a run calls its policy loss and its advantage estimator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from rl_core import plugins
from rl_core.config.tree import AlgorithmConfig, Config

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
    return _params(LOSSES, algorithm.policy_loss_type, algorithm.policy_loss_params, algorithm, "policy_loss_type")


def advantage_params(config: Config) -> dict[str, Any]:
    """Of the advantage estimator, by the same rule from `advantage_params`."""
    algorithm = config.trainer.algorithm
    return _params(
        ESTIMATORS, algorithm.advantage_estimator, algorithm.advantage_params, algorithm, "advantage_estimator"
    )


def needs_critic(config: Config) -> bool:
    """The advantage estimator reads values: it has the positional parameter `values_T`."""
    key, name = "trainer.algorithm.advantage_estimator", config.trainer.algorithm.advantage_estimator
    estimator = plugins.load_function(ESTIMATORS, name, advantage_params(config), key=key)
    return "values_T" in plugins.positional_parameters(estimator)


def _params(group: str, name: str, explicit: Mapping[str, Any], algorithm: AlgorithmConfig, key: str) -> dict[str, Any]:
    key = f"trainer.algorithm.{key}"
    function = plugins.load(group, name, key=key)
    known = plugins.keyword_parameters(function) if callable(function) else {}
    shared = {field.name: getattr(algorithm, field.name) for field in attrs.fields(AlgorithmConfig)}
    params = {param: shared[param] for param in known if param in shared} | dict(explicit)
    plugins.load_function(group, name, params, key=key)
    return params


def unread_params(config: Config) -> list[str]:
    """Keys of `trainer.algorithm` that were changed for a function that does not read them."""
    taken = {*loss_params(config), *advantage_params(config), *(["value_clip"] if needs_critic(config) else [])}
    algorithm, defaults = config.trainer.algorithm, AlgorithmConfig()
    return [
        name for name in _FUNCTION_KEYS if name not in taken and getattr(algorithm, name) != getattr(defaults, name)
    ]
