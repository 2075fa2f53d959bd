"""Wrong values, impossible combinations, missing files and wrong plug-ins are found before anything starts."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_core import plugins
from rl_core.config import from_mapping
from rl_core.config.checks import check_plugins
from rl_core.config.file_checks import check_files
from rl_core.config.value_checks import check_values
from rl_core.errors import ConfigError, ConfigErrors, PluginError
from rl_core.seams import SEAMS
from rl_rollout.transports.cuda_ipc import cuda_ipc
from rl_rollout.transports.files import FilesTransport

CORRECTION = "trainer.algorithm.off_policy_correction"
IDLE = "tests.core.idle_plugins"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with just enough of a data file and a model directory for the checks."""
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
            "4 does not divide .*=10; the next smaller divisor is 2",
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
        ("trainer.worker_timeout_s=0", "expected a finite number above 0"),
        ("trainer.algorithm.kl_loss_coef=.inf", "kl_loss_coef: got inf; expected a finite number"),
        ("trainer.algorithm.temperature=.inf", r"algorithm\.temperature: got inf; expected a finite number"),
        ("generator.eval_sampling_params.temperature=.inf", "temperature: got inf; expected a finite number"),
        (
            "generator.sampling_params.stop=['</s>','']",
            r"^generator\.sampling_params\.stop: got an empty text, .* remove it$",
        ),
        ("generator.eval_sampling_params.stop=['']", r"^generator\.eval_sampling_params\.stop: got an empty text"),
        ("trainer.generation_timeout_s=.inf", r"generation_timeout_s: got inf; expected a finite number above 0$"),
        ("environment.timeout_s=1e10", r"environment\.timeout_s: got 10000000000\.0; expected at most 1000000000$"),
        (
            "trainer.policy.optimizer_config.lr=0",
            r"policy\.optimizer_config\.lr: got 0.0; expected a finite number above 0",
        ),
        (
            "trainer.policy.optimizer_config.eps=-1",
            r"policy\.optimizer_config\.eps: got -1.0; expected a finite number above 0",
        ),
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
            "colocate_policy_ref=true needs .* the policy has 1 × 1, .* is 1 × 2. Remove both reference keys",
        ),
        ("trainer.policy.model.lora.merge_lora=false", r"there is no adapter to send; set .*lora\.rank above 0"),
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
        ("trainer.algorithm.use_kl_loss=true trainer.algorithm.use_kl_in_reward=true", "set one of them to false"),
        ("trainer.algorithm.kl_ctrl.type=adaptive", "use_kl_in_reward=true, or type=fixed"),
        ("trainer.algorithm.use_kl_in_reward=true trainer.algorithm.kl_estimator_type=k3+", "use k3$"),
        ("trainer.algorithm.loss_reduction=seq_mean_token_sum_norm", "max_seq_len: got None"),
        ("trainer.resume_mode=from_path", "set both a path and resume_mode=from_path"),
        ("trainer.resume_path=x", "set both a path and resume_mode=from_path"),
        ("generator.n_samples_per_prompt=1", "advantage_estimator=grpo compares the samples .* set it to at least 2"),
        (
            "generator.n_samples_per_prompt=1 trainer.algorithm.advantage_estimator=a:b "
            "trainer.algorithm.dynamic_sampling.type=filter",
            "dynamic_sampling.type=filter compares the samples",
        ),
        ("generator.sampling_params.temperature=0", "above 0 .*all samples of a prompt would be the same"),
        ("generator.sampling_params.top_p=1.1", "at most 1"),
        (
            "generator.eval_sampling_params.top_k=0",
            "eval_sampling_params.top_k: got 0; expected at least 1, or -1",
        ),
    ],
)
def test_an_impossible_value_or_combination_is_one_clear_error(overrides: str, message: str):
    with pytest.raises(ConfigError, match=message) as raised:
        check_values(from_mapping({}, overrides.split()))
    assert not isinstance(raised.value, ConfigErrors), raised.value


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ("trainer.seed=-1 trainer.epochs=0", ["trainer.epochs", "trainer.seed"]),
        ("trainer.policy_mini_batch_size=0 trainer.epochs=0", ["trainer.epochs", "trainer.policy_mini_batch_size"]),
        ("generator.n_samples_per_prompt=0", ["generator.n_samples_per_prompt"]),
        ("trainer.placement.policy_num_nodes=0", ["trainer.placement.policy_num_nodes"]),
        (
            "generator.sampling_params.max_generate_length=0 trainer.max_prompt_length=0",
            ["trainer.max_prompt_length", "generator.sampling_params.max_generate_length"],
        ),
        (
            "trainer.policy.optimizer_config.lr=.inf trainer.critic.optimizer_config.lr=-.inf",
            ["trainer.policy.optimizer_config.lr", "trainer.critic.optimizer_config.lr"],
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
def test_all_wrong_values_are_reported_at_once_without_follow_up_errors(overrides: str, keys: list[str]):
    assert mistaken(lambda: check_values(from_mapping({}, overrides.split()))) == keys


def mistaken(check: Callable[[], object]) -> list[str]:
    """The keys of the errors that a check raises."""
    with pytest.raises(ConfigError) as raised:
        check()
    errors = raised.value.errors if isinstance(raised.value, ConfigErrors) else [raised.value]
    return [str(error).partition(":")[0] for error in errors]


def test_one_error_names_every_missing_file_once(files: Path):
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


def test_all_wrong_plug_ins_are_reported_at_once_without_follow_up_errors(functions: dict[str, Any]):
    algorithm = "trainer.algorithm"
    changes = {
        "generator.type": "x",
        "generator.inference_engine.weight_sync_backend": "y",
        "trainer.logger": ["x", "y"],
        "trainer.callbacks": ["no_module:Class"],
        f"{algorithm}.policy_loss_type": "no_module:loss",
        f"{algorithm}.off_policy_correction.token_mask_is_threshold_low": 0.5,
        f"{algorithm}.advantage_params.a": 1,
        "generator.sampling_params.stop": ["."],
    }
    assert mistaken(lambda: check_plugins(from_mapping(functions | changes))) == [
        "generator.type",
        "generator.inference_engine.weight_sync_backend",
        "trainer.logger",
        "trainer.logger",
        "trainer.callbacks",
        f"{algorithm}.policy_loss_type",
        f"{algorithm}.advantage_estimator",
        "generator.sampling_params",
    ]


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", "...", ".hidden", "a/b", "/a", "../x", "a/..", "a\0b", "\0", "${trainer.seed}/x"]
)
def test_a_run_name_that_is_not_a_directory_below_runs_is_refused(name: str):
    config = from_mapping({"trainer.run_name": name})
    with pytest.raises(ConfigError, match=r"trainer\.run_name: got '.*'; .* set trainer\.run_dir"):
        check_values(config)
    with pytest.raises(ConfigError, match=r"trainer\.run_name: "):
        check_values(from_mapping({"trainer.run_name": name, "trainer.run_dir": "mine"}))


