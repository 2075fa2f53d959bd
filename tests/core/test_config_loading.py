"""Exact loading: which values are accepted, and the messages for those that are refused."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_core import plugins
from rl_core.config import Config, ConfigWarning, from_mapping, load, resolving
from rl_core.config.loading import known_paths
from rl_core.config.resolving import as_mapping
from rl_core.errors import ConfigError, ConfigErrors, PluginError
from tests.core.fake_plugins import install, install_backend


@pytest.fixture(autouse=True)
def forget_installed() -> Iterator[None]:
    yield
    plugins._installed.cache_clear()


def test_loading_a_configuration_does_not_import_torch():
    program = (
        "import sys, rl_core.config as c\n"
        "c.check_values(c.from_mapping({'trainer.seed': 3}, ['trainer.epochs=2']))\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules, 'imported'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_keys_that_are_not_given_have_their_defaults():
    config = from_mapping({})
    assert config.trainer.train_batch_size == 1024
    assert config.trainer.policy.optimizer_config.adam_betas == (0.9, 0.999)
    assert config.trainer.logger == ("console",)
    assert not config.trainer.algorithm.use_kl_loss


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("trainer.epochs=3", "epochs", 3),
        ("trainer.bf16=false", "bf16", False),
        ("trainer.generation_timeout_s=60", "generation_timeout_s", 60.0),
        ("trainer.generation_timeout_s=6e1", "generation_timeout_s", 60.0),
        ("trainer.max_training_steps=null", "max_training_steps", None),
        ("trainer.logger=jsonl", "logger", ("jsonl",)),
        ("trainer.logger=[console, jsonl]", "logger", ("console", "jsonl")),
        ("trainer.tags=[a, 'b c']", "tags", ("a", "b c")),
        ("trainer.run_name=007", "run_name", "007"),
        ("trainer.run_name=1e3", "run_name", "1e3"),
        ("trainer.run_name=true", "run_name", "true"),
        ("trainer.run_name=2026-01-01", "run_name", "2026-01-01"),
        ("trainer.run_name='a: b'", "run_name", "a: b"),
        ("trainer.run_name=a=b", "run_name", "a=b"),
        ("trainer.run_name=a#1", "run_name", "a#1"),
        ("trainer.run_name='a #1'", "run_name", "a #1"),
        ("trainer.tags=####", "tags", ("####",)),
        ("trainer.resume_mode=none", "resume_mode", "none"),
    ],
)
def test_an_override_is_read_with_the_type_of_its_key(override: str, key: str, value: object):
    loaded = getattr(from_mapping({}, [override]).trainer, key)
    assert loaded == value
    assert type(loaded) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.epochs=x", r"^trainer\.epochs: got 'x' \(str, command line\); expected int\.$"),
        ("trainer.epochs=1.0", r"trainer\.epochs: got 1\.0 \(float, "),
        ("trainer.epochs=true", r"trainer\.epochs: got True \(bool, "),
        ("trainer.epochs=null", r"trainer\.epochs: got null"),
        ("trainer.bf16=1", r"trainer\.bf16: got 1 \(int, .* expected true \| false"),
        ("trainer.bf16=yes", r"trainer\.bf16: got 'yes'"),
        ("trainer.generation_timeout_s=.nan", r"trainer\.generation_timeout_s: got nan .* expected a finite number"),
        ("trainer.policy.optimizer_config.adam_betas=[0.9]", r"expected list of 2 float"),
        ("trainer.tags=[1]", r"trainer\.tags: got \[1\] \(list, .* expected list of text"),
        ("trainer.resume_mode=lates", r"expected none \| latest \| from_path\. Did you mean 'latest'\?"),
        ("trainer.policy=3", r"trainer\.policy: got 3 \(int, .* expected a section"),
        ("trainer.epochs.more=1", r"trainer\.epochs\.more: trainer\.epochs is a single value \(int\)"),
        ("environment.options=[1]", r"environment\.options: got \[1\] .* expected a section"),
        ("trainer.run_name=[a", r"trainer\.run_name: '\[a' is not valid YAML .* put text in quotes"),
        ("trainer.run_name=a #1", r"^trainer\.run_name: '#1' would be a comment; put text in quotes: "),
        ("trainer.tags=[a] # b", r"^trainer\.tags: '# b' would be a comment"),
        ("environment.options={a: 1} # b", r"'# b' would be a comment"),
        ("trainer.run_name=a\x01", r"not valid YAML .*special characters are not allowed"),
        (f"trainer.seed={'9' * 5000}", r"not valid YAML .*limit"),
        ("trainer.run_name=!!float abc", r"not valid YAML .*not a value of the type float"),
        ("trainer.run_name=!!bool abc", r"not valid YAML .*not a value of the type bool"),
        ("trainer.run_name=!!timestamp abc", r"not valid YAML .*not a value of the type timestamp"),
        (f"trainer.generation_timeout_s={'9' * 400}", r"trainer\.generation_timeout_s: got 999.* expected float"),
        ("+trainer.epochs=2", r"without a prefix"),
        ("trainer.epochs", r"an override is key\.path=value"),
        ("=3", r"an override is key\.path=value"),
    ],
)
def test_a_wrong_override_is_an_error_with_the_reason(override: str, message: str):
    with pytest.raises(ConfigError, match=message):
        from_mapping({}, [override])


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("trainer.epoch=1", r"^trainer\.epoch: unknown key \(command line\)\. Did you mean trainer\.epochs\?$"),
        ("trainer.n_samples_per_prompt=2", r"Did you mean generator\.n_samples_per_prompt\?"),
        ("n_samples_per_prompt=2", r"Did you mean generator\.n_samples_per_prompt\?"),
        ("trainer.policy.optimiser_config.lr=1", r"Did you mean trainer\.policy\.optimizer_config\?"),
        (
            "data.zzz=1",
            r"data has train_data, val_data, prompt_key, [a-z_, ]+, shuffle, on_refused_row, on_long_prompt\.",
        ),
        (
            "trainer.zzz=1",
            r"^trainer\.zzz: unknown key \(command line\)\. trainer has \d+ keys; rl config RECIPE lists them",
        ),
        ("TRAINER.seed=1", r"TRAINER: unknown key .*Did you mean trainer\?"),
        ("trainer.Epochs=1", r"Did you mean trainer\.epochs\?"),
        ("trainer.algorithm.loss_reduction=TOKEN_MEAN", r"Did you mean 'token_mean'\?"),
        ("trainer.policy.backend_sections={a: 1}", r"unknown key"),
        ("trainer.policy.foo_config.a=1", r"trainer\.policy\.foo_config: unknown key"),
    ],
)
def test_an_unknown_key_is_refused_with_a_suggestion_if_there_is_one(override: str, remedy: str):
    with pytest.raises(ConfigError, match=remedy):
        from_mapping({}, [override])


def test_an_error_in_a_file_names_the_line(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("trainer:\n  seed: 1\n  epochs: many\n")
    with pytest.raises(ConfigError, match=rf"trainer\.epochs: got 'many' \(str, {file}:3\)"):
        load(str(file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "not valid YAML"),
        ("a: \x01", "not valid YAML"),
        ("a: &a\n  b: *a", "not valid YAML"),
        ("- a\n", "holds `key: value` lines"),
        ("[a]: 1\n", "a key must be text"),
        ("\xff", "cannot be read"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, message: str):
    file = tmp_path / "run.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=message):
        load(str(file))


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"missing\.yaml: cannot be read"):
        load(str(tmp_path / "missing.yaml"))


def test_keys_and_values_in_the_section_of_an_installed_backend_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    install_backend(tmp_path, monkeypatch, "slim")
    config = from_mapping({"trainer.policy.slim_config.width": 3, "trainer.ref.slim_config.nested.dtype": "fp32"})
    assert config.trainer.policy.options("slim_config").width == 3
    assert config.trainer.ref.options("slim_config").nested.dtype == "fp32"
    with pytest.raises(ConfigError, match=r"trainer\.policy\.slim_config\.widht: unknown key .*slim_config\.width\?"):
        from_mapping({"trainer.policy.slim_config.widht": 3})
    with pytest.raises(ConfigError, match=r"trainer\.policy\.slim_config\.width: got 'a' \(str, "):
        from_mapping({"trainer.policy.slim_config.width": "a"})
    with pytest.raises(ConfigError, match=r"trainer\.policy\.slim_config: width must be at least 1, not 0"):
        from_mapping({"trainer.policy.slim_config.width": 0})


def test_the_section_of_the_selected_backend_has_its_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install_backend(tmp_path, monkeypatch, "slim")
    config = from_mapping({"trainer.strategy": "slim"})
    assert config.trainer.policy.options("slim_config").width == 1
    assert config.trainer.ref.options("slim_config").width == 1
    with pytest.raises(ConfigError, match="not in this configuration"):
        config.trainer.policy.options("fsdp_config")


@pytest.fixture
def without_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides rl-megatron, as if it were not installed."""
    backends = plugins.installed("rl_core.backends")
    others = tuple(plugin for plugin in backends if plugin.name != "megatron")
    assert len(others) < len(backends)
    monkeypatch.setattr(plugins, "installed", lambda group: others)


