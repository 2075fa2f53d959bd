"""Combinations that cannot work are found before anything starts, each with one error that says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml

from rl_core import plugins
from rl_core.config import (
    Config,
    ConfigWarning,
    advantage_params,
    check_files,
    check_plugins,
    check_values,
    correction_params,
    dump_yaml,
    from_mapping,
    loss_params,
    needs_greedy_answers,
)
from rl_core.config.loading import known_paths
from rl_core.config.value_checks import ABOVE_ZERO, BOUNDS
from rl_core.errors import ConfigError, ConfigErrors, PluginError
from rl_core.function_settings import positional_parameters
from rl_core.trainer.settings import update_settings
from tests.core.fake_plugins import install

CORRECTION = "trainer.algorithm.off_policy_correction"
FUNCTIONS = """
import functools

from rl_core.algorithms import TokenLoss, clip_cov_loss, kl_cov_loss, prepared_by, takes_corrections
from rl_core.algorithms import maxrl_advantages, pass_at_k_advantages


def loss(logprobs_T, old_logprobs_T, advantages_T, mask_T, *, eps_clip_low=0.2, sharpness=2.0):
    return TokenLoss(-advantages_T * logprobs_T, {})


def loss_of_tokens(logprobs_T, mask_T):
    return TokenLoss(-logprobs_T, {})


def loss_that_corrects(logprobs_T, rollout_logprobs_T, advantages_T, mask_T):
    return TokenLoss(-advantages_T * logprobs_T, {})


def best_tokens(advantages_T, mask_T, *, share=0.5):
    return {"x_best": advantages_T >= advantages_T[mask_T].quantile(1 - share)}


@prepared_by(best_tokens)
def loss_of_best_tokens(logprobs_T, advantages_T, mask_T, x_best_T):
    return TokenLoss(-logprobs_T * advantages_T * x_best_T, {})


@takes_corrections("scales")
@prepared_by(best_tokens)
def declared_loss_of_best_tokens(logprobs_T, advantages_T, mask_T, x_best_T):
    return TokenLoss(-logprobs_T * advantages_T * x_best_T, {})


@takes_corrections("refuses")
def loss_that_refuses(logprobs_T, advantages_T, mask_T):
    return TokenLoss(-advantages_T * logprobs_T, {})


def loss_with_a_penalty(logprobs_T, advantages_T, mask_T):
    return TokenLoss(-advantages_T * logprobs_T + logprobs_T.square(), {})


def sure_tokens(old_entropies_T, mask_T):
    return {"x_sure": old_entropies_T < 1.0}


@prepared_by(sure_tokens)
def loss_of_sure_tokens(logprobs_T, advantages_T, mask_T, x_sure_T):
    return TokenLoss(-logprobs_T * advantages_T * x_sure_T, {})


@functools.wraps(kl_cov_loss)
def watched_kl_cov(*columns, **settings):
    return kl_cov_loss(*columns, **settings)


@functools.wraps(maxrl_advantages)
def watched_maxrl(*columns, **settings):
    return maxrl_advantages(*columns, **settings)


pass_at_4 = functools.partial(pass_at_k_advantages, k=4)


def strict_loss(logprobs_T, advantages_T, *, eps_clip_low):
    return TokenLoss(-advantages_T * logprobs_T, {})


def loss_with_duty(logprobs_T, mask_T, *, duty):
    return TokenLoss(-logprobs_T, {})


def broken_loss(logprobs_T, mask_T):
    raise RuntimeError("not today")


def advantages(scores_N, group_N, *, gamma=1.0, grpo_norm_by_std=True):
    return scores_N


class Engine:
    contract_version = 2
    name = "fussy"

    def validate(self, spec):
        if spec.sampling.top_p < 1:
            from rl_core.errors import ConfigError

            raise ConfigError("generator.sampling_params: this engine returns raw log-probs")


