"""The recipes that train on given answers, on preference pairs and with a teacher: a few steps of each, from an empty
folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import attrs
import pytest

from rl_core.config import Config, load
from rl_core.interfaces import Callback, Control
from rl_core.reports.jsonl import read_rows
from rl_core.trainer.run import run_training
from rl_examples import arithmetic, distill, dpo, sft, sft_grpo
from rl_examples.arithmetic import write_model
from rl_examples.whole_models import is_whole

FEW = ("trainer.max_training_steps=2", "trainer.train_batch_size=16", "trainer.policy_mini_batch_size=16")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(distill, "TEACHER_STEPS", 2)
    monkeypatch.setattr(distill, "STUDENT_STEPS", 2)
    monkeypatch.setattr(dpo, "START_STEPS", 2)
    monkeypatch.setattr(sft_grpo, "START_STEPS", 2)


@pytest.fixture
def few_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the data small: every start encodes all rows, and evaluations answer all held-out ones."""
    few = arithmetic.problems()[:300]
    monkeypatch.setattr(arithmetic, "problems", lambda: few)
    monkeypatch.setattr(arithmetic, "NUM_HELD_OUT", 100)


def train(recipe: str, *overrides: str) -> dict[str, float]:
    """Runs the recipe and returns the last row of metrics."""
    loaded = load(recipe, [*FEW, *overrides])
    assert isinstance(loaded.config, Config)
    run_training(loaded)
    return json.loads((loaded.config.run_dir / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.usefixtures("few_problems")
@pytest.mark.parametrize(
    ("recipe", "overrides", "measured"),
    [
        ("sft", (), "eval/perplexity"),
        ("dpo", (), "eval/pair_accuracy"),
        (
            "dpo",
            ("trainer.algorithm.policy_loss_type=reward_model", "generator.scored_at_end=true"),
            "eval/pair_accuracy",
        ),
        ("sft_grpo", ("generator.n_samples_per_prompt=2",), "eval/accuracy"),
    ],
)
def test_the_recipe_trains_from_an_empty_folder(recipe: str, overrides: tuple[str, ...], measured: str):
    row = train(recipe, *overrides)
    assert row["step"] == 2
    assert measured in row
    assert "policy/loss" in row


@pytest.mark.usefixtures("few_problems")
def test_a_teacher_in_an_engine_gives_the_same_metrics_as_a_teacher_on_ranks():
    """The numbers agree up to rounding: the engine and the rank use different kernels."""
    on_ranks = train("distill", "generator.n_samples_per_prompt=2", "trainer.run_dir=ranks")
    served = train(
        "distill", "generator.n_samples_per_prompt=2", "trainer.run_dir=served", "trainer.ref.inference_backend=local"
    )
    names = ("policy/loss", "policy/grad_norm", "eval/accuracy")
    assert {name: served[name] for name in names} == pytest.approx({name: on_ranks[name] for name in names}, rel=1e-4)
    assert on_ranks["policy/grad_norm"] > 1e-3
    assert on_ranks["step"] == 2


class StopsInStepOne(Callback):
    """Stops the run after step 1, as Ctrl-C would."""

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> Control:
        return Control(stop=step == 1)


@pytest.mark.usefixtures("few_problems")
def test_an_interrupted_fine_tuning_makes_no_model_and_is_continued(monkeypatch: pytest.MonkeyPatch):
    model = Path("made")
    with monkeypatch.context() as patch:
        stopping = {**sft.recipe.config, "trainer.callbacks": [f"{__name__}:StopsInStepOne"]}
        patch.setattr(sft, "recipe", attrs.evolve(sft.recipe, config=stopping))
        with pytest.raises(KeyboardInterrupt):
            sft.make_fine_tuned(model, write_model, steps=2, seed=0)
    assert not model.exists()
    sft.make_fine_tuned(model, write_model, steps=2, seed=0)
    assert is_whole(model)
    rows = list(read_rows(Path("made.run/metrics.jsonl")))
    assert [row["step"] for row in rows] == [1, 2]
    assert not Path("made.run.1").exists(), "the run started anew"


@pytest.mark.usefixtures("few_problems")
def test_an_existing_start_model_is_not_made_again():
    config = load("dpo").config
    dpo.prepare(config)
    made = Path("runs/arithmetic/dpo_start_seed0/model.safetensors").stat().st_mtime_ns
    dpo.prepare(config)
    assert Path("runs/arithmetic/dpo_start_seed0/model.safetensors").stat().st_mtime_ns == made


def test_the_control_of_supervised_fine_tuning_has_the_same_answers_in_other_rows():
    rows = arithmetic.problems()
    shuffled = sft.with_shuffled_answers(rows)
    assert [row["prompt"] for row in shuffled] == [row["prompt"] for row in rows]
    assert sorted(row["answer"] for row in shuffled) == sorted(row["answer"] for row in rows)
    # Two random sums below 199 are equal with a probability of 0.67 %.
    assert sum(one["answer"] == other["answer"] for one, other in zip(shuffled, rows, strict=True)) < 0.01 * len(rows)


def test_the_control_of_dpo_prefers_half_of_the_right_answers():
    rows = dpo.pairs()
    turned = dpo.with_random_preferences(rows)
    same = sum(one == other for one, other in zip(turned, rows, strict=True))
    assert 0.48 < same / len(rows) < 0.52
    for one, other in zip(turned, rows, strict=True):
        assert one in (other, {**other, "chosen": other["rejected"], "rejected": other["chosen"]})


def test_only_the_run_of_a_control_makes_the_controls_rows():
    for name, module, control in (("sft", sft, "shuffled_answers"), ("dpo", dpo, "random_pairs")):
        file = f"runs/arithmetic/{control}.parquet"
        assert file in module.recipe.makes
        for keys in ([], [f"data.train_data=[{file}]"]):
            module.prepare(load(name, ["trainer.policy.model.path=mine", *keys]).config)
            assert Path(file).exists() == bool(keys)
