"""A command line that runs in the test's own process, and a configuration with the tests' own plug-ins."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_core import plugins
from rl_core.cli import commands, main
from tests.core.fake_plugins import install, install_backend
from tests.core.own_functions import FUNCTIONS

Run = Callable[..., tuple[int, str, str]]


RECIPES = """
from pathlib import Path
from typing import Any
from rl_core.interfaces import Recipe
from rl_core.interfaces import Callback

BASE = {
    "trainer.strategy": "slim",
    "trainer.policy.model.path": "model",
    "trainer.train_batch_size": 4,
    "trainer.policy_mini_batch_size": 2,
    "trainer.epochs": 4,
    "data.train_data": ["train.jsonl"],
    "data.val_data": ["train.jsonl"],
    "trainer.logger": "tests.core.idle_plugins:Tracker",
    "trainer.algorithm.policy_loss_type": "cli_recipes:loss",
    "trainer.algorithm.advantage_estimator": "cli_recipes:advantages",
    "generator.type": "tests.core.idle_plugins:generator",
    "generator.inference_engine.backend": "tests.core.idle_plugins:engine",
    "generator.inference_engine.weight_sync_backend": "tests.core.idle_plugins:transport",
}


def prepare(config):
    Path("prepared").touch()
    Path("model").mkdir(exist_ok=True)
    for file in ("config.json", "tokenizer.json"):
        (Path("model") / file).write_text("{}")
    Path("train.jsonl").write_text('{"prompt": "1+1="}\\n' * 3)


small = Recipe(summary="a recipe of a test", config=BASE, prepare="cli_recipes:prepare", makes=("model", "train.jsonl"))
unprepared = Recipe(summary="another", config=BASE)
prepared_by_a_number = Recipe(summary="a fourth", config=BASE, prepare="math:pi", makes=("model", "train.jsonl"))
prepared_by_nothing = Recipe(
    summary="a fifth", config=BASE, prepare="cli_recipes:nothing", makes=("model", "train.jsonl")
)
with_unread_key = Recipe(
    summary="a third",
    config={**BASE, "trainer.algorithm.clip_ratio_c": 5.0},
    prepare="cli_recipes:prepare",
    makes=("model", "train.jsonl"),
)


def loss(logprobs_T, mask_T):
    from rl_core.algorithms import TokenLoss

    return TokenLoss(-logprobs_T, {})


def advantages(scores_N, group_N):
    return scores_N


class WantsArguments(Callback):
    def __init__(self, folder):
        pass
"""


@pytest.fixture
def rl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs a command line in this process, in a temporary folder; returns exit code, stdout and stderr."""
    site = tmp_path / "site"
    site.mkdir()
    install(site, monkeypatch, "cli_recipes", RECIPES, recipes__small="cli_recipes:small")
    install_backend(site, monkeypatch, "slim")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RL_DEBUG", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        output = capfd.readouterr()
        return int(ended.value.code or 0), output.out, output.err

    yield run
    plugins._installed.cache_clear()
    commands._installed.cache_clear()
    sys.modules.pop("cli_recipes", None)


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A configuration whose plug-ins, except the backend, are from `own_functions` or `idle_plugins`."""
    install(tmp_path, monkeypatch, "own_functions", FUNCTIONS)
    yield {
        "trainer.policy.model.path": "model",
        "trainer.algorithm.policy_loss_type": "own_functions:loss",
        "trainer.algorithm.advantage_estimator": "own_functions:advantages",
        "trainer.logger": "tests.core.idle_plugins:Tracker",
        "generator.type": "tests.core.idle_plugins:generator",
        "generator.inference_engine.backend": "tests.core.idle_plugins:fussy_engine",
        "generator.inference_engine.weight_sync_backend": "tests.core.idle_plugins:transport",
    }
    plugins._installed.cache_clear()