engine = Engine()
anything = object
"""
IDLE = "tests.core.idle_plugins"


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A configuration whose plug-ins are all this file's own."""
    install(tmp_path, monkeypatch, "own_functions", FUNCTIONS)
    yield {
        "trainer.policy.model.path": "model",
        "trainer.algorithm.policy_loss_type": "own_functions:loss",
        "trainer.algorithm.advantage_estimator": "own_functions:advantages",
        "trainer.logger": f"{IDLE}:Tracker",
        "generator.type": f"{IDLE}:Generator",
        "generator.inference_engine.backend": f"{IDLE}:fussy_engine",
        "generator.inference_engine.weight_sync_backend": f"{IDLE}:transport",
    }
    plugins._installed.cache_clear()


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a data file and a model directory, as far as the checks look."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.parquet").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return tmp_path


def test_the_defaults_pass():
    check_values(from_mapping({}))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "trainer.train_batch_size=10 trainer.policy_mini_batch_size=4",
            "4 does not divide .*=10; the nearest that does is 2",
        ),
        ("trainer.train_batch_size=4", "policy_mini_batch_size: 256 prompts are more than trainer.train_batch_size=4"),
        ("trainer.train_batch_size=0", "trainer.train_batch_size: got 0; expected at least 1"),
        ("trainer.max_staleness=-1", "trainer.max_staleness: got -1; expected at least 0"),
        ("trainer.max_ckpts_to_keep=0", "trainer.max_ckpts_to_keep: got 0; expected at least 1, or -1 to keep all"),
        ("trainer.pipeline_depth=-1", "trainer.pipeline_depth: got -1; expected at least 0"),
        (
            "trainer.pipeline_depth=2",
            r"trainer.pipeline_depth: 2 steps ahead is more than trainer.max_staleness=0 allows",
        ),
        ("trainer.max_training_steps=0", "trainer.max_training_steps: got 0"),
        ("trainer.algorithm.gamma=1.5", "expected between 0 and 1"),
        ("trainer.worker_timeout_s=0", "expected above 0"),
        ("trainer.policy.optimizer_config.lr=0", r"policy\.optimizer_config\.lr: got 0.0; expected above 0"),
        ("trainer.policy.optimizer_config.eps=-1", r"policy\.optimizer_config\.eps: got -1.0; expected above 0"),
        (
            "generator.inference_engine.weight_verification.limit=0.5",
            r"weight_verification\.limit: got 0.5; expected at most 0.16",
        ),
        (
            "generator.inference_engine.weight_verification.num_tokens=9223372036854775808",
            r"weight_verification\.num_tokens: got 9223372036854775808; expected at most 1048576",
        ),
        (
            "trainer.critic.optimizer_config.lr=.inf",
            r"critic\.optimizer_config\.lr: got inf.* expected a finite number",
        ),
        (
            "trainer.policy.optimizer_config.adam_betas=[1.5,2]",
            r"adam_betas: got \[1\.5, 2\.0\].* two numbers from 0 to",
        ),
        (
            "trainer.algorithm.use_kl_loss=true trainer.placement.ref_num_gpus_per_node=2",
            "colocate_policy_ref=true needs .* the policy has 1 nodes × 1, .* is 1 × 2. Leave both reference keys out",
        ),
        ("trainer.policy.model.lora.merge_lora=false", r"there is no adapter to send: set .*lora\.rank above 0"),
        (
            "trainer.policy.model.lora.rank=4 trainer.policy.model.lora.max_loras=2",
            "max_loras: got 2.*merge_lora=false",
        ),
        (
            "trainer.policy.model.lora.rank=4 trainer.policy.model.lora.merge_lora=false "
            "trainer.policy.model.lora.max_loras=3 trainer.policy.model.lora.max_cpu_loras=2",
            "max_cpu_loras: 2 is less than max_loras=3",
        ),
        ("trainer.critic.model.lora.merge_lora=false", r"critic\.model\.lora\.merge_lora: a critic is not sent"),
        ("trainer.max_tokens_per_microbatch=100", "cannot hold the longest sequence.*set it to at least 1536, or -1"),
        ("trainer.max_tokens_per_microbatch=0", "cannot hold the longest sequence"),
        ("trainer.algorithm.use_kl_loss=true trainer.algorithm.use_kl_in_reward=true", "switch one off"),
        ("trainer.algorithm.kl_ctrl.type=adaptive", "use_kl_in_reward=true, or type=fixed"),
        ("trainer.algorithm.use_kl_in_reward=true trainer.algorithm.kl_estimator_type=k3+", "write k3$"),
        ("trainer.algorithm.loss_reduction=seq_mean_token_sum_norm", "max_seq_len: got None"),
        ("trainer.resume_mode=from_path", "set both a path and resume_mode=from_path"),
        ("trainer.resume_path=x", "set both a path and resume_mode=from_path"),
        ("generator.n_samples_per_prompt=1", "advantage_estimator=grpo compares the samples .* set it to at least 2"),
        (
            "generator.n_samples_per_prompt=1 trainer.algorithm.advantage_estimator=a:b "
            "trainer.algorithm.dynamic_sampling.type=filter",
            "dynamic_sampling.type=filter compares the samples",
        ),
        ("generator.sampling_params.temperature=0", "above 0 .*greedy answers to one prompt are all the same"),
        ("generator.sampling_params.top_p=1.1", "at most 1"),
        (
            "generator.eval_sampling_params.top_k=0",
            "eval_sampling_params.top_k: got 0; expected at least 1, or -1",
        ),
    ],
)
def test_an_impossible_value_or_combination_is_one_clear_error(overrides: str, message: str):
    with pytest.raises(ConfigError, match=message):
        check_values(from_mapping({}, overrides.split()))


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ("trainer.seed=-1 trainer.epochs=0", ["trainer.epochs", "trainer.seed"]),
        ("trainer.policy_mini_batch_size=0 trainer.epochs=0", ["trainer.epochs", "trainer.policy_mini_batch_size"]),
        ("generator.n_samples_per_prompt=0", ["generator.n_samples_per_prompt"]),
        (
            "trainer.policy.optimizer_config.lr=.inf trainer.critic.optimizer_config.lr=-.inf",
            ["trainer.critic.optimizer_config.lr", "trainer.policy.optimizer_config.lr"],
        ),
        (
            "trainer.train_batch_size=10 trainer.policy_mini_batch_size=4 generator.n_samples_per_prompt=1 "
            "trainer.resume_mode=from_path trainer.max_tokens_per_microbatch=3",
            [
                *("trainer.policy_mini_batch_size", "trainer.max_tokens_per_microbatch"),
                *("generator.n_samples_per_prompt", "trainer.resume_path"),
            ],
        ),
    ],
)
def test_values_are_refused_together_and_none_because_of_another(overrides: str, keys: list[str]):
    assert mistaken(lambda: check_values(from_mapping({}, overrides.split()))) == keys


