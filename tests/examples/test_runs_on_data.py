"""Runs that train on the rows' own responses: supervised fine-tuning, preference pairs, and a reward model. They start
no engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import rl_rollout.local.plugin
from rl_core.cli.planning import show_plan
from rl_core.cli.runs import describe
from rl_core.config import Config, Loaded
from rl_core.errors import ConfigError, DataError
from rl_core.trainer.run import run_evaluation, run_training
from tests.examples.test_resume import KillInStepAfterCheckpoint, require_same_run, train_in_child
from tests.examples.test_runs import rows_of

BuildConfig = Callable[..., Config]
SUPERVISED: dict[str, Any] = {
    "generator__type": "dataset",
    "generator__response_key": "answer",
    "generator__n_samples_per_prompt": 1,
    "trainer__algorithm__policy_loss_type": "cross_entropy",
}
PAIRS: dict[str, Any] = {
    "generator__type": "dataset",
    "generator__responses": "pair",
    "generator__n_samples_per_prompt": 2,
    "generator__eval_n_samples_per_prompt": 2,
    "trainer__algorithm__policy_loss_type": "dpo",
    "trainer__algorithm__loss_reduction": "prompt_token_sum",
    "trainer__policy_mini_batch_size": 8,
}
ESTIMATED = {"trainer__algorithm__kl_estimator_type": "k1"}
REWARD_MODEL = {**PAIRS, "trainer__algorithm__policy_loss_type": "reward_model", "generator__scored_at_end": True}


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the run if it starts an engine."""

    async def create(self: object, spec: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(rl_rollout.local.plugin.LocalEnginePlugin, "create", create)


@pytest.fixture
def pairs(tmp_path: Path) -> dict[str, Any]:
    """Keys of a run on preference pairs: sums, each with a right and a wrong answer."""
    sums = [(a, b) for a in range(12) for b in range(12)]
    rows = [{"prompt": f"{a:02}+{b:02}=", "chosen": f"{a + b:03}", "rejected": f"{a + b + 1:03}"} for a, b in sums]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"data__train_data": [str(file)], "data__val_data": [str(file)]}


def test_supervised_fine_tuning_lowers_the_held_out_loss(small_run: BuildConfig, tmp_path: Path):
    run_training(small_run(tmp_path / "run", **SUPERVISED, trainer__max_training_steps=12))
    rows = rows_of(tmp_path / "run")
    losses = [row["eval/loss"] for row in rows if "eval/loss" in row]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]
    assert not any(name.startswith(("reward/", "rollout/staleness", "weight_sync/")) for row in rows for name in row)
    assert "Held-out loss" in (tmp_path / "run" / "report.html").read_text()


