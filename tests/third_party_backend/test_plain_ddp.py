"""A backend in a third-party package is installed, found, tested by the suite, and used to train the quick start."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from rl_examples.arithmetic import write_data, write_model
from tests.installing import COMMANDS, installed_in, run

HERE = Path(__file__).parent
GUIDE = HERE.parents[1] / "docs" / "backends.md"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables that make the package importable, in addition to all installed packages."""
    return {**os.environ, **installed_in(tmp_path_factory.mktemp("package"), HERE)}


def test_the_guide_shows_this_package():
    sources = "".join((HERE / name).read_text() for name in ("conformance.py", "pyproject.toml"))
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 2
    assert [block for block in blocks if block not in sources] == []


@pytest.mark.slow
def test_the_backend_is_listed_with_its_package(environment: dict[str, str]):
    assert "plain_ddp  plain-ddp 1.0" in run([COMMANDS / "rl", "plugins"], environment, HERE)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_backend_passes_the_suite_on_one_rank_and_on_two(environment: dict[str, str], tmp_path: Path):
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "-W",
        "error",
        f"--basetemp={tmp_path / 'suite'}",
    ]
    printed = run([sys.executable, "-m", "pytest", *options, HERE / "conformance.py"], environment, HERE)
    assert " passed" in printed
    assert "15 skipped" in printed, "only the checks of optional abilities that the backend lacks may be skipped"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_backend_trains_the_quick_starts_model_on_two_ranks(environment: dict[str, str], tmp_path: Path):
    write_data(tmp_path / "train.parquet", tmp_path / "held_out.parquet")
    write_model(tmp_path / "model", seed=0)
    overrides = {
        "trainer.strategy": "plain_ddp",
        "trainer.use_sample_packing": "false",
        "trainer.policy.plain_ddp_config.reduce_in_float64": "true",
        "trainer.policy.optimizer_config.scheduler": "constant_with_warmup",
        "trainer.placement.policy_num_gpus_per_node": 2,
        "trainer.policy.model.path": tmp_path / "model",
        "data.train_data": f"[{tmp_path / 'train.parquet'}]",
        "data.val_data": f"[{tmp_path / 'held_out.parquet'}]",
        "trainer.run_dir": tmp_path / "run",
        "trainer.max_training_steps": 3,
        "trainer.train_batch_size": 8,
        "trainer.policy_mini_batch_size": 8,
        "generator.n_samples_per_prompt": 4,
        "trainer.eval_before_train": "false",
        "trainer.eval_interval": -1,
    }
    arguments = [f"{key}={value}" for key, value in overrides.items()]
    run([COMMANDS / "rl", "train", "quickstart", *arguments], environment, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"] > 0]
    assert len(steps) == 3
    # Trainer and engine agree, so the engine received the trained weights before each step.
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in steps)
