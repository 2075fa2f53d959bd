"""A run on two Ray nodes with broadcast syncs: one node is lost, and the same command resumes the run."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_core.reports.jsonl import read_rows
from tests.local_ray import add_node, start_cluster
from tests.rollout.vllm.runs import prepare, started, wait_for_step

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2400)]
WITHIN_S = 700.0


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two Ray nodes: two raylets on this machine."""
    cluster = start_cluster(2)
    yield cluster
    cluster.shutdown()


def test_after_a_lost_node_the_same_command_resumes_the_run(cluster: Any, tmp_path: Path):
    prepare(tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    with start(cluster, tmp_path, steps=100) as run:
        wait_for_step(run, tmp_path, 2, within_s=WITHIN_S)
        # The head node must stay. The second node has one of the ranks.
        cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)
        code = run.wait(WITHIN_S)
    said = (tmp_path / "printed").read_text()
    assert code == 1, said
    assert re.search(r"policy rank \d of 2", said), said
    lost_after = max(row["step"] for row in read_rows(metrics))
    add_node(cluster)
    with start(cluster, tmp_path, steps=lost_after + 1) as run:
        assert run.wait(WITHIN_S) == 0, (tmp_path / "printed").read_text()
    rows = [row for row in read_rows(metrics) if row["step"] > 0]
    assert [row["step"] for row in rows] == list(range(1, lost_after + 2))
    # The server computed with the weights that the ranks of both nodes had sent.
    assert all(row["rollout/logprob_diff_max"] <= 1e-3 for row in rows)


def start(cluster: Any, directory: Path, *, steps: int) -> subprocess.Popen[bytes]:
    """Starts a run on the cluster, with one rank on each node and a vLLM server on one of them."""
    overrides = {
        "trainer.resume_mode": "latest",
        "trainer.max_training_steps": steps,
        "trainer.ckpt_interval": 1,
        "trainer.placement.policy_num_nodes": 2,
        "trainer.placement.policy_num_gpus_per_node": 1,
        "generator.inference_engine.backend": "vllm",
        "generator.inference_engine.weight_sync_backend": "broadcast",
    }
    return started(directory, overrides, {"RAY_ADDRESS": cluster.address})
