"""The game of several turns: its rules, and a few steps of training on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rl_core.cli.episodes import show_episodes
from rl_core.config import Config, from_mapping
from rl_core.testing.environments import EnvironmentConformance
from rl_core.trainer.run import run_generation, run_training
from rl_core.trainer.samples import read_samples
from rl_examples.arithmetic import write_rows
from rl_examples.guess import GuessEnvironment, numbers, recipe, write_model


class TestGuessEnvironment(EnvironmentConformance):
    factory = GuessEnvironment
    row: ClassVar[dict[str, Any]] = {"prompt": "?", "number": 3}
    rewards: ClassVar[dict[Any, float]] = {
        "3": 1.0,
        ("5", "2", "3"): 1.0,
        ("9", "8", "7", "3"): 1.0,
        ("9", "8", "7", "6", "3"): 0.0,
        "x": 0.0,
        "33": 0.0,
    }


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("guess")
    write_rows(directory / "numbers.parquet", numbers())
    write_model(directory / "model", seed=0)
    return directory


def config_of(start: Path, run_dir: Path, **overrides: Any) -> Config:
    return from_mapping(
        {
            **recipe.config,
            "data.train_data": [str(start / "numbers.parquet")],
            "data.val_data": [str(start / "numbers.parquet")],
            "trainer.policy.model.path": str(start / "model"),
            "trainer.run_dir": str(run_dir),
            "trainer.max_training_steps": 2,
            "trainer.eval_interval": 2,
            "environment.env_class": "tests.examples.environments:Patient",
            "trainer.log_sample_logprobs": True,
            **{key.replace("__", "."): value for key, value in overrides.items()},
        }
    )


@pytest.mark.parametrize(
    ("overrides", "num_sequences", "is_merged"),
    [
        ({}, 1, False),
        ({"generator__step_wise_trajectories": True}, 1, True),
        ({"generator__step_wise_trajectories": True, "generator__merge_stepwise_output": False}, 4, False),
        ({"trainer__max_staleness": 2}, 1, False),
    ],
    ids=["one sequence", "merged steps", "steps", "asynchronous"],
)
def test_a_run_trains_on_episodes_of_several_turns(
    start: Path, tmp_path: Path, overrides: dict[str, Any], num_sequences: int, is_merged: bool
):
    run_training(config_of(start, tmp_path / "run", **overrides))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for row in rows[1:]:
        assert row["rollout/turns"] == 4.0
        assert row["rollout/logprob_diff_max"] < 1e-4
        assert row["rollout/sampled_tokens"] == pytest.approx(row["rollout/response_length"] * 20 * 16)
        assert (row.get("rollout/merged_tokens", 0.0) > 0.3) == is_merged
    for sample in read_samples(tmp_path / "run"):
        assert sample.turns is not None
        assert len(sample.turns) == 4
        if sample.purpose == "train":
            assert sample.tokens is not None
            assert len(sample.tokens) == num_sequences


def test_generated_episodes_are_shown_turn_by_turn(start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "samples.jsonl"
    assert run_generation(config_of(start, tmp_path / "run"), output) == 160
    show_episodes(output)
    shown = capsys.readouterr().out
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert shown.startswith(f"prompt 0, sample 0: reward {rows[0]['reward']:g}, 4 turns\n  prompt        ?=\n")
    assert shown.count("  policy") == 3 * 4
    assert shown.count("  environment   ") == 3 * 3