def mistaken(check: Callable[[], object]) -> list[str]:
    """The keys of the errors that a check raises."""
    with pytest.raises(ConfigError) as raised:
        check()
    errors = raised.value.errors if isinstance(raised.value, ConfigErrors) else [raised.value]
    return [str(error).partition(":")[0] for error in errors]


def test_missing_files_are_named_together_and_each_once(files: Path):
    config = from_mapping(
        {
            "data.train_data": ["a.parquet", "train.parquet", "b.parquet"],
            "data.val_data": ["b.parquet", "c.parquet"],
            "trainer.policy.model.path": "./nowhere",
            "trainer.algorithm.use_kl_loss": True,
            "trainer.resume_path": "nope",
            "trainer.run_dir": "train.parquet/run",
        }
    )
    expected = ["data.train_data", "data.train_data", "data.val_data", "trainer.policy.model.path"]
    assert mistaken(lambda: check_files(config)) == [*expected, "trainer.resume_path", "trainer.run_dir"]


def test_plug_ins_are_refused_together_and_none_because_of_another(functions: dict[str, Any]):
    algorithm = "trainer.algorithm"
    changes = {
        "generator.type": "x",
        "generator.inference_engine.weight_sync_backend": "y",
        "trainer.logger": ["x", "y"],
        "trainer.callbacks": ["no_module:Class"],
        f"{algorithm}.policy_loss_type": "no_module:loss",
        f"{algorithm}.off_policy_correction.token_mask_is_threshold_low": 0.5,
        f"{algorithm}.advantage_params.a": 1,
        "generator.sampling_params.top_p": 0.9,
    }
    assert mistaken(lambda: check_plugins(from_mapping(functions | changes))) == [
        "generator.type",
        "generator.inference_engine.weight_sync_backend",
        "trainer.logger",
        "trainer.logger",
        f"{algorithm}.policy_loss_type",
        "trainer.callbacks",
        f"{algorithm}.advantage_estimator",
        "generator.sampling_params",
    ]


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", "...", ".hidden", "a/b", "/a", "../x", "a/..", "a\0b", "\0", "${trainer.seed}/x"]
)
def test_a_run_name_that_is_no_directory_below_runs_is_refused(name: str):
    config = from_mapping({"trainer.run_name": name})
    with pytest.raises(ConfigError, match=r"trainer\.run_name: got '.*'; .* a path goes into trainer\.run_dir"):
        check_values(config)
    with pytest.raises(ConfigError, match=r"trainer\.run_name: "):
        check_values(from_mapping({"trainer.run_name": name, "trainer.run_dir": "mine"}))