@pytest.mark.usefixtures("without_megatron")
def test_the_section_of_a_known_backend_that_is_not_installed_is_kept_with_a_warning():
    with pytest.warns(ConfigWarning, match="megatron_config: kept unchecked; its backend comes with rl-megatron"):
        config = from_mapping({"trainer.policy.megatron_config.tensor_model_parallel_size": 2})
    assert config.trainer.policy.options("megatron_config") == {"tensor_model_parallel_size": 2}


def test_a_broken_backend_is_an_error_if_selected_and_is_named_in_warnings_about_unknown_sections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    install(tmp_path, monkeypatch, "rl_broken", "import no_such_module", backends__broken="rl_broken:backend")
    from_mapping({"trainer.policy.fsdp_config.cpu_offload": True})
    monkeypatch.setitem(resolving._SECTION_PACKAGES, "absent_config", "rl-absent")
    with pytest.warns(ConfigWarning) as caught:
        from_mapping({"trainer.policy.absent_config.a": 2})
    assert "no_such_module" in str(caught[0].message)
    with pytest.raises(PluginError, match="no_such_module"):
        from_mapping({"trainer.strategy": "broken"})


def test_the_error_for_an_unknown_backend_names_the_nearest():
    with pytest.raises(PluginError, match=r"trainer\.strategy: 'fspd' is not among .* Did you mean 'fsdp'\?"):
        from_mapping({"trainer.strategy": "fspd"})


