"""Which combinations of losses, estimators and corrections are refused at start-up, and which parameters they get."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import yaml

from rl_core.config import (
    ConfigWarning,
    advantage_params,
    correction_params,
    dump_yaml,
    from_mapping,
    loss_params,
    needs_greedy_answers,
)
from rl_core.config.checks import check_plugins
from rl_core.errors import ConfigError
from rl_core.function_settings import positional_parameters
from rl_core.trainer.before.settings import update_settings

CORRECTION = "trainer.algorithm.off_policy_correction"


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("loss_of_tokens", "reads no advantages"),
        ("loss_that_corrects", "corrects by itself"),
        ("loss_that_refuses", "declares that it refuses"),
    ],
)
def test_a_correction_with_a_loss_that_cannot_use_it_is_an_error(functions: dict[str, Any], loss: str, message: str):
    corrected = functions | {f"{CORRECTION}.tis_ratio_type": "token"}
    check_plugins(from_mapping(corrected))
    with pytest.raises(ConfigError, match=f"off_policy_correction: .*{message}"):
        check_plugins(from_mapping(corrected | {"trainer.algorithm.policy_loss_type": f"own_functions:{loss}"}))


CHOOSES, DOES_NOT_SCALE = "selects tokens by their advantages", "is not proportional to its advantages"
UNKNOWN = {"own_functions:loss_of_best_tokens": CHOOSES, "own_functions:loss_with_a_penalty": DOES_NOT_SCALE}
"""Losses that do not declare how they take correction weights → why the check cannot infer it."""
DECLARED = (
    "clip_cov",
    "kl_cov",
    "rl_core.algorithms:clip_cov_loss",
    "rl_core.algorithms.minibatch_losses:kl_cov_loss",
    "own_functions:clip_cov_loss",
    "own_functions:watched_kl_cov",
    "own_functions:declared_loss_of_best_tokens",
)
"""Losses that choose tokens by advantages and declare how they take weights, named in several ways."""


@pytest.mark.parametrize("loss", UNKNOWN)
@pytest.mark.parametrize("tis_ratio_type", ["token", "sequence"])
def test_correction_weights_are_refused_for_losses_whose_use_of_weights_is_unknown(
    functions: dict[str, Any], loss: str, tis_ratio_type: str
):
    chosen = functions | {"trainer.algorithm.policy_loss_type": loss}
    config = from_mapping(chosen | {f"{CORRECTION}.tis_ratio_type": tis_ratio_type})
    message = (
        rf"off_policy_correction\.tis_ratio_type: got '{tis_ratio_type}', and the loss '{loss}' {UNKNOWN[loss]}"
        r".*takes_corrections.*=off"
    )
    for refuses in (check_plugins, update_settings):
        with pytest.raises(ConfigError, match=message):
            refuses(config)
    assert update_settings(from_mapping(chosen)).correction_params is None


@pytest.mark.parametrize("loss", UNKNOWN)
def test_stale_samples_need_tis_ratio_type_off_or_depth_0_if_a_losss_use_of_weights_is_unknown(
    functions: dict[str, Any], loss: str
):
    stale = functions | {"trainer.algorithm.policy_loss_type": loss, "trainer.max_staleness": 2}
    message = rf"'token' is the default with trainer\.pipeline_depth=1.*'{loss}'.*=off.*pipeline_depth=0"
    for refuses in (check_plugins, update_settings):
        with pytest.raises(ConfigError, match=message):
            refuses(from_mapping(stale))
    uncorrected = from_mapping(stale | {f"{CORRECTION}.tis_ratio_type": "off"})
    check_plugins(uncorrected)
    assert correction_params(uncorrected) is None
    in_turns = from_mapping(stale | {"trainer.pipeline_depth": 0})  # the other remedy that the message names
    check_plugins(in_turns)
    assert correction_params(in_turns) is None


@pytest.mark.parametrize("loss", DECLARED)
def test_losses_that_declare_their_use_of_weights_are_corrected_by_default(functions: dict[str, Any], loss: str):
    stale = functions | {"trainer.algorithm.policy_loss_type": loss, "trainer.max_staleness": 2}
    check_plugins(from_mapping(stale))
    assert (correction_params(from_mapping(stale)) or {})["tis_ratio_type"] == "token"


@pytest.mark.parametrize(
    "mask",
    [
        {"sequence_mask_metric": "geometric"},
        {"outlier_token_is_threshold_high": 100.0},
        {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 5.0},
    ],
)
def test_correction_masks_work_if_the_losss_use_of_weights_is_unknown(functions: dict[str, Any], mask: dict[str, Any]):
    masked = {f"{CORRECTION}.{name}": value for name, value in mask.items()}
    loss = {"trainer.algorithm.policy_loss_type": "own_functions:loss_of_best_tokens"}
    assert mask.items() <= dict(correction_params(from_mapping(functions | loss | masked)) or {}).items()
    with pytest.raises(ConfigError, match="selects tokens by their advantages"):
        correction_params(from_mapping(functions | loss | masked | {"trainer.max_staleness": 1}))


def test_a_loss_that_chooses_tokens_without_advantages_is_corrected_by_default(functions: dict[str, Any]):
    for loss in ("top_entropy", "own_functions:loss_of_sure_tokens"):
        stale = functions | {"trainer.algorithm.policy_loss_type": loss, "trainer.max_staleness": 2}
        assert (correction_params(from_mapping(stale)) or {})["tis_ratio_type"] == "token"


@pytest.mark.parametrize(
    "estimator",
    [
        "pass_at_k",
        "maxrl",
        "rl_core.algorithms:pass_at_k_advantages",
        "rl_core.algorithms.advantages:maxrl_advantages",
        "own_functions:pass_at_k_advantages",
        "own_functions:pass_at_4",
        "own_functions:watched_maxrl",
    ],
)
def test_kl_in_the_reward_works_with_estimators_of_successes(functions: dict[str, Any], estimator: str):
    """However the estimator is named, it also gets the scores without the KL penalty."""
    chosen = functions | {"trainer.algorithm.advantage_estimator": estimator}
    if "pass_at_k" in estimator:
        chosen["trainer.algorithm.advantage_params.k"] = 2
    config = from_mapping(chosen | {"trainer.algorithm.use_kl_in_reward": True})
    check_plugins(config)
    settings = update_settings(config)
    assert settings.kl_in_reward == "k3"
    assert "environment_scores_N" in positional_parameters(settings.estimator)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce++", "own_functions:advantages"])
def test_kl_in_the_reward_works_with_estimators_that_compare_scores(functions: dict[str, Any], estimator: str):
    chosen = {"trainer.algorithm.advantage_estimator": estimator, "trainer.algorithm.use_kl_in_reward": True}
    assert update_settings(from_mapping(functions | chosen)).kl_in_reward == "k3"


@pytest.mark.parametrize(
    ("change", "tis_ratio_type"),
    [
        ({"trainer.max_staleness": 2}, "token"),
        ({"trainer.max_staleness": 0}, None),
        ({"trainer.max_staleness": 4, "trainer.pipeline_depth": 0}, None),
        ({"trainer.max_staleness": 2, f"{CORRECTION}.tis_ratio_type": "off"}, None),
        ({"trainer.max_staleness": 2, f"{CORRECTION}.tis_ratio_type": "sequence"}, "sequence"),
        ({"trainer.max_staleness": 2, "trainer.algorithm.policy_loss_type": "own_functions:loss_that_corrects"}, None),
        ({"trainer.max_staleness": 2, "trainer.algorithm.policy_loss_type": "own_functions:loss_of_tokens"}, None),
    ],
)
def test_stale_samples_are_corrected_by_default_if_the_loss_allows_it(
    functions: dict[str, Any], change: dict[str, Any], tis_ratio_type: str | None
):
    config = from_mapping(functions | change)
    check_plugins(config)
    params = correction_params(config)
    assert (params and params["tis_ratio_type"]) == tis_ratio_type


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"eps_clip_low": 3e-4, "eps_clip_high": 4e-4}),
        ({"eps_clip_low": 0.2}, {"eps_clip_low": 0.2, "eps_clip_high": 4e-4}),
        ({"eps_clip_low": 0.1, "policy_loss_params.eps_clip_low": 0.05}, {"eps_clip_low": 0.05, "eps_clip_high": 4e-4}),
    ],
)
def test_a_losss_own_default_wins_over_the_default_of_a_general_key(
    functions: dict[str, Any], given: dict[str, Any], expected: dict[str, Any]
):
    """A value that is set applies even if it equals 0.2, the default of the general key. Writing the configuration to a
    file and loading it does not change this."""
    keys = {f"trainer.algorithm.{name}": value for name, value in given.items()}
    config = from_mapping(functions | {"trainer.algorithm.policy_loss_type": "gspo"} | keys)
    assert loss_params(config) == expected
    assert loss_params(from_mapping(yaml.safe_load(dump_yaml(config)))) == expected
    ppo = attrs.evolve(config.trainer.algorithm, policy_loss_type="regular")
    other = attrs.evolve(config, trainer=attrs.evolve(config.trainer, algorithm=ppo))
    assert loss_params(other) == {"eps_clip_low": 0.2, "eps_clip_high": 0.2} | {
        name: value for name, value in expected.items() if name in given or f"policy_loss_params.{name}" in given
    }


def test_a_function_without_a_default_of_its_own_gets_the_general_one(functions: dict[str, Any]):
    strict = functions | {"trainer.algorithm.policy_loss_type": "own_functions:strict_loss"}
    assert loss_params(from_mapping(strict)) == {"eps_clip_low": 0.2}
    assert loss_params(from_mapping(strict | {"trainer.algorithm.eps_clip_low": 0.1})) == {"eps_clip_low": 0.1}


def test_thresholds_of_a_correction_are_checked(functions: dict[str, Any]):
    key = f"{CORRECTION}.token_mask_is_threshold_low"
    with pytest.raises(ConfigError, match=r"trainer\.algorithm\.off_policy_correction: token_mask_is_threshold_low"):
        check_plugins(from_mapping(functions | {key: 0.5}))


def test_a_changed_key_that_no_chosen_function_reads_causes_a_warning(functions: dict[str, Any]):
    with pytest.warns(ConfigWarning, match=r"trainer\.algorithm\.clip_ratio_c: has no effect with"):
        check_plugins(from_mapping(functions | {"trainer.algorithm.clip_ratio_c": 5.0}))


def test_a_key_that_the_user_did_not_choose_causes_no_warning(functions: dict[str, Any]):
    check_plugins(from_mapping(functions | {"trainer.algorithm.clip_ratio_c": 5.0}), chosen={"trainer.epochs"})


@pytest.mark.parametrize(
    ("key", "value"),
    [("zero_variance_filter", True), ("dynamic_sampling.type", "filter"), ("dynamic_sampling.type", "replace")],
)
def test_filters_of_equal_rewards_are_refused_with_a_greedy_baseline(functions: dict[str, Any], key: str, value: Any):
    remax = functions | {"trainer.algorithm.advantage_estimator": "remax"}
    check_plugins(from_mapping(remax))
    assert needs_greedy_answers(from_mapping(remax))
    assert not needs_greedy_answers(from_mapping(functions | {f"trainer.algorithm.{key}": value}))
    message = rf"trainer\.algorithm\.{key}: {key}=\w+ drops groups of equal rewards.*remax.*e\.g\. rloo"
    with pytest.raises(ConfigError, match=message):
        check_plugins(from_mapping(remax | {f"trainer.algorithm.{key}": value}))


def test_parameters_are_read_from_their_own_key_unless_the_params_key_has_them(functions: dict[str, Any]):
    config = from_mapping(functions | {"trainer.algorithm.eps_clip_low": 0.1, "trainer.algorithm.gamma": 0.9})
    assert loss_params(config) == {"eps_clip_low": 0.1}
    assert advantage_params(config) == {"gamma": 0.9, "grpo_norm_by_std": True}
    config = from_mapping(functions | {"trainer.algorithm.policy_loss_params": {"eps_clip_low": 0.3, "sharpness": 1}})
    assert loss_params(config) == {"eps_clip_low": 0.3, "sharpness": 1}