@pytest.mark.parametrize("name", ["run", "a.b", "a..b", "x.", "a b", "-", "läuft", "007"])
def test_other_run_names_are_accepted(name: str):
    check_values(from_mapping({"trainer.run_name": name}))


def test_a_scoring_temperature_other_than_the_sampling_one_warns():
    with pytest.warns(ConfigWarning, match="log-probs of different distributions"):
        check_values(from_mapping({"trainer.algorithm.temperature": 0.9}))


def test_bounds_are_of_keys_that_exist():
    assert {*BOUNDS, *ABOVE_ZERO} <= set(known_paths(Config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data.train_data": []}, "data.train_data: got no file"),
        ({"data.train_data": ["nope.parquet"]}, "data.train_data: the file nope.parquet does not exist"),
        ({"data.val_data": ["./nope"]}, "data.val_data: the file ./nope does not exist"),
        ({"trainer.policy.model.path": None}, "trainer.policy.model.path: got no model"),
        ({"trainer.policy.model.path": "./nowhere"}, "the directory ./nowhere does not exist"),
        ({"trainer.policy.model.path": "bare"}, "bare has no config.json"),
        ({"trainer.policy.model.path": "mute"}, "mute has no tokenizer"),
        (
            {"trainer.ref.model.path": "bare", "trainer.algorithm.use_kl_loss": True},
            "trainer.ref.model.path: bare has no",
        ),
        (
            {"trainer.resume_mode": "from_path", "trainer.resume_path": "nope"},
            "trainer.resume_path: nope is not a directory",
        ),
        ({"trainer.run_dir": "train.parquet/run"}, "trainer.run_dir: .* is not a directory that can be written"),
    ],
)
def test_a_missing_file_is_named_with_its_key(files: Path, change: dict[str, Any], message: str):
    (files / "bare").mkdir()
    (files / "mute").mkdir()
    (files / "mute" / "config.json").write_text("{}")
    complete = {"data.train_data": ["train.parquet"], "trainer.policy.model.path": "model"}
    check_files(from_mapping(complete))
    with pytest.raises(ConfigError, match=message):
        check_files(from_mapping(complete | change))


def test_what_is_going_to_be_made_may_be_missing_but_not_wrong(files: Path):
    config = from_mapping({"data.train_data": ["new.parquet"], "trainer.policy.model.path": "./new"})
    check_files(config, makes={"new.parquet", "./new"})
    with pytest.raises(ConfigError, match=r"the file new\.parquet does not exist"):
        check_files(config, makes={"./new"})
    with pytest.raises(ConfigError, match=r"the directory \./new does not exist"):
        check_files(config, makes={"new.parquet"})
    (files / "new").mkdir()
    with pytest.raises(ConfigError, match=r"new has no config\.json"):
        check_files(config, makes={"new.parquet", "./new"})