@pytest.mark.parametrize("key", ["run_dir", "ckpt_path", "export_path"])
def test_an_empty_path_does_not_mean_the_current_directory(key: str):
    with pytest.raises(ConfigError, match=rf"trainer\.{key}: got an empty path; expected a directory"):
        check_values(from_mapping({f"trainer.{key}": ""}))


@pytest.mark.parametrize("name", ["run", "a.b", "a..b", "x.", "a b", "-", "läuft", "007"])
def test_a_run_name_that_is_a_directory_name_is_accepted(name: str):
    check_values(from_mapping({"trainer.run_name": name}))


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
        ({"trainer.run_dir": "train.parquet/run"}, "trainer.run_dir: .* is not a writable directory"),
    ],
)
def test_a_missing_file_is_named_with_its_key(files: Path, change: dict[str, Any], message: str):
    (files / "bare").mkdir()
    (files / "mute").mkdir()
    (files / "mute" / "config.json").write_text("{}")
    complete = {"data.train_data": ["train.parquet"], "trainer.policy.model.path": "model"}
    check_files(from_mapping(complete))
    with pytest.raises(ConfigError, match=message) as raised:
        check_files(from_mapping(complete | change))
    assert str(raised.value).partition(":")[0] in change


@pytest.mark.parametrize("key", ["policy", "ref", "critic"])
def test_an_adapter_beside_the_weights_of_any_model_is_named(files: Path, key: str):
    (files / "both").mkdir()
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (files / "both" / name).write_text("{}")
    (files / "model" / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    config = from_mapping(
        {
            "data.train_data": ["train.parquet"],
            "trainer.policy.model.path": "model",
            "trainer.algorithm.use_kl_loss": True,
            f"trainer.{key}.model.path": "both",
        }
    )
    check_files(config)
    (files / "both" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"trainer\.{key}\.model\.path: both has a LoRA adapter .*merge_and_unload"):
        check_files(config)
    (files / "both" / "config.json").unlink()
    with pytest.raises(
        ConfigError, match=rf"trainer\.{key}\.model\.path: both has no config\.json, only a LoRA adapter"
    ):
        check_files(config)


@pytest.mark.parametrize("key", ["ref", "critic"])
def test_another_model_without_embeddings_for_a_token_of_the_policy_is_named(files: Path, key: str):
    vocabulary = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "<tool>", "id": 2}]}
    config = from_mapping(
        {
            "data.train_data": ["train.parquet"],
            "trainer.policy.model.path": "model",
            "trainer.algorithm.use_kl_loss": True,
            f"trainer.{key}.model.path": "other",
        }
    )
    (files / "other").mkdir()

    def write(policy: int, other: int) -> None:
        for name, size in (("model", policy), ("other", other)):
            (files / name / "tokenizer.json").write_text(json.dumps(vocabulary))
            (files / name / "config.json").write_text(json.dumps({"vocab_size": size}))

    for policy, other in ((3, 3), (8, 3), (3, 8), (2, 2)):  # padded, or the token cannot be sampled
        write(policy, other)
        check_files(config)
    write(3, 2)
    problem = rf"trainer\.{key}\.model\.path: other has embeddings for 2 tokens, .* token 2 \('<tool>'\)"
    with pytest.raises(ConfigError, match=problem):
        check_files(config)