def test_every_default_loads_unchanged():
    assert from_mapping(as_mapping(Config())) == from_mapping({})


def test_key_paths_are_unique_and_name_sections_and_keys():
    paths = known_paths(Config)
    assert len(set(paths)) == len(paths)
    assert {"trainer", "trainer.policy.model.path", "trainer.policy.model.lora.rank", "data.train_data"} <= set(paths)


MANY = {
    "two unknown keys in one section": (
        ["trainer.sead=1", "trainer.epoch=2"],
        ["trainer.sead: unknown key", "trainer.epoch: unknown key"],
    ),
    "an unknown section, and a number instead of a section": (
        ["zzz.a=1", "data=3"],
        ["zzz: unknown key", "data: got 3 (int, "],
    ),
    "wrong types in lists": (
        ["trainer.tags=[1]", "trainer.policy.optimizer_config.adam_betas=[0.9]"],
        ["trainer.tags: got [1] (list", "trainer.policy.optimizer_config.adam_betas: got [0.9] (list"],
    ),
    "keys below a single value": (
        ["trainer.epochs={a: 1, b: 2}"],
        ["trainer.epochs.a: trainer.epochs is a single value", "trainer.epochs.b: trainer.epochs is a single value"],
    ),
    "words that are no overrides": (
        ["+trainer.seed=2", "trainer.epochs", "trainer.sead=1"],
        ["'+trainer.seed=2': ", "'trainer.epochs': an override is", "trainer.sead: unknown key"],
    ),
    "keys from elsewhere": (
        ["trainer.learning_rate=1", "trainer.ppo_epochs=2"],
        ["trainer.learning_rate: is not a key here", "trainer.ppo_epochs: is not a key here"],
    ),
    "an unknown key in the section of an installed backend, and a backend that is not installed": (
        ["trainer.policy.fsdp_config.x=1", "trainer.strategy=fspd"],
        ["trainer.policy.fsdp_config.x: unknown key", "trainer.strategy: 'fspd' is not among"],
    ),
    "a section that may belong to a backend that is not installed": (
        ["trainer.policy.mine_config.x=1", "trainer.strategy=mine", "trainer.sead=1"],
        ["trainer.sead: unknown key", "trainer.strategy: 'mine' is not among"],
    ),
    "keys of an engine whose name is wrong": (
        ["generator.inference_engine.backend=[a]", "generator.inference_engine.zzz=1", "generator.zzz=1"],
        ["generator.inference_engine.backend: got ['a'] (list", "generator.zzz: unknown key"],
    ),
    "several values that an engine's options refuse": (
        [
            *("generator.inference_engine.backend=vllm", "generator.inference_engine.tensor_parallel_size=0"),
            *("generator.inference_engine.max_num_batched_tokens=0", "generator.inference_engine.zzz=1"),
        ],
        [
            "generator.inference_engine.tensor_parallel_size: got 0",
            "generator.inference_engine.max_num_batched_tokens: got 0",
            "generator.inference_engine.zzz: unknown key",
        ],
    ),
    "wrong names of plug-ins, also in lists, and values out of bounds": (
        [
            *("trainer.sead=1", "generator.type=mine", "trainer.logger=[console, a, b]", "trainer.seed=-1"),
            *("trainer.algorithm.policy_loss_type=no_module:loss",),
        ],
        [
            "trainer.sead: unknown key",
            "generator.type: 'mine' is not among",
            "trainer.logger: 'a' is not among",
            "trainer.logger: 'b' is not among",
            "trainer.seed: got -1",
        ],
    ),
    "references to other keys": (
        ["trainer.run_name='${nope}'", "trainer.run_dir='x/${trainer.run_name}'", "trainer.resume_path='${also}'"],
        ["trainer.run_name: ${nope}", "trainer.resume_path: ${also}"],
    ),
    "a list instead of a backend's name": (
        ["trainer.strategy=[fsdp]", "trainer.sead=1"],
        ["trainer.strategy: got ['fsdp']; expected a backend's name", "trainer.sead: unknown key"],
    ),
}
"""Kind of mistakes → overrides, and the beginning of each expected error; no other errors are reported."""


