"""The recipes with tools and with several tries: their rules, their demonstrations, and a few training steps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rl_core.config import Config, from_mapping
from rl_core.interfaces import Action, StepResult
from rl_core.reports.jsonl import read_rows
from rl_core.reports.samples import read_samples
from rl_core.testing.environments import EnvironmentConformance
from rl_core.trainer.run import run_training
from rl_examples import arithmetic, calculator, look_up, second_try
from rl_examples.arithmetic import write_rows

PROBLEM = {"prompt": "37*45=", "answer": "1665"}
SUM = {"prompt": "37+45=", "answer": "280"}


class TestPocketCalculator(EnvironmentConformance):
    factory = calculator.PocketCalculator
    row: ClassVar[dict[str, Any]] = PROBLEM
    rewards: ClassVar[dict[Any, float]] = {
        "1665": 1.0,
        ("<37*45>", "1665"): 1.0,
        ("<37*45", "1665"): 1.0,  # a broken call gets the observation `?=` and costs nothing
        ("<37*45>", "<37*45>", "1665"): 0.0,
        "1666": 0.0,
        "": 0.0,
    }


class TestSecondTry(EnvironmentConformance):
    factory = second_try.SecondTry
    row: ClassVar[dict[str, Any]] = SUM
    rewards: ClassVar[dict[Any, float]] = {
        "280": 1.0,
        ("290", "280"): 1.0,
        ("111", "222", "280"): 1.0,
        ("111", "222", "333", "280"): 0.0,
        ("2800", "280"): 0.0,
        "x": 0.0,
    }


def play(environment: Any, *texts: str) -> list[StepResult]:
    async def steps() -> list[StepResult]:
        await environment.reset()
        return [await environment.step(Action(text=text, tokens=(), stop_reason="stop")) for text in texts]

    return asyncio.run(steps())


def test_the_calculator_answers_products_and_reports_other_input():
    assert [
        play(calculator.PocketCalculator(PROBLEM, {}), call)[0].observation
        for call in ("<37*45>", "<1+2>", "<999*999>")
    ] == ["1665=", "?=", "998001="]


def test_the_broken_calculator_repeats_the_same_wrong_answer():
    said = [play(calculator.BrokenPocketCalculator(PROBLEM, {}), "<37*45>")[0].observation for _ in range(2)]
    assert said[0] == said[1] != "1665="


def test_a_wrong_sum_is_marked_digit_by_digit():
    assert second_try.marks("290", "280") == "+-+="
    assert play(second_try.SecondTry(SUM, {}), "290")[0].observation == "+-+="


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("look_up") / "documents.jsonl"
    look_up.write_corpus(path, look_up.entries())
    return {"corpus": str(path), "top_k": 1, "max_searches": 1}


def test_every_name_is_found_by_a_search_and_held_out_ones_are_in_no_demonstration(corpus: dict[str, Any]):
    known = look_up.entries()
    for name, number in known:
        (found,) = play(look_up.LookUp({"prompt": "?", "answer": "1"}, corpus), f"<search>{name}</search>")
        assert found.observation == f"<information>{name} {number}</information>"
    rows = [{"prompt": f"{name}?", "answer": number} for name, number in known[look_up.NUM_HELD_OUT :]]
    rng = random.Random(0)
    shown = "".join(each["prompt"] + each["answer"] for each in (look_up.demonstrated(rows, rng) for _ in range(2000)))
    assert not [name for name, _ in known[: look_up.NUM_HELD_OUT] if f"{name}?" in shown or f">{name}<" in shown]


def test_a_mixed_up_search_shows_the_name_and_another_number(corpus: dict[str, Any]):
    name, number = look_up.entries()[0]
    (found,) = play(look_up.MixedUpLookUp({"prompt": "?", "answer": "1"}, corpus), f"<search>{name}</search>")
    assert str(found.observation).startswith(f"<information>{name} ")
    assert number not in str(found.observation)


def test_demonstrations_are_episodes_as_the_environment_plays_them():
    """The text between two of the policy's turns in a demonstration equals the environment's observation."""
    rng = random.Random(1)
    for _ in range(300):
        for environment, problem, demonstrated in (
            (calculator.PocketCalculator, PROBLEM, calculator.demonstrated),
            (second_try.SecondTry, SUM, second_try.demonstrated),
        ):
            row = demonstrated(problem, rng)
            said = row["prompt"].removeprefix(problem["prompt"])
            played, shown = environment(problem, {}), problem["prompt"]
            while said:
                turn, _, said = said.partition("$")
                (result,) = play(played, turn)
                assert not result.done
                assert said.startswith(str(result.observation))
                said = said.removeprefix(str(result.observation))
                shown += f"{turn}${result.observation}"
            assert shown == row["prompt"]


RECIPES: Mapping[str, tuple[Any, Callable[[], list[dict[str, Any]]], Callable[..., None]]] = {
    "calculator": (calculator, lambda: calculator.problems()[:40], arithmetic.write_model),
    "look_up": (
        look_up,
        lambda: [{"prompt": f"{name}?", "answer": number} for name, number in look_up.entries()[:40]],
        look_up.write_model,
    ),
    "second_try": (second_try, lambda: arithmetic.problems()[:40], arithmetic.write_model),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_few_steps_train_on_each_recipes_episodes(name: str, tmp_path: Path, corpus: dict[str, Any]):
    module, rows, write_model = RECIPES[name]
    write_rows(tmp_path / "rows.parquet", rows())
    write_model(tmp_path / "model", seed=0)
    run_training(small(module.recipe.config, tmp_path, corpus))
    metrics = list(read_rows(tmp_path / "run" / "metrics.jsonl"))
    assert [row["step"] for row in metrics] == [0, 1, 2]
    for row in metrics[1:]:
        assert row["rollout/turns"] >= 1.0
        assert row["rollout/logprob_diff_max"] < 1e-4
        assert row.get("rollout/failed", 0.0) == 0.0
    if name == "look_up":  # an untrained model neither searches nor answers; the second such turn ends the episode
        assert {len(sample.turns or ()) for sample in read_samples(tmp_path / "run")} == {2}


def small(config: Mapping[str, Any], directory: Path, corpus: Mapping[str, Any]) -> Config:
    """The recipe's configuration with two steps of 8 prompts × 4 samples and the untrained model."""
    changed = {
        "data.train_data": [str(directory / "rows.parquet")],
        "data.val_data": [str(directory / "rows.parquet")],
        "trainer.policy.model.path": str(directory / "model"),
        "trainer.run_dir": str(directory / "run"),
        "trainer.max_training_steps": 2,
        "trainer.train_batch_size": 8,
        "trainer.policy_mini_batch_size": 8,
        "trainer.eval_interval": 2,
        "generator.n_samples_per_prompt": 4,
    }
    if "environment.options.corpus" in config:
        changed["environment.options.corpus"] = corpus["corpus"]
    return from_mapping({**config, **changed})
