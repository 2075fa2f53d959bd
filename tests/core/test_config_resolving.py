"""Derived values, and the configuration file that a run writes."""

from __future__ import annotations

from pathlib import Path

import attrs
import hypothesis.strategies as st
import pytest
import yaml
from hypothesis import given, settings

from rl_core.config import Config, Loaded, dump_yaml, from_mapping, load, resolve
from rl_core.config.loading import known_paths
from rl_core.config.resolving import RULES, as_mapping, leaves, unresolved, value_at, with_value
from rl_core.config.yaml12 import Yaml12Dumper, Yaml12Loader
from rl_core.errors import ConfigError
from rl_core.interfaces import SamplingParams


def reloaded(config: Config, tmp_path: Path, *overrides: str) -> Config:
    file = tmp_path / "config.yaml"
    file.write_text(dump_yaml(config), encoding="utf-8")
    loaded: Loaded = load(str(file), overrides)
    return loaded.config


def test_derived_values_follow_from_the_given_keys():
    config = from_mapping(
        {"trainer.run_name": "try", "trainer.bf16": False, "generator.sampling_params.temperature": 0.7}
    )
    assert (config.run_dir, config.ckpt_dir, config.export_dir) == (
        Path("runs/try"),
        Path("runs/try/checkpoints"),
        Path("runs/try/model"),
    )
    assert (config.temperature, config.engine_dtype) == (0.7, "float32")


def test_evaluation_is_greedy_and_takes_length_limit_and_stop_strings_of_training_by_default():
    config = from_mapping(
        {
            "generator.sampling_params": {"max_generate_length": 7, "top_p": 0.9, "stop": ["\n"]},
            "generator.eval_sampling_params.top_k": 4,
        }
    )
    params = config.generator.eval_sampling_params.to_params()
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.stop) == (7, 0.0, 1.0, 4, ("\n",))


def test_every_sampling_key_reaches_the_request():
    own = {"temperature": 0.7, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "extra_args": {"logit_bias": {"5": 1.0}}}
    sections = ("generator.sampling_params", "generator.eval_sampling_params")
    keys = {"max_generate_length": 7, "stop": ["a"], **own}
    generator = from_mapping(dict.fromkeys(sections, keys)).generator
    expected = SamplingParams(max_tokens=7, stop=("a",), **own)
    assert generator.sampling_params.to_params() == generator.eval_sampling_params.to_params() == expected


SYNC, ENGINE = "generator.inference_engine.weight_sync_backend", "generator.inference_engine"
URLS = ["http://10.0.0.7:8000"]