def test_a_models_name_is_left_to_the_backend_and_an_unused_reference_is_not_looked_at(files: Path):
    check_files(from_mapping({"data.train_data": "train.parquet", "trainer.policy.model.path": "some/model"}))
    check_files(
        from_mapping(
            {"data.train_data": "train.parquet", "trainer.policy.model.path": "model", "trainer.ref.model.path": "./no"}
        )
    )


def test_own_functions_are_accepted_everywhere(functions: dict[str, Any]):
    check_plugins(from_mapping(functions))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"generator.inference_engine.backend": "vlm"},
            PluginError,
            "generator.inference_engine.backend: 'vlm' is not among",
        ),
        ({"generator.inference_engine.weight_sync_backend": "x"}, PluginError, "weight_sync_backend: 'x' is not among"),
        ({"generator.type": "x"}, PluginError, "generator.type: 'x' is not among"),
        ({"environment.env_class": "x"}, PluginError, "environment.env_class: 'x' is not among"),
        ({"environment.env_class": "own_functions:advantage"}, PluginError, "Did you mean 'advantages'"),
        ({"trainer.logger": ["x"]}, PluginError, "trainer.logger: 'x' is not among"),
        ({"trainer.callbacks": ["no_module:Class"]}, PluginError, "trainer.callbacks: .*importing no_module failed"),
        ({"trainer.algorithm.policy_loss_params.sharpnes": 1}, ConfigError, "has no parameter 'sharpnes'.*'sharpness'"),
        (
            {"trainer.algorithm.advantage_estimator": "pass_at_k"},
            ConfigError,
            "'pass_at_k' needs the parameter 'k'; add e.g. trainer.algorithm.advantage_params.k=2",
        ),
        (
            {"trainer.algorithm.policy_loss_type": "json:dumps"},
            PluginError,
            "trainer.algorithm.policy_loss_type: 'json:dumps' is not a loss: .* cannot be bound by name",
        ),
        ({"trainer.algorithm.policy_loss_type": "value_clip"}, ConfigError, "trains a critic, not a policy"),
        ({"trainer.algorithm.policy_loss_type": "ppo"}, PluginError, "Did you mean 'ppo_clip'?"),
        ({"trainer.algorithm.advantage_params.a": 1}, ConfigError, "advantage_estimator: .* has no parameter 'a'"),
        (
            {"trainer.algorithm.policy_loss_type": "own_functions:loss_with_duty"},
            ConfigError,
            "needs the parameter 'duty'",
        ),
        ({"trainer.algorithm.policy_loss_type": "own_functions:broken_loss"}, PluginError, "not today"),
        (
            {"trainer.algorithm.policy_loss_type": f"{IDLE}:engine"},
            PluginError,
            "is not a loss: it is an object",
        ),
        ({"generator.sampling_params.top_p": 0.9}, ConfigError, "this engine returns raw log-probs"),
    ],
)
def test_every_plug_in_is_asked_before_a_run(
    functions: dict[str, Any], change: dict[str, Any], error: type, message: str
):
    with pytest.raises(error, match=message):
        check_plugins(from_mapping(functions | change))


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


CHOOSES, DOES_NOT_SCALE = "chooses tokens by the advantages", "is not proportional to its advantages"
UNKNOWN = {"own_functions:loss_of_best_tokens": CHOOSES, "own_functions:loss_with_a_penalty": DOES_NOT_SCALE}
"""Losses that do not say how they take weights, and why it cannot be found out."""
BY_COVARIANCE = (
    "clip_cov",
    "kl_cov",
    "rl_core.algorithms:clip_cov_loss",
    "rl_core.algorithms.minibatch_losses:kl_cov_loss",
    "own_functions:clip_cov_loss",
    "own_functions:watched_kl_cov",
    "own_functions:declared_loss_of_best_tokens",
)
"""Losses that choose tokens by advantages and say how they take weights, by all ways to name one."""


