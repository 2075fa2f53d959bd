"""Determines the keyword parameters with which a run calls its policy loss and its advantage estimator."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs

from rl_core import plugins
from rl_core.config.tree import AlgorithmConfig, Config
from rl_core.errors import ConfigError, PluginError, RLError
from rl_core.function_settings import keyword_parameters, positional_parameters

if TYPE_CHECKING:
    from rl_core.algorithms.objective import Objective

LOSSES = "rl_core.policy_losses"
ESTIMATORS = "rl_core.advantage_estimators"
GENERAL_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "grpo_norm_by_std": True,
        "gamma": 1.0,
        "lambd": 1.0,
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.2,
        "clip_ratio_c": 3.0,
    }
)
"""Keys of `trainer.algorithm` that only losses and estimators read. For a key that is None, the function's own default
is used, or the value here if the function has no default."""
_CORRECTION_SWITCHES = (
    "tis_ratio_type",
    "sequence_mask_metric",
    "outlier_token_is_threshold_low",
    "outlier_token_is_threshold_high",
    "token_mask_is_threshold_low",
    "token_mask_is_threshold_high",
)
"""Parameters of the function `off_policy_correction`. Each enables a correction if its value is not None."""


def loss_params(config: Config) -> dict[str, Any]:
    """Parameters of the policy loss, each from `policy_loss_params`, else `trainer.algorithm.<parameter>`, else the
    function's default, else `GENERAL_DEFAULTS`.

    Raises ConfigError for an unknown parameter or a missing required one; PluginError for an unknown function.
    """
    algorithm = config.trainer.algorithm
    return _params(LOSSES, "policy_loss_type", "policy_loss_params", algorithm)


def advantage_params(config: Config) -> dict[str, Any]:
    """Parameters of the advantage estimator, found in the same way as in `loss_params`, but with `advantage_params` in
    place of `policy_loss_params`."""
    return _params(ESTIMATORS, "advantage_estimator", "advantage_params", config.trainer.algorithm)


def correction_params(config: Config) -> dict[str, Any] | None:
    """Parameters of `rl_core.algorithms.off_policy_correction`; None if every correction is off.

    A `tis_ratio_type` of None means `token` if generation runs ahead of training and the loss does not refuse
    corrections, else `off`.

    Raises ConfigError for a correction that the policy loss cannot use, even if the user did not set it.
    """
    key, name = "trainer.algorithm.off_policy_correction", config.trainer.algorithm.policy_loss_type
    correction, is_stale = config.trainer.algorithm.off_policy_correction, config.pipeline_depth > 0
    objective = objective_of(config)
    refuses = objective.corrections == "refuses"
    tis_ratio_type = correction.tis_ratio_type or ("token" if is_stale and not refuses else "off")
    params = attrs.asdict(correction) | {"tis_ratio_type": None if tis_ratio_type == "off" else tis_ratio_type}
    if all(params[switch] is None for switch in _CORRECTION_SWITCHES):
        return None
    if refuses:
        reason = _why_refused(objective)
        raise ConfigError(
            f"the loss {name!r} {reason}, so it cannot use a correction; remove the correction, or choose another loss",
            key=key,
        )
    if params["tis_ratio_type"] is not None and objective.corrections == "unknown":
        raise ConfigError(f"{_why_unknown(config, objective, tis_ratio_type)}", key=f"{key}.tis_ratio_type")
    return params


def asks_for_correction(config: Config) -> bool:
    """Whether the configuration itself sets a correction, instead of getting one because generation runs ahead."""
    correction = attrs.asdict(config.trainer.algorithm.off_policy_correction)
    return any(correction[switch] not in (None, "off") for switch in _CORRECTION_SWITCHES)


def objective_of(config: Config) -> Objective:
    """The policy loss with its parameters, as an `Objective`. Raises ConfigError or PluginError, which name the key, if
    the loss or a parameter cannot be used."""
    from rl_core.interfaces import LossSpec
    from rl_core.rank_kit.objectives import objective_from_spec

    key, name = "trainer.algorithm.policy_loss_type", config.trainer.algorithm.policy_loss_type
    spec = LossSpec(name=name, params=loss_params(config))
    try:
        return objective_from_spec(spec, key=key)
    except (PluginError, ConfigError) as error:
        raise error if error.key == key else type(error)(f"{name!r}: {error}", key=key) from error


def _why_refused(objective: Objective) -> str:
    columns = objective.required_columns
    if "rollout_logprobs" in columns:
        return "corrects by itself"
    return "reads no advantages" if "advantages" not in columns else "declares that it refuses corrections"


def _why_unknown(config: Config, objective: Objective, tis_ratio_type: str) -> str:
    """Why a loss that declares nothing about corrections cannot get importance weights, and what to do.

    Masks work with such a loss: a masked token, like any untrained token, does not affect which other tokens the loss
    selects.
    """
    loss = config.trainer.algorithm.policy_loss_type
    is_default = config.trainer.algorithm.off_policy_correction.tis_ratio_type is None
    value = f"{tis_ratio_type!r} is the default with trainer.pipeline_depth={config.pipeline_depth}"
    problem = (
        f"the loss {loss!r} selects tokens by their advantages, which the weights would scale"
        if "advantages" in objective.prepare_columns
        else f"the loss {loss!r} is not proportional to its advantages, which the weights would scale"
    )
    remedy = (
        "Declare how the loss uses weights (rl_core.algorithms.takes_corrections), set tis_ratio_type=off (masks still "
        f"work){', or trainer.pipeline_depth=0' * is_default}, or choose another loss, e.g. regular"
    )
    return f"{value if is_default else f'got {tis_ratio_type!r}'}, and {problem}. {remedy}"


def needs_critic(config: Config) -> bool:
    """Whether the advantage estimator reads values, that is, has the positional parameter `values_T`."""
    return "values_T" in _read_by_estimator(config)


def needs_reference(config: Config) -> bool:
    """Whether a KL term, the loss or the estimator reads a reference's log-probs."""
    algorithm = config.trainer.algorithm
    if algorithm.use_kl_loss or algorithm.use_kl_in_reward:
        return True
    return "ref_logprobs_T" in _read_by_estimator(config) or "ref_logprobs" in objective_of(config).required_columns