@pytest.mark.parametrize(("overrides", "beginnings"), MANY.values(), ids=MANY)
def test_mistakes_that_do_not_follow_from_each_other_are_one_error(overrides: list[str], beginnings: list[str]):
    with pytest.raises(ConfigErrors) as raised:
        from_mapping({}, overrides)
    found = [str(error) for error in raised.value.errors]
    assert [text[: len(beginning)] for text, beginning in zip(found, beginnings, strict=True)] == beginnings
    lines = [f"  {number}. {text}" for number, text in enumerate(found, start=1)]
    assert str(raised.value).splitlines() == [f"{len(found)} mistakes:", *lines]


def test_every_mistake_of_a_file_and_of_the_overrides_on_it_is_reported(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("trainer:\n  sead: 1\n  epochs: many\n[a]: 1\ndata: {shuffle: 3}\n")
    with pytest.raises(ConfigErrors) as raised:
        load(str(file), ["trainer.strategy=fspd", "trainer.bf16=maybe"])
    assert [str(error).partition(":")[0] for error in raised.value.errors[1:]] == [
        "trainer.sead",
        "trainer.epochs",
        "trainer.bf16",
        "data.shuffle",
        "trainer.strategy",
    ]
    assert str(raised.value.errors[0]).startswith(f"{file}:4: a key must be text")
    assert f", {file}:3)" in str(raised.value)


def test_an_unknown_recipe_is_the_only_error_reported():
    with pytest.raises(PluginError, match="'nope' is not among the installed recipes"):
        load("nope", ["trainer.sead=1", "trainer.epochs=lots"])


def test_a_single_mistake_is_raised_as_its_own_error():
    with pytest.raises(ConfigError, match=r"^trainer\.sead: unknown key") as raised:
        from_mapping({}, ["trainer.sead=1"])
    assert type(raised.value) is ConfigError


def test_several_mistakes_can_be_pickled():
    with pytest.raises(ConfigErrors) as raised:
        from_mapping({"trainer.sead": 1, "trainer.strategy": "fspd"})
    copy = pickle.loads(pickle.dumps(raised.value))
    assert str(copy) == str(raised.value)
    assert [type(error) for error in copy.errors] == [ConfigError, PluginError]
