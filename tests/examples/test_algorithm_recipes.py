"""The recipes of algorithms: a few steps of each with an untrained model, and a check of what is special about each."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import pytest
from safetensors.torch import load_file

from rl_core.config import from_mapping
from rl_core.interfaces import Action
from rl_core.reports.jsonl import read_rows
from rl_core.testing.environments import EnvironmentConformance
from rl_core.trainer.run import run_training
from rl_examples import async_r3, dapo, gspo, ppo
from rl_examples.arithmetic import problems, write_model, write_moe_model, write_rows

SUM = {"prompt": "37+45=", "answer": "280"}


def trained(module: Any, directory: Path, **keys: Any) -> list[dict[str, float]]:
    """The metrics of a run of three steps with 8 problems each."""
    # An untrained model hardly ever answers right, but sometimes gets the first digit right, which FirstDigit rewards.
    env_class = module.recipe.config.get("environment.env_class", "tests.examples.environments:FirstDigit")
    write_rows(directory / "rows.parquet", [{**row, "env_class": env_class} for row in problems()[:40]])
    write = write_moe_model if module is async_r3 else write_model
    write(directory / "model", seed=0)
    changed = {
        "data.train_data": [str(directory / "rows.parquet")],
        "data.val_data": [str(directory / "rows.parquet")],
        "trainer.policy.model.path": str(directory / "model"),
        "trainer.run_dir": str(directory / "run"),
        "trainer.epochs": 10,
        "trainer.max_training_steps": 3,
        "trainer.train_batch_size": 8,
        "trainer.policy_mini_batch_size": 8,
        "trainer.eval_interval": 3,
        **keys,
    }
    run_training(from_mapping({**module.recipe.config, **changed}))
    return list(read_rows(directory / "run" / "metrics.jsonl"))


class TestShapedArithmetic(EnvironmentConformance):
    factory = dapo.ShapedArithmetic
    row: ClassVar[dict[str, Any]] = SUM
    rewards: ClassVar[dict[Any, float]] = {"280": 1.0, "281": 0.0, "": 0.0}


@pytest.mark.parametrize(
    ("text", "num_tokens", "reason", "reward"),
    [("280", 4, "stop", 1.0), ("28", 3, "stop", 0.0), ("28012", 6, "stop", -0.5), ("28012345", 8, "length", -1.0)],
)
def test_answers_longer_than_a_right_one_are_penalised(text: str, num_tokens: int, reason: Any, reward: float):
    action = Action(text=text, tokens=(1,) * num_tokens, stop_reason=reason)
    result = asyncio.run(dapo.ShapedArithmetic(SUM, {}).step(action))
    assert (result.reward, result.metrics["accuracy"]) == (reward, float(reward == 1.0))


def test_dapo_drops_groups_with_equal_rewards_and_penalises_length(tmp_path: Path):
    rows = trained(dapo, tmp_path, **{"generator.n_samples_per_prompt": 2})
    for row in rows[1:]:
        assert row["environment/penalty"] < 0
        assert row["reward/std"] > 0
    # Two wrong answers of equal length get the same reward, so their group has no signal.
    assert sum(row["rollout/dropped_zero_variance"] for row in rows[1:]) > 0


def test_ppo_trains_a_critic(tmp_path: Path):
    rows = trained(
        ppo, tmp_path, **{"trainer.critic.model.path": str(tmp_path / "model"), "trainer.critic_mini_batch_size": 8}
    )
    assert all(row["critic/grad_norm"] > 0 for row in rows[1:])
    head = load_file(tmp_path / "run" / "model" / "critic" / "value_head.safetensors")
    assert head["value_head.weight"].any()


def test_gspo_trains_with_its_loss_and_a_mean_over_sequences(tmp_path: Path):
    config = from_mapping(gspo.recipe.config)
    assert (config.trainer.algorithm.policy_loss_type, config.trainer.algorithm.loss_reduction) == (
        "gspo",
        "sequence_mean",
    )
    for row in trained(gspo, tmp_path)[1:]:
        assert row["policy/grad_norm"] > 0
        assert 0 < abs(row["policy/ratio"] - 1) < 0.15  # the mean over two updates, of which the first has ratio 1


def test_a_mixture_of_experts_is_trained_asynchronously_with_replayed_routes(tmp_path: Path):
    rows = trained(async_r3, tmp_path)
    assert [row["rollout/staleness_max"] for row in rows[1:]] == [0, 1, 2]
    assert rows[1]["rollout/logprob_diff_max"] < 1e-4  # later, the trainer is ahead of the engine