def needs_greedy_answers(config: Config) -> bool:
    """Whether the advantage estimator compares with a greedy answer to each prompt, that is, has the parameter
    `greedy_scores_N`.

    Raises ConfigError if groups of equal rewards are filtered out, because such a group can still differ from the
    greedy answer.
    """
    if "greedy_scores_N" not in _read_by_estimator(config):
        return False
    algorithm = config.trainer.algorithm
    chooses = "zero_variance_filter=true" if algorithm.zero_variance_filter else None
    if algorithm.dynamic_sampling.type is not None:
        chooses = f"dynamic_sampling.type={algorithm.dynamic_sampling.type}"
    if chooses is not None:
        raise ConfigError(
            f"{chooses} drops groups of equal rewards, but advantage_estimator={algorithm.advantage_estimator} learns "
            "from such a group if the greedy answer has a different reward; turn this key off, or choose an estimator "
            "that compares the samples, e.g. rloo",
            key=f"trainer.algorithm.{chooses.partition('=')[0]}",
        )
    return True


def _read_by_estimator(config: Config) -> list[str]:
    key, name = "trainer.algorithm.advantage_estimator", config.trainer.algorithm.advantage_estimator
    return positional_parameters(plugins.load_function(ESTIMATORS, name, advantage_params(config), key=key))


def _params(group: str, name_field: str, params_field: str, algorithm: AlgorithmConfig) -> dict[str, Any]:
    key, name = f"trainer.algorithm.{name_field}", getattr(algorithm, name_field)
    function = plugins.load(group, name, key=key)
    params: dict[str, Any] = {}
    for param, parameter in keyword_parameters(function).items():
        value = getattr(algorithm, param, None)
        has_default = parameter.default is not parameter.empty
        if value is None and param in GENERAL_DEFAULTS:
            value = parameter.default if has_default else GENERAL_DEFAULTS[param]
        if value is not None:
            params[param] = value
    params |= dict(getattr(algorithm, params_field))
    remedy = f"; add e.g. trainer.algorithm.{params_field}.{{setting}}=2"
    plugins.load_function(group, name, params, key=key, remedy=remedy)
    return params


def function_defaults(config: Config) -> dict[str, tuple[Any, str]]:
    """Returns, for each key of GENERAL_DEFAULTS that is not set, the value that a run uses and its source.

    The value is None if neither function reads the key. Imports the functions, and so torch. A function that cannot be
    loaded is treated as one that reads no keys.
    """
    algorithm = config.trainer.algorithm
    found = {
        f"trainer.algorithm.{name}": (None, "default; neither loss nor estimator reads it")
        for name in GENERAL_DEFAULTS
        if getattr(algorithm, name) is None
    }
    sources = (
        (advantage_params, algorithm.advantage_estimator, "estimator", "advantage_params"),
        (loss_params, algorithm.policy_loss_type, "loss", "policy_loss_params"),
    )
    for params_of, function, kind, field in sources:
        with contextlib.suppress(RLError):
            for name, value in params_of(config).items():
                key = f"trainer.algorithm.{name}"
                is_given = name in getattr(algorithm, field)
                if key in found:
                    source = f"trainer.algorithm.{field}" if is_given else f"default of the {kind} {function}"
                    found[key] = (value, source)
    return found


def unread_params(config: Config) -> list[str]:
    """Keys among `GENERAL_DEFAULTS` and `value_clip` that are set, but that neither the loss nor the estimator reads.
    `value_clip` is not reported if the run has a critic, because the critic's loss reads it."""
    taken = {*loss_params(config), *advantage_params(config)}
    algorithm, default = config.trainer.algorithm, AlgorithmConfig().value_clip
    unread = [name for name in GENERAL_DEFAULTS if name not in taken and getattr(algorithm, name) is not None]
    if algorithm.value_clip != default and "value_clip" not in taken and not needs_critic(config):
        unread.append("value_clip")
    return [f"trainer.algorithm.{name}" for name in unread]