@pytest.mark.parametrize("loss", UNKNOWN)
@pytest.mark.parametrize("tis_ratio_type", ["token", "sequence"])
def test_weights_of_a_correction_are_refused_where_nobody_says_how_the_loss_takes_them(
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
def test_such_a_loss_wants_to_be_told_what_happens_to_samples_of_earlier_weights(functions: dict[str, Any], loss: str):
    stale = functions | {"trainer.algorithm.policy_loss_type": loss, "trainer.max_staleness": 2}
    message = rf"tis_ratio_type: 'token' is the default with trainer\.max_staleness=2.*'{loss}'.*=off.*max_staleness=0"
    for refuses in (check_plugins, update_settings):
        with pytest.raises(ConfigError, match=message):
            refuses(from_mapping(stale))
    uncorrected = from_mapping(stale | {f"{CORRECTION}.tis_ratio_type": "off"})
    check_plugins(uncorrected)
    assert correction_params(uncorrected) is None


@pytest.mark.parametrize("loss", BY_COVARIANCE)
def test_losses_that_say_how_they_take_weights_are_corrected_by_default(functions: dict[str, Any], loss: str):
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
def test_masks_of_a_correction_go_with_every_loss_that_weighs_advantages(
    functions: dict[str, Any], mask: dict[str, Any]
):
    masked = {f"{CORRECTION}.{name}": value for name, value in mask.items()}
    loss = {"trainer.algorithm.policy_loss_type": "own_functions:loss_of_best_tokens"}
    assert mask.items() <= dict(correction_params(from_mapping(functions | loss | masked)) or {}).items()
    with pytest.raises(ConfigError, match="chooses tokens by the advantages"):
        correction_params(from_mapping(functions | loss | masked | {"trainer.max_staleness": 1}))


def test_a_loss_that_chooses_tokens_by_something_else_is_corrected_by_default(functions: dict[str, Any]):
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
def test_kl_in_the_reward_goes_with_estimators_of_successes(functions: dict[str, Any], estimator: str):
    """By all ways to name one, the success is that of the environment's reward."""
    chosen = functions | {"trainer.algorithm.advantage_estimator": estimator}
    if "pass_at_k" in estimator:
        chosen["trainer.algorithm.advantage_params.k"] = 2
    config = from_mapping(chosen | {"trainer.algorithm.use_kl_in_reward": True})
    check_plugins(config)
    settings = update_settings(config)
    assert settings.kl_in_reward == "k3"
    assert "environment_scores_N" in positional_parameters(settings.estimator)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce++", "own_functions:advantages"])
def test_kl_in_the_reward_goes_with_estimators_that_compare_scores(functions: dict[str, Any], estimator: str):
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
def test_samples_of_earlier_weights_are_corrected_for_unless_the_loss_does_so(
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
def test_a_losss_own_default_wins_over_a_general_key_that_nobody_gave(
    functions: dict[str, Any], given: dict[str, Any], expected: dict[str, Any]
):
    """Also where 0.2, the default of other losses, is what was given; and after the file was written and read."""
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


def test_a_key_that_no_chosen_function_reads_warns_when_it_was_changed(functions: dict[str, Any]):
    with pytest.warns(ConfigWarning, match=r"trainer\.algorithm\.clip_ratio_c: has no effect with"):
        check_plugins(from_mapping(functions | {"trainer.algorithm.clip_ratio_c": 5.0}))


def test_nothing_warns_of_a_key_that_the_user_did_not_choose(functions: dict[str, Any]):
    check_plugins(from_mapping(functions | {"trainer.algorithm.clip_ratio_c": 5.0}), chosen={"trainer.epochs"})


def test_a_plug_in_of_an_installed_package_that_lacks_it_is_not_to_be_installed_again(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setitem(plugins._PACKAGES, ("rl_core.backends", "later"), "rl-core")
    with pytest.raises(PluginError, match=r"The installed rl-core .* does not have it yet$"):
        plugins.load("rl_core.backends", "later")
    monkeypatch.setitem(plugins._PACKAGES, ("rl_core.backends", "later"), "rl-no-such-package")
    with pytest.raises(PluginError, match="pip install rl-no-such-package"):
        plugins.load("rl_core.backends", "later")


@pytest.mark.parametrize(
    ("key", "value"),
    [("zero_variance_filter", True), ("dynamic_sampling.type", "filter"), ("dynamic_sampling.type", "replace")],
)
def test_groups_are_not_chosen_by_their_samples_alone_where_a_greedy_answer_is_the_baseline(
    functions: dict[str, Any], key: str, value: Any
):
    remax = functions | {"trainer.algorithm.advantage_estimator": "remax"}
    check_plugins(from_mapping(remax))
    assert needs_greedy_answers(from_mapping(remax))
    assert not needs_greedy_answers(from_mapping(functions | {f"trainer.algorithm.{key}": value}))
    message = rf"trainer\.algorithm\.{key}: {key}=\w+ leaves out groups of equal rewards.*remax.*e\.g\. rloo"
    with pytest.raises(ConfigError, match=message):
        check_plugins(from_mapping(remax | {f"trainer.algorithm.{key}": value}))


def test_parameters_come_from_params_then_from_the_key_of_that_name_then_from_the_function(functions: dict[str, Any]):
    config = from_mapping(functions | {"trainer.algorithm.eps_clip_low": 0.1, "trainer.algorithm.gamma": 0.9})
    assert loss_params(config) == {"eps_clip_low": 0.1}
    assert advantage_params(config) == {"gamma": 0.9, "grpo_norm_by_std": True}
    config = from_mapping(functions | {"trainer.algorithm.policy_loss_params": {"eps_clip_low": 0.3, "sharpness": 1}})
    assert loss_params(config) == {"eps_clip_low": 0.3, "sharpness": 1}


def test_files_without_a_folder_of_all_machines_are_refused_on_several():
    from rl_core.config.checks import check_plugins
    from rl_rollout.transports.files import FilesTransport

    nodes = {"trainer.placement.policy_num_nodes": 2, "trainer.policy.model.path": "model"}
    with pytest.raises(ConfigError, match=r"weight_sync_backend: files uses folders of this machine, .* broadcast"):
        check_plugins(from_mapping(nodes))
    key = "generator.inference_engine.weight_sync_backend"
    with pytest.raises(ConfigError, match="shared_memory works only within one machine"):
        check_plugins(from_mapping({**nodes, key: "shared_memory"}))
    check_plugins(from_mapping({**nodes, key: "broadcast"}))
    check_plugins(from_mapping({**nodes, "trainer.placement.policy_num_nodes": 1}))
    FilesTransport(directory="/shared").validate_nodes(2)


def test_changes_alone_are_for_whole_weights_and_engines_that_take_them(functions: dict[str, Any]):
    key, model = "generator.inference_engine.weight_sync_delta", {"trainer.policy.model.path": "model", **functions}
    check_plugins(from_mapping({**model, key: True, "generator.inference_engine.backend": "local"}))
    with pytest.raises(ConfigError, match=rf"{key}: got true, and the engine '{IDLE}:engine' takes whole weights only"):
        check_plugins(from_mapping({**model, key: True, "generator.inference_engine.backend": f"{IDLE}:engine"}))
    adapter = {"trainer.policy.model.lora.rank": 4, "trainer.policy.model.lora.merge_lora": False}
    with pytest.raises(ConfigError, match=rf"{key}: got true with trainer.policy.model.lora.merge_lora=false"):
        check_plugins(from_mapping({**model, **adapter, key: True, "generator.inference_engine.backend": "vllm"}))
    with pytest.raises(ConfigError, match="weight_sync_whole_interval: got 0"):
        check_values(from_mapping({**model, "generator.inference_engine.weight_sync_whole_interval": 0}))