def test_the_dry_run_and_the_plan_name_no_engine(
    small_run: BuildConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = Loaded(config=small_run(tmp_path / "run", **SUPERVISED), given={})
    assert describe(run) == 0
    show_plan(run)
    printed = capsys.readouterr().out
    assert "engine     none\n" in printed
    assert "engine: none (generator.type=dataset samples nothing)\n" in printed


def test_a_killed_run_resumes_exactly(small_run: BuildConfig, tmp_path: Path):
    expected, run_dir = tmp_path / "expected", tmp_path / "run"
    assert train_in_child(small_run(expected, **SUPERVISED)) == 0
    name = f"{__name__}:{KillInStepAfterCheckpoint.__name__}"
    assert train_in_child(small_run(run_dir, **SUPERVISED, trainer__callbacks=[name])) == -9
    assert train_in_child(small_run(run_dir, **SUPERVISED)) == 0
    require_same_run(run_dir, expected)


def test_training_on_preference_pairs_raises_their_margin(
    small_run: BuildConfig, pairs: dict[str, Any], tmp_path: Path
):
    run_training(small_run(tmp_path / "run", **PAIRS, **pairs, trainer__max_training_steps=12))
    rows = rows_of(tmp_path / "run")
    evaluated = [row for row in rows if "eval/pair_accuracy" in row]
    # At the start the policy equals its reference, so the margin is 0 and the loss is log 2.
    assert evaluated[0]["eval/loss"] == pytest.approx(0.6931, abs=1e-3)
    assert evaluated[0]["eval/pair_margin"] == pytest.approx(0.0, abs=1e-5)
    assert evaluated[-1]["eval/pair_margin"] > 0.01
    assert evaluated[-1]["eval/loss"] < evaluated[0]["eval/loss"]


def test_a_reward_model_learns_and_is_saved_with_its_head(
    small_run: BuildConfig, pairs: dict[str, Any], tmp_path: Path
):
    run_training(small_run(tmp_path / "run", **REWARD_MODEL, **pairs, trainer__max_training_steps=12))
    losses = [row["eval/loss"] for row in rows_of(tmp_path / "run") if "eval/loss" in row]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] < losses[0]
    head = load_file(tmp_path / "run" / "model" / "value_head.safetensors")
    assert head["value_head.weight"].any()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({**SUPERVISED, "generator__n_samples_per_prompt": 4}, "generator.n_samples_per_prompt: got 4, expected 1"),
        ({**PAIRS, "generator__n_samples_per_prompt": 1}, "generator.n_samples_per_prompt: got 1"),
        (
            {**PAIRS, "generator__eval_n_samples_per_prompt": 1},
            "generator.eval_n_samples_per_prompt: got 1, expected 2",
        ),
        ({**PAIRS, "trainer__algorithm__loss_reduction": "token_mean"}, "set it to prompt_token_sum"),
        ({**PAIRS, "trainer__policy_mini_batch_size": 4}, "correct only for a single optimizer step"),
        ({**PAIRS, "trainer__update_epochs_per_batch": 2}, "correct only for a single optimizer step"),
        ({"trainer__algorithm__policy_loss_type": "reward_model"}, "use stored pairs, with generator.type=dataset"),
        ({**REWARD_MODEL, "trainer__strategy": "fsdp1"}, "fsdp1 cannot train a model with a value head"),
        ({**SUPERVISED, "trainer__algorithm__off_policy_sequence_mask": 0.5}, "'cross_entropy' reads no advantages"),
        ({**PAIRS, "trainer__algorithm__off_policy_sequence_mask": 0.5}, "'dpo' reads no advantages"),
        *(
            ({**REWARD_MODEL, **ESTIMATED, f"trainer__algorithm__{key}": True}, rf"{key}: got true.* value head")
            for key in ("use_kl_loss", "use_kl_in_reward", "use_entropy_loss")
        ),
        ({**SUPERVISED, "generator__response_key": "reply"}, "train.parquet:1: the row has no response"),
        (
            {**SUPERVISED, "generator__sampling_params__max_generate_length": 3},
            "the response has 4 tokens; generator.sampling_params.max_generate_length is 3",
        ),
        ({**SUPERVISED, "generator__responses": "three"}, "generator.responses"),
    ],
)
def test_invalid_keys_and_rows_are_refused_before_the_run(
    keys: dict[str, Any], message: str, small_run: BuildConfig, tmp_path: Path
):
    with pytest.raises((ConfigError, DataError), match=message):
        run_training(small_run(tmp_path / "run", **keys))
    assert not (tmp_path / "run").exists()


def test_too_long_responses_are_dropped_if_configured(small_run: BuildConfig, tmp_path: Path, caplog: Any):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "1+1=", "answer": "2" * (1 + 3 * (n % 2))} for n in range(32)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"data__train_data": [str(file)], "data__val_data": [str(file)], "data__on_long_prompt": "drop"}
    length = {"generator__sampling_params__max_generate_length": 3, "trainer__epochs": 3}
    run_training(small_run(tmp_path / "run", **SUPERVISED, **keys, **length))
    assert "dropped 16 of 32 rows" in caplog.text


def test_evaluation_of_a_supervised_configuration_is_refused(small_run: BuildConfig, tmp_path: Path):
    with pytest.raises(ConfigError, match="plays no prompts"):
        run_evaluation(small_run(tmp_path / "run", **SUPERVISED))
