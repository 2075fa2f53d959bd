"""The servers of a training run are killed: the metrics of every step still appear, once and in order."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from rl_core.reports.jsonl import read_rows
from tests.rollout.vllm.runs import prepare, started, wait_for_step
from tests.rollout.vllm.servers import command_line

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
NUM_STEPS = 12
RUN_WITHIN_S = 3000.0


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_goes_on_when_a_server_is_killed(tmp_path: Path, seed: int, max_staleness: int):
    """Twice, kills a random server at a random moment after a random step."""
    prepare(tmp_path, seed=seed)
    overrides = {
        "trainer.max_training_steps": NUM_STEPS,
        "trainer.max_staleness": max_staleness,
        "trainer.ckpt_interval": -1,
        "generator.inference_engine.backend": "vllm",
        "generator.inference_engine.num_engines": 2,
        "generator.inference_engine.heartbeat_interval_s": 1,
        "generator.sampling_params.top_p": 0.9,
    }
    dice = random.Random(seed)
    kill_after = sorted(dice.sample(range(1, NUM_STEPS - 2), 2))
    metrics = tmp_path / "run" / "metrics.jsonl"
    with started(tmp_path, overrides) as run:
        try:
            for step in kill_after:
                wait_for_step(run, tmp_path, step, within_s=RUN_WITHIN_S)
                time.sleep(dice.uniform(0, 1))
                os.kill(dice.choice(_servers(run.pid)), signal.SIGKILL)
            assert run.wait(RUN_WITHIN_S) == 0
        finally:
            run.kill()
    rows = [row for row in read_rows(metrics) if row["step"] > 0]
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    assert sum(row["rollout/failed"] for row in rows) == 0, "the samples of a killed server must go to the other server"
    # With staleness, a step may have no tokens of the current version, and then has nothing to compare.
    compared = [row["rollout/logprob_diff_max"] for row in rows if "rollout/logprob_diff_max" in row]
    assert len(compared) >= (1 if max_staleness else NUM_STEPS)
    assert max(compared) <= 1e-3


def _servers(pid: int) -> list[int]:
    found = [
        child.pid
        for child in psutil.Process(pid).children(recursive=True)
        if "ray::VLLMServerActor" in command_line(child)
    ]
    assert found, "no server is running"
    return sorted(found)
