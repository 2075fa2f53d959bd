"""Layers of configuration: which value wins, where it came from, and the warning for a key that is set twice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_core import plugins
from rl_core.config import ConfigWarning, from_mapping, load
from rl_core.config.sources import origins
from rl_core.errors import ConfigError, PluginError
from tests.core.fake_plugins import install

RECIPE = """
from rl_core.interfaces import Recipe

recipe = Recipe(
    summary="a recipe of a test",
    config={"trainer.epochs": 2, "trainer.seed": 1, "environment.options": {"digits": 2, "base": 10}},
    tiny={"trainer.epochs": 1},
)

def make_recipe():
    return recipe

def make_none():
    pass

bare = Recipe(summary="without a tiny variant", config={})
number = 3
"""


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install(tmp_path, monkeypatch, "layered_recipes", RECIPE, recipes__layered="layered_recipes:recipe")
    yield
    plugins._installed.cache_clear()


def test_later_layers_win_key_by_key():
    loaded = load("layered", ["trainer.seed=5", "environment.options.digits=3"], tiny=True)
    assert (loaded.config.trainer.epochs, loaded.config.trainer.seed) == (1, 5)
    assert loaded.config.environment.options == {"digits": 3, "base": 10}


def test_every_value_says_where_it_comes_from():
    loaded = load("layered", ["trainer.seed=5", "environment.options.digits=3"], tiny=True)
    sources = {origin.key: origin.source for origin in origins(loaded)}
    assert sources["trainer.seed"] == "command line"
    assert sources["trainer.epochs"] == "recipe layered --tiny"
    assert sources["environment.options.base"] == "recipe layered"
    assert sources["environment.options.digits"] == "command line"
    assert sources["trainer.bf16"] == "default"
    assert sources["trainer.ckpt_path"] == "derived: <trainer.run_dir>/checkpoints"
    assert sources["trainer.policy.fsdp_config.cpu_offload"] == "default"


def test_values_of_a_file_have_their_line_and_may_be_nested_or_dotted(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("trainer:\n  seed: 1\n\ntrainer.epochs: 4\ngenerator: {n_samples_per_prompt: 2}\n")
    loaded = load(str(file))
    assert (loaded.config.trainer.seed, loaded.config.trainer.epochs, loaded.config.generator.n_samples_per_prompt) == (
        1,
        4,
        2,
    )
    sources = {origin.key: origin.source for origin in origins(loaded)}
    assert sources["trainer.epochs"] == f"{file}:4"
    assert sources["generator.n_samples_per_prompt"] == f"{file}:5"


def test_a_key_set_twice_on_the_command_line_warns_and_the_last_value_is_used():
    with pytest.warns(ConfigWarning, match=r"trainer\.seed: set twice \(command line\): 3, then 4"):
        config = from_mapping({}, ["trainer.seed=3", "trainer.epochs=2", "trainer.seed=4"])
    assert (config.trainer.seed, config.trainer.epochs) == (4, 2)


def test_a_key_set_twice_in_a_file_warns_with_both_lines_whether_nested_or_dotted(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("trainer:\n  seed: 1\n  epochs: 2\ntrainer.seed: 7\n")
    with pytest.warns(ConfigWarning, match=rf"trainer\.seed: set twice \({file}:2 and {file}:4\): 1, then 7"):
        assert load(str(file)).config.trainer.seed == 7
    file.write_text("trainer:\n  seed: 1\n  seed: 2\n")
    with pytest.warns(ConfigWarning, match=rf"set twice \({file}:2 and {file}:3\)"):
        assert load(str(file)).config.trainer.seed == 2


def test_two_spellings_of_a_key_are_one_key():
    with pytest.warns(ConfigWarning, match=r"trainer\.use_sample_packing: set twice"):
        config = from_mapping({}, ["trainer.use_sample_packing=true", "trainer.remove_microbatch_padding=false"])
    assert config.trainer.use_sample_packing is False


def test_overriding_a_key_of_a_file_causes_no_warning(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("trainer.seed: 1\n")
    assert load(str(file), ["trainer.seed=2"]).config.trainer.seed == 2


def test_an_empty_section_clears_what_earlier_layers_set():
    assert load("layered", ["environment.options={}"]).config.environment.options == {}
    assert load("layered", ["environment.options=null"]).config.environment.options == {}
    assert load("layered", ["trainer=null"]).config.trainer.epochs == 1
    assert load("layered", ["environment.options={}", "environment.options.new=1"]).config.environment.options == {
        "new": 1
    }


def test_yaml_is_read_by_the_rules_of_its_version_1_2(tmp_path: Path):
    file = tmp_path / "run.yaml"
    words = ["small: 1e-6", "date: 2026-01-01", "word: yes", "time: 12:30", "ten: 010", "big: 1e3", "none: ~"]
    file.write_text("environment.options: {" + ", ".join(words) + "}\n")
    assert load(str(file)).config.environment.options == {
        "small": 1e-6,
        "date": "2026-01-01",
        "word": "yes",
        "time": "12:30",
        "ten": 10,
        "big": 1000.0,
        "none": None,
    }


def test_a_recipe_may_be_a_function_or_an_object_at_an_import_path():
    assert load("layered_recipes:make_recipe").config.trainer.epochs == 2
    assert load("layered_recipes:recipe").recipe is not None


def test_missing_recipes_wrong_objects_and_missing_tiny_variants_are_refused():
    with pytest.raises(PluginError, match=r"'layerd' is not among the installed recipes .* Did you mean 'layered'\?"):
        load("layerd")
    with pytest.raises(PluginError, match=r"is not a recipe: it is an object of type int\. Expected a"):
        load("layered_recipes:number")
    with pytest.raises(ConfigError, match="make_none: the function returned NoneType; expected a Recipe"):
        load("layered_recipes:make_none")
    with pytest.raises(ConfigError, match=r"--tiny: the recipe .* has no tiny variant"):
        load("layered_recipes:bare", tiny=True)
    with pytest.raises(ConfigError, match="only a recipe has a tiny variant"):
        load("run.yaml", tiny=True)


def test_the_error_for_a_launch_script_names_the_command_that_translates_it(tmp_path: Path):
    script = tmp_path / "run.sh"
    script.touch()
    with pytest.raises(
        ConfigError, match=rf"does not end in \.yaml; rl import-config {re.escape(str(script))} --output"
    ):
        load(str(script))


def test_a_colon_without_a_space_does_not_make_a_key():
    message = r"generator\.chat_template_kwargs: 'thinking:false' is a key without a value; write \{thinking: false\}"
    with pytest.raises(ConfigError, match=message):
        from_mapping({}, ["generator.chat_template_kwargs={thinking:false}"])
    options = from_mapping({}, ["environment.options={'a:b': 1, c: , d:e: ''}"]).environment.options
    assert options == {"a:b": 1, "c": None, "d:e": ""}


def test_a_key_that_is_not_text_is_refused():
    with pytest.raises(ConfigError, match=r"environment\.options: a key must be text, not 1"):
        from_mapping({"environment": {"options": {1: 2}}})


def test_a_functions_own_default_is_shown_as_the_value_of_its_key(tmp_path: Path):
    key = "trainer.algorithm"
    given = {f"{key}.policy_loss_type": "gspo", f"{key}.eps_clip_high": 0.1, "trainer.policy.model.path": "m"}
    path = tmp_path / "run.yaml"

    def shown(**more: Any) -> dict[str, tuple[Any, str]]:
        path.write_text(yaml.safe_dump(given | more))
        found = origins(load(str(path)))
        return {origin.key.removeprefix(f"{key}."): (origin.value, origin.source) for origin in found}

    values = shown()
    assert values["eps_clip_low"] == (3e-4, "default of the loss gspo")
    assert values["eps_clip_high"][0] == 0.1
    assert values["eps_clip_high"][1].startswith(f"{path}:")
    assert values["grpo_norm_by_std"] == (True, "default of the estimator grpo")
    assert values["clip_ratio_c"] == (None, "default; neither loss nor estimator reads it")
    values = shown(**{f"{key}.policy_loss_params": {"eps_clip_low": 0.01}})
    assert values["eps_clip_low"] == (0.01, f"{key}.policy_loss_params")
    assert shown(**{f"{key}.policy_loss_type": "mine"})["eps_clip_low"][0] is None


def test_a_plug_in_name_of_two_packages_is_refused_but_an_import_path_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    group, source = "rl_core.environments", "from tests.core.idle_plugins import Environment"
    for module in ("twin_a", "twin_b"):
        install(tmp_path, monkeypatch, module, source, environments__twin=f"{module}:Environment")
    install(tmp_path, monkeypatch, "twin_c", "", environments__own="twin_c:absent")
    install(tmp_path, monkeypatch, "twin_d", "", environments__own="twin_c:absent")
    message = r"^environment\.env_class: 'twin' is provided by twin-. 1\.0 \(twin_.:Environment\) and twin-. 1\.0 \("
    with pytest.raises(PluginError, match=message):
        plugins.load(group, "twin", key="environment.env_class")
    assert plugins.load(group, "twin_a:Environment") is plugins.load(group, "twin_b:Environment")
    assert sorted(one.distribution for one in plugins.installed(group) if one.name == "twin") == [
        "twin-a 1.0",
        "twin-b 1.0",
    ]
    # Both packages name one object, which does not exist.
    with pytest.raises(PluginError, match=r"'own' \(twin_c:absent\) could not be imported"):
        plugins.load(group, "own")


@pytest.mark.parametrize("name", ["program", "program:Callback"])
def test_a_module_that_ends_the_program_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    install(tmp_path, monkeypatch, "program", "import sys\nsys.exit(0)\n", callbacks__program="program:Callback")
    message = r"trainer\.callbacks: .*program.*: SystemExit: 0 \(program\.py:2\); the module is a program: put what"
    with pytest.raises(PluginError, match=message):
        plugins.load("rl_core.callbacks", name, key="trainer.callbacks")
