"""Every `rl` command in the documents is accepted; the index of the pages and several lists are complete."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import get_args

import click
import pytest

from rl_core import plugins
from rl_core.cli.app import rl
from rl_core.config import load
from rl_core.config.loading import hints, own_keys
from rl_core.config.tree import AlgorithmConfig, OffPolicyCorrectionConfig, Reduction
from rl_core.errors import ConfigError
from tests.learn.test_learning import CASES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def commands() -> dict[str, list[str]]:
    """Page and command line → its words after `rl`, for every `rl` command in the shell blocks of the documents."""
    found = {}
    for page in (*sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("packages/*/README.md"))):
        for block in re.findall(r"```(?:sh|bash)\n(.*?)```", page.read_text(), flags=re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words and words[0].rpartition("/")[2] == "rl":
                    found[f"{page.relative_to(ROOT)}: {' '.join(words)}"] = [word for word in words[1:] if word != "…"]
    return found


COMMANDS = commands()
NAMES_OF_A_USER = {"my_recipe": "quickstart", "my_package:Env": "guess"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_rl_command_in_the_documents_is_accepted(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
):
    """Checks the subcommand, its options and every key; the quick start replaces configuration files. Nothing runs."""
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    for name in ("run.sh", "rows.parquet", "rows.jsonl"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    name, *words = [NAMES_OF_A_USER.get(word, word) for word in COMMANDS[command]]
    with click.Context(rl) as root:
        subcommand = rl.get_command(root, name)
        assert subcommand is not None, f"rl {name} does not exist"
        options = subcommand.make_context(name, words, parent=root).params
    if "source" in options and "plain_ddp" not in command:  # plain_ddp is installed for its own tests only
        source = "quickstart" if options["source"].endswith(".yaml") else options["source"]
        load(source, options["overrides"])


def test_a_wrong_key_of_a_command_would_be_found():
    with pytest.raises(ConfigError, match="unknown key"):
        load("quickstart", ["trainer.no_such_key=1"])


def test_every_page_is_in_the_index():
    index = (DOCS / "README.md").read_text()
    assert [page.name for page in DOCS.glob("*.md") if f"({page.name}" not in index and page.name != "README.md"] == []


def test_every_test_file_benchmark_and_learning_case_that_the_bounds_page_names_exists():
    page = (DOCS / "bounds.md").read_text()
    paths = set(re.findall(r"(?:tests|benchmarks)/[a-z_0-9/]+(?:\.py)?", page))
    assert len(paths) > 40
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
    cases = {case.name for case in CASES} | {"distill"}  # has a test of its own
    named = [
        case for cell in re.findall(r"\| (`make learn [^|]*)\|", page) for case in re.findall(r"[a-z]+_?\w*(?=`)", cell)
    ]
    assert len(named) > 10
    assert [case for case in named if case not in cases] == []


def test_every_algorithm_is_listed_under_the_name_that_its_key_takes():
    page = (DOCS / "algorithms.md").read_text()
    for group in ("rl_core.advantage_estimators", "rl_core.policy_losses"):
        for plugin in plugins.installed(group):
            if plugin.distribution.startswith("rl-core "):
                assert re.search(rf"^\| .*`{re.escape(plugin.name)}`", page, flags=re.MULTILINE), plugin.name
    for name in (*get_args(Reduction), *get_args(hints(AlgorithmConfig)["kl_estimator_type"])):
        assert f"`{name}`" in page, name
    for key in own_keys(OffPolicyCorrectionConfig):
        assert key.replace("_high", "") in page or key in page, key


def test_the_recipes_with_a_tiny_variant_are_listed():
    page = (ROOT / "packages/rl-examples/README.md").read_text()
    sentence = re.search(r"The following recipes have a tiny variant.*?: (.*?)\.\n", page, flags=re.DOTALL)
    assert sentence is not None
    recipes = [plugin.name for plugin in plugins.installed("rl_core.recipes")]
    tiny = {name for name in recipes if plugins.load("rl_core.recipes", name).tiny is not None}
    assert set(re.findall(r"`(\w+)`", sentence[1])) == tiny


def test_the_readme_names_what_rl_core_depends_on():
    project = tomllib.loads((ROOT / "packages/rl-core/pyproject.toml").read_text())["project"]
    sentence = re.search(r"`rl-core` depends on (.*?)\.", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert sentence is not None
    assert [name for each in project["dependencies"] if (name := re.split("[<>=]", each)[0]) not in sentence[1]] == []