@pytest.mark.parametrize(
    ("given", "transport"),
    [
        ({}, "shared_memory"),
        ({f"{ENGINE}.backend": "vllm", f"{ENGINE}.num_engines": 2}, "shared_memory"),
        ({f"{ENGINE}.backend": "vllm", f"{ENGINE}.external_server_urls": URLS}, "files"),
        ({"trainer.placement.policy_num_nodes": 2}, "files"),
        ({f"{ENGINE}.backend": "tests.core.idle_plugins:engine"}, "files"),
        ({f"{ENGINE}.backend": "missing"}, "files"),
        ({SYNC: "broadcast"}, "broadcast"),
    ],
)
def test_weights_go_through_shared_memory_if_everything_runs_on_one_host(given, transport, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = from_mapping(given)
    assert config.weight_transport == transport
    assert (value_at(unresolved(config), SYNC) is None) == (SYNC not in given), (
        "a derived value must not be written out, so that it follows the keys it derives from"
    )


def test_servers_in_a_ray_cluster_that_the_run_joins_may_be_on_other_hosts(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert from_mapping({f"{ENGINE}.backend": "vllm"}).weight_transport == "files"
    assert from_mapping({}).weight_transport == "shared_memory", (
        "the local engine runs in this process, so shared memory works"
    )


def test_a_given_value_overrides_its_rule():
    config = from_mapping({"trainer.ckpt_path": "elsewhere", "generator.inference_engine.model_dtype": "float16"})
    assert (str(config.ckpt_dir), config.engine_dtype) == ("elsewhere", "float16")


def test_resolving_twice_changes_nothing():
    config = resolve(Config())
    assert resolve(config) == config


def test_every_rule_gives_a_value_to_a_key_without_a_default():
    config = from_mapping({"trainer.policy.model.path": "model", "environment.reward_functions": "rewards:short"})
    for rule in RULES:
        assert rule.key in known_paths(Config)
        assert value_at(config, rule.key) is not None
        assert value_at(Config(), rule.key) is None


def test_an_unresolved_configuration_says_so_when_asked_for_a_derived_value():
    with pytest.raises(ConfigError, match=r"trainer\.run_dir: has no value"):
        _ = Config().run_dir


def test_paths_may_name_the_home_directory_and_other_keys(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/somewhere")
    config = from_mapping(
        {
            "trainer.seed": 3,
            "trainer.run_name": "seed${trainer.seed}",
            "data.train_data": ["~/a.parquet", "b/${trainer.run_name}.parquet"],
        }
    )
    assert config.data.train_data == ("/somewhere/a.parquet", "b/seed3.parquet")
    assert config.run_dir == Path("runs/seed3")
    keys = {"trainer.ckpt_path": "${trainer.run_dir}/kept", "data.val_data": "${trainer.export_path}.jsonl"}
    config = from_mapping({**keys, "trainer.run_name": "${generator.inference_engine.model_dtype}"})
    assert (config.ckpt_dir, config.data.val_data) == (Path("runs/bfloat16/kept"), ("runs/bfloat16/model.jsonl",))
    with pytest.raises(ConfigError, match=r"trainer\.run_name: \$\{trainer\.sede\} .* is not a key"):
        from_mapping({"trainer.run_name": "${trainer.sede}"})
    with pytest.raises(ConfigError, match=r"has the value .*; expected plain text or a number"):
        from_mapping({"trainer.run_name": "${trainer.run_dir}"})


def test_the_written_file_is_complete_and_loads_to_the_same_configuration(tmp_path: Path):
    config = from_mapping(
        {
            "trainer.run_name": "1e3",
            "trainer.tags": ["yes", "2026-01-01", "010"],
            "trainer.policy.optimizer_config.lr": 1e-6,
            "trainer.policy.fsdp_config.cpu_offload": True,
            "environment.options": {"text": "é: {}", "none": None, "list": [1, 2.5, {"a": True}]},
            "generator.sampling_params.stop": ["\n", "</s>"],
        }
    )
    assert reloaded(config, tmp_path) == config
    written = yaml.safe_load(dump_yaml(config))
    assert {key for key, _ in leaves(written)} >= {key for key in known_paths(Config) if not _is_section(key)} - {
        "environment.options"
    }


def test_changing_a_key_of_the_written_file_updates_the_values_derived_from_it(tmp_path: Path):
    config = from_mapping({"trainer.run_name": "first", "trainer.export_path": "kept"})
    moved = reloaded(config, tmp_path, "trainer.run_dir=second", "generator.sampling_params.temperature=0.5")
    assert (str(moved.ckpt_dir), str(moved.export_dir), moved.temperature) == ("second/checkpoints", "kept", 0.5)


def test_a_value_that_no_file_can_hold_is_refused():
    with pytest.raises(ConfigError, match="cannot be written"):
        dump_yaml(from_mapping({"environment.options": {"value": object()}}))


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=["C"])),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc_", min_size=1), inner, min_size=1, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(value=_VALUES)
def test_values_without_control_characters_are_written_and_read_unchanged(value: object):
    read = yaml.load(yaml.dump(value, Dumper=Yaml12Dumper, allow_unicode=True), Loader=Yaml12Loader)
    assert read == value
    assert type(read) is type(value)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**9),
    lr=st.floats(0, 1),
    name=st.text(st.characters(codec="ascii", exclude_characters="${}~/\x00", exclude_categories=["C"]), min_size=1),
    steps=st.none() | st.integers(1, 99),
    temperature=st.floats(0.1, 2),
)
def test_a_configuration_with_any_values_of_five_keys_is_written_and_read_unchanged(
    tmp_path_factory: pytest.TempPathFactory, seed: int, lr: float, name: str, steps: int | None, temperature: float
):
    config = Config()
    for key, value in {
        "trainer.seed": seed,
        "trainer.policy.optimizer_config.lr": lr,
        "trainer.run_name": name,
        "trainer.max_training_steps": steps,
        "generator.sampling_params.temperature": temperature,
    }.items():
        config = with_value(config, key, value)
    config = resolve(config)
    assert reloaded(config, tmp_path_factory.mktemp("run")) == config


def _is_section(key: str) -> bool:
    return attrs.has(type(value_at(Config(), key)))


def test_a_backends_section_is_written_under_its_own_name():
    assert as_mapping(from_mapping({}))["trainer"]["ref"]["fsdp_config"]["cpu_offload"] is False
