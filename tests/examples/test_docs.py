"""The Python blocks of docs/plugins.md and the calculator of docs/environments.md run as printed and do what the text
says."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from rl_core import plugins
from rl_core.config import engine_spec, from_mapping
from rl_core.errors import ConfigError
from rl_core.interfaces import (
    Action,
    Recipe,
    require_messages,
    require_tools,
)
from rl_core.trainer.update.batch_advantages import load_estimator

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """Runs the Python blocks of docs/plugins.md in order, and returns the names that they define."""
    names: dict[str, Any] = {"__name__": "shown"}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / "plugins.md").read_text(), flags=re.DOTALL):
        exec(compile(block, "docs/plugins.md", "exec"), names)
    return names


async def test_the_environment_plays_an_episode(shown: dict[str, Any]):
    environment = shown["RiddleEnvironment"]({"prompt": "?", "answer": "piano"}, {})
    assert await environment.reset() == "?"
    assert (await environment.step(Action(text="a piano", tokens=(), stop_reason="stop"))).reward == 1.0


def test_the_environment_passes_its_suite(shown: dict[str, Any]):
    suite = shown["TestRiddles"]()
    checks = [name for name in dir(suite) if name.startswith("test_")]
    assert len(checks) >= 5
    for check in checks:
        # A check skips itself if it does not apply to this environment.
        with contextlib.suppress(pytest.skip.Exception):
            getattr(suite, check)()


async def test_the_environment_with_tools_plays_an_episode():
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "environments.md").read_text(), flags=re.DOTALL)
    (block,) = [block for block in blocks if "class Calculator" in block]
    names: dict[str, Any] = {"__name__": "shown"}
    exec(compile(block, "docs/environments.md", "exec"), names)
    environment = names["Calculator"]({"question": "What is 12+30?", "answer": "42"}, {})
    assert environment.offers_tools
    require_messages(await environment.reset(), "a prompt")
    require_tools(await environment.tools())
    result = await environment.step(Action(text="12+30", tokens=(), stop_reason="stop"))
    assert [message["content"] for message in result.observation] == ["42"]
    assert (await environment.step(Action(text="42", tokens=(), stop_reason="stop"))).reward == 1.0


def test_the_estimator_loads_by_its_import_path(shown: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.examples.environments.shown_estimator", shown["best_of_group_advantages"], raising=False)
    path = "tests.examples.environments:shown_estimator"
    estimator = load_estimator(path, {"scale": 2.0})
    assert estimator(torch.tensor([1.0, 0.0]), torch.tensor([3, 3]), scale=2.0).tolist() == [1.0, -1.0]


def test_the_recipe_fulfils_its_contract(shown: dict[str, Any]):
    assert isinstance(shown["recipe"], Recipe)


def test_the_callback_stops_a_solved_run(shown: dict[str, Any]):
    callback = shown["StopWhenSolved"]()
    assert callback.on_step_end(3, {"eval/accuracy": 0.94}) is None
    assert callback.on_step_end(3, {"eval/accuracy": 0.96}).stop


def test_the_engine_has_keys_of_its_own(shown: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.examples.environments.shown_engine", shown["patient"], raising=False)
    section = "generator.inference_engine"
    values = {"trainer.policy.model.path": "model", f"{section}.backend": "tests.examples.environments:shown_engine"}
    plugin, spec = engine_spec(from_mapping({**values, f"{section}.patience": 3}))
    plugins.require_plugin("rl_core.inference", plugin, "patient")
    assert (spec.options.patience, spec.options.log_file) == (3, None)
    plugin.validate(spec)
    with pytest.raises(ConfigError, match=rf"{section}\.patience: got 0; expected at least 1"):
        from_mapping({**values, f"{section}.patience": 0})
    with pytest.raises(ConfigError, match=rf"{section}\.log_file: got /no/such/file; expected it in an existing"):
        plugin.validate(engine_spec(from_mapping({**values, f"{section}.log_file": "/no/such/file"}))[1])


def test_the_command_prints_its_line(shown: dict[str, Any]):
    assert CliRunner().invoke(shown["weigh"], ["runs/x"]).output == "runs/x: heavy\n"