def test_files_that_will_be_created_may_be_missing_but_not_wrong(files: Path):
    config = from_mapping({"data.train_data": ["new.parquet"], "trainer.policy.model.path": "./new"})
    check_files(config, makes={"new.parquet", "./new"})
    with pytest.raises(ConfigError, match=r"the file new\.parquet does not exist"):
        check_files(config, makes={"./new"})
    with pytest.raises(ConfigError, match=r"the directory \./new does not exist"):
        check_files(config, makes={"new.parquet"})
    (files / "new").mkdir()
    with pytest.raises(ConfigError, match=r"new has no config\.json"):
        check_files(config, makes={"new.parquet", "./new"})


def test_names_of_models_and_unused_references_are_not_checked_as_paths(files: Path):
    check_files(from_mapping({"data.train_data": "train.parquet", "trainer.policy.model.path": "some/model"}))
    check_files(
        from_mapping(
            {"data.train_data": "train.parquet", "trainer.policy.model.path": "model", "trainer.ref.model.path": "./no"}
        )
    )


def test_functions_and_plug_ins_of_the_user_are_accepted(functions: dict[str, Any]):
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
        (
            {"trainer.algorithm.policy_loss_params.sharpnes": 1},
            ConfigError,
            "has no keyword-only parameter 'sharpnes'.*'sharpness'",
        ),
        (
            {"trainer.algorithm.advantage_estimator": "pass_at_k"},
            ConfigError,
            "'pass_at_k' needs the parameter 'k'; add e.g. trainer.algorithm.advantage_params.k=2",
        ),
        (
            {"trainer.algorithm.policy_loss_type": "json:dumps"},
            PluginError,
            "trainer.algorithm.policy_loss_type: 'json:dumps' is not a loss: .* cannot be passed by name",
        ),
        ({"trainer.algorithm.policy_loss_type": "value_clip"}, ConfigError, "trains a critic, and a run with"),
        ({"trainer.algorithm.policy_loss_type": "ppo"}, PluginError, "Did you mean 'ppo_clip'?"),
        (
            {"trainer.algorithm.advantage_params.a": 1},
            ConfigError,
            "advantage_estimator: .* has no keyword-only parameter 'a'",
        ),
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
        ({"generator.sampling_params.stop": ["."]}, ConfigError, "this engine knows no stop strings"),
        (
            {"generator.sampling_params.top_p": 0.9, "generator.sampling_params.min_p": 0.1},
            ConfigError,
            r"generator.sampling_params: got top_p=0.9, min_p=0.1, .* the engine '.*' does not return the kept tokens. "
            "Remove top_p and min_p; generator.eval_sampling_params may set them",
        ),
        (
            {
                "generator.sampling_params.top_k": 5,
                "generator.inference_engine.backend": "local",
                "trainer.strategy": f"{IDLE}:optionless",
            },
            ConfigError,
            "got top_k=5, .* and trainer.strategy=.* cannot use them. Remove top_k",
        ),
        ({"generator.sampling_params.top_k": 5}, ConfigError, "got top_k=5, so only the most likely tokens"),
        *(
            (
                {f"generator.sampling_params.{name}": value},
                ConfigError,
                rf"generator\.sampling_params\.{name}: got {value:g}, which leaves only the most likely token: each ",
            )
            for name, value in (("top_k", 1), ("top_p", 1e-6), ("min_p", 1.0))
        ),
        *(
            (
                {f"generator.{section}.extra_args.min_tokens": 3},
                ConfigError,
                f"generator.{section}.extra_args: got min_tokens, but the engine .* has no further sampling parameters",
            )
            for section in ("sampling_params", "eval_sampling_params")
        ),
        (
            {
                "generator.sampling_params.extra_args": {"extra_args": {"mine": 1}},
                "generator.inference_engine.backend": "vllm",
                "generator.inference_engine.weight_verification.prove_at_start": False,
            },
            ConfigError,
            r"prove_at_start: got false, but only this proof .*extra_args \(extra_args\) keeps log-probs exact",
        ),
        (
            {"trainer.algorithm.temperature": 0.9},
            ConfigError,
            r"trainer.algorithm.temperature: got 0.9, but responses are sampled with .*temperature=1, .* remove this",
        ),
    ],
)
def test_every_plug_in_is_checked_before_a_run(
    functions: dict[str, Any], change: dict[str, Any], error: type, message: str
):
    with pytest.raises(error, match=message):
        check_plugins(from_mapping(functions | change))


