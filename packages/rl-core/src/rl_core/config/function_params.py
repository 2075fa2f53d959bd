"""The keyword parameters with which a run calls its policy loss and its advantage estimator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from rl_core import plugins
from rl_core.config.tree import AlgorithmConfig, Config
from rl_core.errors import ConfigError
from rl_core.function_settings import keyword_parameters, positional_parameters

if TYPE_CHECKING:
    from rl_core.algorithms.objective import Objective

LOSSES = "rl_core.policy_losses"
ESTIMATORS = "rl_core.advantage_estimators"
_FUNCTION_KEYS = ("grpo_norm_by_std", "gamma", "lambd", "eps_clip_low", "eps_clip_high", "clip_ratio_c", "value_clip")
"""Keys of `trainer.algorithm` that nothing but such functions and the critic reads."""
_CORRECTION_SWITCHES = (
    "tis_ratio_type",
    "sequence_mask_metric",
    "outlier_token_is_threshold_low",
    "outlier_token_is_threshold_high",
    "token_mask_is_threshold_low",
    "token_mask_is_threshold_high",
)
"""Keys of `off_policy_correction` each of which switches a correction on."""


def loss_params(config: Config) -> dict[str, Any]:
    """Of the policy loss: from `policy_loss_params`, else the key `trainer.algorithm.<parameter>`, else the default.

    Raises ConfigError for a parameter that the function does not have, or needs and did not get; PluginError for an
    unknown function.
    """
    algorithm = config.trainer.algorithm
    return _params(LOSSES, "policy_loss_type", "policy_loss_params", algorithm)


def advantage_params(config: Config) -> dict[str, Any]:
    """Of the advantage estimator, by the same rule from `advantage_params`.

    Raises ConfigError also for an estimator that counts successes, where the KL is taken off the scores it counts by.
    """
    algorithm = config.trainer.algorithm
    params = _params(ESTIMATORS, "advantage_estimator", "advantage_params", algorithm)
    if algorithm.use_kl_in_reward and _counts_successes(plugins.load(ESTIMATORS, algorithm.advantage_estimator)):
        raise ConfigError(
            "trainer.algorithm.use_kl_in_reward: true is given, but trainer.algorithm.advantage_estimator="
            f"{algorithm.advantage_estimator!r} reads success and failure from the score itself, which is neither once "
            "the KL is taken off it. Set use_kl_in_reward=false and use_kl_loss=true, or choose an estimator that "
            "compares scores, e.g. rloo"
        )
    return params


def correction_params(config: Config) -> dict[str, Any] | None:
    """Of `rl_core.algorithms.off_policy_correction`; None where every correction is off.

    Samples of earlier weights are corrected for unless the configuration says otherwise, or the loss does it itself.

    Raises ConfigError for a correction that the policy loss cannot use, also for one that is on by default.
    """
    key, name = "trainer.algorithm.off_policy_correction", config.trainer.algorithm.policy_loss_type
    correction, is_stale = config.trainer.algorithm.off_policy_correction, config.trainer.max_staleness > 0
    objective = _objective(config)
    reason = _why_uncorrected(objective)
    tis_ratio_type = correction.tis_ratio_type or ("token" if is_stale and reason is None else "off")
    params = attrs.asdict(correction) | {"tis_ratio_type": None if tis_ratio_type == "off" else tis_ratio_type}
    if all(params[switch] is None for switch in _CORRECTION_SWITCHES):
        return None
    if reason is not None:
        raise ConfigError(f"{key}: the loss {name!r} {reason} and cannot use one; leave it out, or choose another loss")
    if params["tis_ratio_type"] is not None and "advantages" in objective.prepare_columns:
        raise ConfigError(f"{key}.tis_ratio_type: {_weights_choose_tokens(config, tis_ratio_type)}")
    return params


def _objective(config: Config) -> Objective:
    from rl_core.interfaces import LossSpec
    from rl_core.rank_kit.objectives import objective_from_spec

    spec = LossSpec(name=config.trainer.algorithm.policy_loss_type, params=loss_params(config))
    return objective_from_spec(spec, key="trainer.algorithm.policy_loss_type")


def _why_uncorrected(objective: Objective) -> str | None:
    """A correction scales advantages by the ratio of old to rollout log-probs: a loss must not do so itself."""
    columns = objective.required_columns
    if "rollout_logprobs" in columns:
        return "corrects by itself"
    return "weighs no advantages" if "advantages" not in columns else None


def _weights_choose_tokens(config: Config, tis_ratio_type: str) -> str:
    """Why a loss whose `prepare` reads the advantages gets no weights, and what to set.

    The weights multiply the advantages before `prepare` sees them. A mask goes with such a loss: like any token that is
    not trained, one that a mask drops has no part in what is chosen among the others.
    """
    loss, staleness = config.trainer.algorithm.policy_loss_type, config.trainer.max_staleness
    is_default = config.trainer.algorithm.off_policy_correction.tis_ratio_type is None
    given = f"is the default with trainer.max_staleness={staleness}" if is_default else "is given"
    remedy = "Set tis_ratio_type=off, which leaves only masks to correct by, or choose another loss, e.g. regular"
    return (
        f"{tis_ratio_type!r} {given}, and multiplies the advantages by which the loss {loss!r} chooses tokens, so that "
        f"it would choose others. {remedy}{', or set trainer.max_staleness=0' * is_default}"
    )


def _counts_successes(estimator: Callable[..., Any]) -> bool:
    """A score means success or failure to it by its value, not by comparison with other scores."""
    from rl_core.algorithms.advantages import maxrl_advantages, pass_at_k_advantages

    function = inspect.unwrap(estimator)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    return function in (maxrl_advantages, pass_at_k_advantages)


def needs_critic(config: Config) -> bool:
    """The advantage estimator reads values: it has the positional parameter `values_T`."""
    key, name = "trainer.algorithm.advantage_estimator", config.trainer.algorithm.advantage_estimator
    estimator = plugins.load_function(ESTIMATORS, name, advantage_params(config), key=key)
    return "values_T" in positional_parameters(estimator)


def _params(group: str, name_field: str, params_field: str, algorithm: AlgorithmConfig) -> dict[str, Any]:
    key, name = f"trainer.algorithm.{name_field}", getattr(algorithm, name_field)
    function = plugins.load(group, name, key=key)
    known = keyword_parameters(function)
    shared = {field.name: getattr(algorithm, field.name) for field in attrs.fields(AlgorithmConfig)}
    params = {param: shared[param] for param in known if param in shared} | dict(getattr(algorithm, params_field))
    remedy = f"; add e.g. trainer.algorithm.{params_field}.{{setting}}=2"
    plugins.load_function(group, name, params, key=key, remedy=remedy)
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
