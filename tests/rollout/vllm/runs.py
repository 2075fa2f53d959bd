"""Starts the quick start or a similar recipe as a user does, with an untrained model."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.reports.jsonl import read_rows
from rl_examples.arithmetic import problems, write_model, write_rows


def prepare(directory: Path, *, seed: int = 0) -> None:
    """Writes the data and the untrained model. There are few rows, because every run encodes all of them."""
    write_rows(directory / "train.parquet", problems()[:400])
    write_model(directory / "model", seed=seed)


def started(
    directory: Path,
    overrides: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    *,
    recipe: str = "quickstart",
) -> subprocess.Popen[bytes]:
    """Starts a run in `directory`/run, which prints into `directory`/printed. `environment`: additional environment
    variables.
    """
    settings = {
        "data.train_data": f"[{directory}/train.parquet]",
        "data.val_data": "[]",
        "trainer.policy.model.path": directory / "model",
        "trainer.run_dir": directory / "run",
        "environment.env_class": "tests.examples.environments:FirstDigit",
        **overrides,
    }
    command = [str(Path(sys.executable).with_name("rl")), "train", recipe]
    command += [f"{key}={value}" for key, value in settings.items()]
    with (directory / "printed").open("wb") as output:
        return subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(Path.cwd()), **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def wait_for_step(run: subprocess.Popen[bytes], directory: Path, step: int, *, within_s: float) -> None:
    """Waits until the run's metrics have this step; fails if the run ends first."""
    metrics, printed, deadline = directory / "run" / "metrics.jsonl", directory / "printed", time.monotonic() + within_s
    while not metrics.exists() or all(row["step"] < step for row in read_rows(metrics)):
        assert run.poll() is None, printed.read_text()
        assert time.monotonic() < deadline, printed.read_text()
        time.sleep(0.2)
