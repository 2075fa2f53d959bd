"""What the quick start's preparation makes, and what it leaves alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_core.config import Config, load
from rl_core.trainer.data import read_rows
from rl_core.trainer.run import run_training
from rl_examples import quickstart
from rl_examples.quickstart import prepare

TRAIN, HELD_OUT, MODEL, MOE_MODEL = (
    f"runs/arithmetic/{name}"
    for name in ("train.parquet", "held_out.parquet", "start_model_seed3", "start_moe_model_seed3")
)


def config(*overrides: str) -> Config:
    return load("quickstart", ["trainer.seed=3", *overrides]).config


@pytest.fixture
def warm_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The models that a preparation in this empty folder writes, in place of the minute that each takes."""
    written: list[Path] = []
    monkeypatch.chdir(tmp_path)

    def write(directory: Path, write_untrained: Callable[..., None], problems: object, *, seed: int) -> None:
        write_untrained(tmp_path / "untrained", seed=seed)
        written.append(directory)

    monkeypatch.setattr(quickstart, "_write_start_model", write)
    return written


def test_the_recipe_makes_its_data_and_its_model_once(warm_started: list[Path]):
    prepare(config())
    assert [len(read_rows([path], key="data")) for path in (TRAIN, HELD_OUT)] == [9000, 1000]
    assert warm_started == [Path(MODEL)]
    Path(MODEL).mkdir()
    prepare(config())
    assert len(warm_started) == 1
    assert load("quickstart", ["trainer.seed=3"]).makes == {TRAIN, HELD_OUT, MODEL, MOE_MODEL}


def test_the_recipe_makes_a_model_with_experts_where_that_is_named(warm_started: list[Path]):
    prepare(config(f"trainer.policy.model.path={MOE_MODEL}"))
    assert warm_started == [Path(MOE_MODEL)]
    model = json.loads(Path("untrained/config.json").read_text())
    assert (model["model_type"], model["num_local_experts"], model["num_experts_per_tok"]) == ("qwen3_moe", 4, 2)


def test_a_file_that_is_there_is_never_written_again(warm_started: list[Path]):
    Path("runs/arithmetic").mkdir(parents=True)
    Path(TRAIN).write_text("mine")
    prepare(config())
    assert Path(TRAIN).read_text() == "mine"
    assert Path(HELD_OUT).exists()


def test_paths_of_the_user_are_left_alone(warm_started: list[Path]):
    Path("mine.parquet").write_text("mine")
    prepare(
        config("data.train_data=[mine.parquet]", "data.val_data=[missing.parquet]", "trainer.policy.model.path=mine")
    )
    assert Path("mine.parquet").read_text() == "mine"
    assert sorted(path.name for path in Path().iterdir()) == ["mine.parquet"]
    assert warm_started == []


def test_without_held_out_data_nothing_is_evaluated(small_run: Callable[..., Config], tmp_path: Path):
    no_data = {"data__val_data": [], "trainer__max_training_steps": 1}
    run = small_run(tmp_path / "run", **no_data, trainer__policy__optimizer_config__num_warmup_steps=0)
    prepare(run)
    summary = run_training(run)
    assert (summary.steps, summary.accuracy_before, summary.accuracy_after) == (1, None, None)
