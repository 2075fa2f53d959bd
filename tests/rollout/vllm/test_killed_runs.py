"""A training run whose servers are killed, as a user starts it: every step's metrics appear, once and in order."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rl_core.reports.jsonl import read_rows
from rl_examples.arithmetic import write_data, write_model

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
NUM_STEPS = 12
RUN_WITHIN_S = 3000.0


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_goes_on_when_a_server_is_killed(tmp_path: Path, seed: int, max_staleness: int):
    """Two kills, each at a random moment after a random step, of a random server."""
    write_data(tmp_path / "train.parquet", tmp_path / "held_out.parquet")
    write_model(tmp_path / "model", seed=seed)
    overrides = {
        "data.train_data": f"[{tmp_path}/train.parquet]",
        "data.val_data": "[]",
        "trainer.policy.model.path": tmp_path / "model",
        "trainer.run_dir": tmp_path / "run",
        "trainer.max_training_steps": NUM_STEPS,
        "trainer.max_staleness": max_staleness,
        "trainer.ckpt_interval": -1,
        "generator.inference_engine.backend": "vllm",
        "generator.inference_engine.num_engines": 2,
        "generator.inference_engine.heartbeat_interval_s": 1,
        "environment.env_class": "tests.examples.environments:FirstDigit",
    }
    command = [str(Path(sys.executable).with_name("rl")), "train", "quickstart"]
    command += [f"{key}={value}" for key, value in overrides.items()]
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    dice = random.Random(seed)
    kill_after = sorted(dice.sample(range(1, NUM_STEPS - 2), 2))
    metrics = tmp_path / "run" / "metrics.jsonl"
    with subprocess.Popen(command, env=environment) as run:
        try:
            for step in kill_after:
                _wait_for_step(run, metrics, step)
                time.sleep(dice.uniform(0, 1))
                os.kill(dice.choice(_servers(run.pid)), signal.SIGKILL)
            assert run.wait(RUN_WITHIN_S) == 0
        finally:
            run.kill()
    rows = [row for row in read_rows(metrics) if row["step"] > 0]
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    assert sum(row["rollout/failed"] for row in rows) == 0, "a killed server's samples go to the other one"
    assert all(row.get("rollout/logprob_diff_max", 0.0) <= 1e-3 for row in rows)


def _wait_for_step(run: subprocess.Popen[bytes], metrics: Path, step: int) -> None:
    deadline = time.monotonic() + RUN_WITHIN_S
    while not metrics.exists() or all(row["step"] < step for row in read_rows(metrics)):
        assert run.poll() is None, "the run ended before the kill"
        assert time.monotonic() < deadline, f"step {step} did not come"
        time.sleep(0.2)


def _servers(pid: int) -> list[int]:
    found = [
        child.pid
        for child in psutil.Process(pid).children(recursive=True)
        if any("ray::VLLMServerActor" in part for part in child.cmdline())
    ]
    assert found, "no server is running"
    return sorted(found)
