"""A small arithmetic run: the quick start's model, untrained, and a few small steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rl_core.config import Config, from_mapping
from rl_examples.arithmetic import problems, write_model, write_rows
from rl_examples.quickstart import recipe
from tests.examples.test_resume import train_in_child


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with data and an untrained model. It has few rows, because every run encodes all of them."""
    directory = tmp_path_factory.mktemp("arithmetic")
    rows = problems()
    write_rows(directory / "train.parquet", rows[:400])
    write_rows(directory / "few.parquet", rows[400:440])
    write_model(directory / "model", seed=0)
    return directory


@pytest.fixture(scope="session")
def small_run(start: Path) -> Callable[..., Config]:
    """Builds a configuration: 6 steps of 8 prompts × 4 samples, two mini-batches, a checkpoint every second step."""

    def build(run_dir: Path, **overrides: object) -> Config:
        values = {
            **recipe.config,
            "data.train_data": [str(start / "train.parquet")],
            "data.val_data": [str(start / "few.parquet")],
            "trainer.policy.model.path": str(start / "model"),
            "trainer.run_dir": str(run_dir),
            "trainer.resume_mode": "latest",
            "trainer.max_training_steps": 6,
            "trainer.policy.optimizer_config.scheduler": "constant_with_warmup",
            "trainer.train_batch_size": 8,
            "trainer.policy_mini_batch_size": 4,
            "trainer.update_epochs_per_batch": 1,
            "trainer.ckpt_interval": 2,
            "trainer.eval_interval": 3,
            "trainer.max_ckpts_to_keep": -1,
            "generator.n_samples_per_prompt": 4,
            "environment.env_class": "tests.examples.environments:FirstDigit",
            **{key.replace("__", "."): value for key, value in overrides.items()},
        }
        return from_mapping(values)

    return build


@pytest.fixture(scope="session")
def finished(small_run: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished `small_run`. Tests change only copies of it."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    assert train_in_child(small_run(run_dir)) == 0
    return run_dir
