"""A run over Ray ends cleanly after a scheduler's SIGTERM. Ray's own signal handlers would end the process at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl_core.reports.jsonl import read_rows
from tests.rollout.vllm.runs import prepare, started
from tests.rollout.vllm.servers import command_line

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NOISE = ("Traceback", "SIGTERM received", "Unclosed", "@ 0x")


def terminated(tmp_path: Path, overrides: Mapping[str, Any], moment: str) -> str:
    """Sends SIGTERM to a run once it has printed `moment` or written to a file of that name. Returns what the run
    printed.
    """
    prepare(tmp_path)
    run = started(tmp_path, overrides)
    printed, deadline = tmp_path / "printed", time.monotonic() + 300
    file = tmp_path / "run" / moment
    while moment not in printed.read_text() and not (file.exists() and file.stat().st_size):
        assert run.poll() is None, printed.read_text()
        assert time.monotonic() < deadline, printed.read_text()
        time.sleep(0.05)
    others = psutil.Process(run.pid).children(recursive=True)
    assert any("raylet" in command_line(other) for other in others)
    run.send_signal(signal.SIGTERM)
    try:
        assert run.wait(150) == 130, printed.read_text()
    finally:
        run.kill()
    _, alive = psutil.wait_procs(others, timeout=100)
    assert not alive
    said = printed.read_text()
    assert not [line for line in said.splitlines() if any(noise in line for noise in NOISE)], said
    return said


def test_a_run_terminated_during_the_start_of_servers_ends_cleanly(tmp_path: Path):
    said = terminated(tmp_path, {"generator.inference_engine.backend": "vllm"}, "vLLM server 0: loading")
    assert "interrupted; the run has no checkpoint yet" in said


def test_a_run_terminated_in_training_ends_with_a_checkpoint(tmp_path: Path):
    said = terminated(tmp_path, {"trainer.placement.policy_num_gpus_per_node": 2}, "metrics.jsonl")
    (step,) = [int(line.split()[3].rstrip(";")) for line in said.splitlines() if line.startswith("interrupted after")]
    assert step > 0
    assert [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")][-1] == step
    assert list((tmp_path / "run" / "checkpoints").glob("*step*"))