def test_the_hint_for_a_missing_plug_in_is_to_upgrade_or_install_its_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(plugins._PACKAGES, ("rl_core.backends", "later"), "rl-core")
    with pytest.raises(PluginError, match=r"The installed rl-core .* does not have it; install a newer version$"):
        plugins.load("rl_core.backends", "later")
    monkeypatch.setitem(plugins._PACKAGES, ("rl_core.backends", "later"), "rl-no-such-package")
    with pytest.raises(PluginError, match="pip install rl-no-such-package"):
        plugins.load("rl_core.backends", "later")


def test_the_package_of_each_plug_in_of_this_project_is_known():
    found = {}
    for path in (Path(__file__).parents[2] / "packages").glob("*/pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        for group, entries in project.get("entry-points", {}).items():
            if group in SEAMS and group != "rl_core.model_configs" and project["name"] != "rl-core":
                found |= {(group, name): project["name"] for name in entries}
    assert found == plugins._PACKAGES


def test_a_transport_of_one_machine_is_refused_if_the_policy_trains_on_several():
    nodes = {"trainer.placement.policy_num_nodes": 2, "trainer.policy.model.path": "model"}
    with pytest.raises(ConfigError, match=r"weight_sync_backend: files uses folders of this machine, .* broadcast"):
        check_plugins(from_mapping(nodes))
    key = "generator.inference_engine.weight_sync_backend"
    with pytest.raises(ConfigError, match="shared_memory works only within one machine"):
        check_plugins(from_mapping({**nodes, key: "shared_memory"}))
    check_plugins(from_mapping({**nodes, key: "broadcast"}))
    check_plugins(from_mapping({**nodes, "trainer.placement.policy_num_nodes": 1}))
    FilesTransport(directory="/shared").validate_nodes(2)
    with pytest.raises(ConfigError, match=r"cuda_ipc works only within one machine, .* on 2 .*: choose broadcast"):
        cuda_ipc.validate_nodes(2)
    cuda_ipc.validate_nodes(1)


def test_adapters_without_base_weights_are_refused_for_engines_that_take_only_whole_weights(functions: dict[str, Any]):
    adapter = {"trainer.policy.model.lora.rank": 4, "trainer.policy.model.lora.merge_lora": False}
    model = {"trainer.policy.model.path": "model", **functions, **adapter}
    check_plugins(from_mapping({**model, "generator.inference_engine.backend": "vllm"}))
    with pytest.raises(ConfigError, match="merge_lora: got false, but the engine 'local' accepts only whole weights"):
        check_plugins(from_mapping({**model, "generator.inference_engine.backend": "local"}))


def test_weight_sync_delta_is_refused_for_adapters_and_for_engines_without_deltas(functions: dict[str, Any]):
    key, model = "generator.inference_engine.weight_sync_delta", {"trainer.policy.model.path": "model", **functions}
    check_plugins(from_mapping({**model, key: True, "generator.inference_engine.backend": "local"}))
    with pytest.raises(
        ConfigError, match=rf"{key}: got true, but the engine '{IDLE}:engine' accepts only whole weights"
    ):
        check_plugins(from_mapping({**model, key: True, "generator.inference_engine.backend": f"{IDLE}:engine"}))
    adapter = {"trainer.policy.model.lora.rank": 4, "trainer.policy.model.lora.merge_lora": False}
    with pytest.raises(ConfigError, match=rf"{key}: got true with trainer.policy.model.lora.merge_lora=false"):
        check_plugins(from_mapping({**model, **adapter, key: True, "generator.inference_engine.backend": "vllm"}))
    with pytest.raises(ConfigError, match="weight_sync_whole_interval: got 0"):
        check_values(from_mapping({**model, "generator.inference_engine.weight_sync_whole_interval": 0}))
