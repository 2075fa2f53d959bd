"""What the quick start makes before it trains, and what it leaves alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_core.config import Config, load
from rl_core.trainer.before.data import read_rows
from rl_core.trainer.before.preflight import preflight
from rl_core.trainer.run import run_training
from rl_examples import quickstart
from rl_examples.quickstart import prepare
from rl_examples.whole_models import is_whole, make_whole

TRAIN, HELD_OUT, MODEL, MOE_MODEL = (
    f"runs/arithmetic/{name}"
    for name in ("train.parquet", "held_out.parquet", "start_model_seed3", "start_moe_model_seed3")
)


def config(*overrides: str) -> Config:
    return load("quickstart", ["trainer.seed=3", *overrides]).config


@pytest.fixture
def warm_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories for which the recipe has requested a start model. An empty folder becomes the current directory.
    The warm start, which takes a minute, is replaced by a function that only writes an untrained model to `untrained`.
    """
    written: list[Path] = []
    monkeypatch.chdir(tmp_path)

    def write(directory: Path, write_untrained: Callable[..., None], problems: object, *, seed: int) -> None:
        write_untrained(tmp_path / "untrained", seed=seed)
        written.append(directory)

    monkeypatch.setattr(quickstart, "_write_start_model", write)
    return written


def test_the_recipe_makes_missing_data_and_a_missing_model(warm_started: list[Path]):
    prepare(config())
    assert [len(read_rows([path], key="data")) for path in (TRAIN, HELD_OUT)] == [9000, 1000]
    assert warm_started == [Path(MODEL)]
    Path(MODEL).mkdir()  # an empty directory belongs to the user
    prepare(config())
    assert len(warm_started) == 1
    assert load("quickstart", ["trainer.seed=3"]).makes == {TRAIN, HELD_OUT, MODEL, MOE_MODEL}


def test_the_recipe_makes_a_model_with_experts_if_its_path_is_configured(warm_started: list[Path]):
    prepare(config(f"trainer.policy.model.path={MOE_MODEL}"))
    assert warm_started == [Path(MOE_MODEL)]
    model = json.loads(Path("untrained/config.json").read_text())
    assert (model["model_type"], model["num_local_experts"], model["num_experts_per_tok"]) == ("qwen3_moe", 4, 2)


def test_an_existing_file_is_never_overwritten(warm_started: list[Path]):
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


@pytest.mark.parametrize("damage", ["no weights", "cut", "no tokenizer", "zeros"])
def test_only_an_incomplete_start_model_is_made_again(damage: str, warm_started: list[Path], start: Path):
    model = Path(MODEL)
    shutil.copytree(start / "model", model)
    prepare(config())
    assert warm_started == []
    weights = model / "model.safetensors"
    match damage:
        case "no weights":
            weights.unlink()
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-1])
        case "no tokenizer":
            for file in model.glob("tokenizer*"):
                file.unlink()
        case "zeros":
            weights.write_bytes(bytes(weights.stat().st_size))
    preflight(load("quickstart", ["trainer.seed=3", "trainer.max_training_steps=1"]))
    prepare(config())
    assert warm_started == [model]


def test_a_directory_is_made_whole_or_not_at_all(tmp_path: Path, start: Path):
    model = tmp_path / "model"

    def stops_half_way(partial: Path) -> None:
        partial.mkdir()
        (partial / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_whole(model, stops_half_way)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "model.partial999999999").mkdir()
    model.mkdir()
    (model / "config.json").write_text("{}")
    make_whole(model, lambda partial: shutil.copytree(start / "model", partial))
    assert is_whole(model)
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "partial folders must be removed too"
