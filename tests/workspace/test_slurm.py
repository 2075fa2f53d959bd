"""The Slurm script, run with stand-ins for the programs that it calls. The stand-ins record their calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workspace.imports import ROOT

SCRIPT = ROOT / "tools" / "slurm" / "train.sh"
PROGRAMS = {
    "scontrol": "printf 'node1\\nnode2\\n'",
    # Runs the step on this machine, as one task.
    "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    "hostname": "echo 10.0.0.1 10.0.0.2",
    "ray": "exec sleep 60",
    # Stands in for the query of the cluster's size: the number of nodes on which Ray was started.
    "python": 'echo "${NODES_THAT_JOIN:-$(grep -c "^ray start" "$CALLS")}"',
    "rl": 'if [[ "$*" == *trainer.slow=1* && "$*" != *--dry-run* ]]; then trap "echo saved >> $CALLS; exit 130" TERM; '
    'kill -TERM "$PPID"; for _ in {1..300}; do sleep 0.1; done; fi; [[ "$*" != *trainer.wrong=1* ]]',
}


@pytest.fixture
def job(tmp_path: Path):
    """Runs the script as a job of two nodes; returns its exit code, the recorded calls, and stderr."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in PROGRAMS.items():
        record = f'echo "{name} $RAY_AUTH_MODE $RAY_AUTH_TOKEN" >> "$CALLS.auth"\necho "{name} $*" >> "$CALLS"'
        text = f"#!/bin/bash\n{record}\n{body}\n"
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def run(*words: str, **variables: str) -> tuple[int, list[str], str]:
        calls = tmp_path / "calls"
        calls.write_text("")
        settings = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "CALLS": str(calls),
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_GPUS_ON_NODE": "8",
            "RL_HEAD_START_S": "0",
            "RL_POLL_S": "0",
            "RL_NODES_WAIT_S": "600",
            **variables,
        }
        result = subprocess.run(
            ["bash", SCRIPT, *words], env=settings, capture_output=True, text=True, timeout=60, check=False
        )
        return result.returncode, calls.read_text().splitlines(), result.stderr

    return run


KEYS = (
    "trainer.placement.policy_num_nodes=2 trainer.placement.policy_num_gpus_per_node=8 "
    "generator.inference_engine.weight_sync_backend=broadcast"
)


def test_a_job_makes_a_dry_run_then_starts_a_cluster_and_trains(job):
    code, calls, err = job("gsm8k", "trainer.seed=1")
    assert code == 0, err
    assert calls[0] == f"rl train gsm8k {KEYS} trainer.seed=1 --dry-run"
    assert calls[-1] == f"rl train gsm8k {KEYS} trainer.seed=1"
    started = [call for call in calls if call.startswith("ray ")]
    assert sorted(started) == [
        "ray start --address=10.0.0.1:6379 --num-gpus=8 --block",
        "ray start --head --node-ip-address=10.0.0.1 --port=6379 --num-gpus=8 --block",
    ]
    steps = [call for call in calls if call.startswith("srun ") and "ray start" in call]
    assert any("--nodelist=node1 --overlap ray start --head" in step for step in steps)
    assert any("--exclude=node1 --overlap ray start --address" in step for step in steps)


def test_both_parts_of_the_cluster_and_the_run_share_a_token_that_is_new_in_every_job(job, tmp_path: Path):
    tokens = []
    for _ in range(2):
        assert job("gsm8k")[0] == 0
        shown = {line.partition(" ")[2] for line in _of_cluster(tmp_path)}
        assert len(shown) == 1, shown
        mode, _, token = shown.pop().partition(" ")
        assert (mode, len(token)) == ("token", 64)
        tokens.append(token)
        (tmp_path / "calls.auth").unlink()
    assert tokens[0] != tokens[1]
    assert job("gsm8k", RAY_AUTH_MODE="disabled")[0] == 0
    assert {line.partition(" ")[2] for line in _of_cluster(tmp_path)} == {"disabled "}


def _of_cluster(directory: Path) -> list[str]:
    """Program, mode and token of the two `ray start` commands, of the query of the cluster's size, and of the run."""
    lines = (directory / "calls.auth").read_text().splitlines()
    programs = [line for line in lines if line.partition(" ")[0] in ("ray", "python", "rl")][1:]  # without the dry run
    assert {line.partition(" ")[0] for line in programs} == {"ray", "python", "rl"}
    return programs


def test_a_dry_run_and_a_mistake_start_nothing(job):
    code, calls, _ = job("gsm8k", RL_DRY_RUN="1")
    assert (code, [call.partition(" ")[0] for call in calls]) == (0, ["rl"])
    code, calls, _ = job("gsm8k", "trainer.wrong=1")
    assert (code, [call.partition(" ")[0] for call in calls]) == (1, ["rl"])
    code, calls, err = job()
    assert (code, calls) == (2, [])
    assert "usage: sbatch" in err


def test_a_missing_node_ends_the_job_before_training(job):
    code, calls, err = job("gsm8k", NODES_THAT_JOIN="1", RL_NODES_WAIT_S="2")
    assert code == 1
    assert "only 1 of 2 nodes joined Ray within 2 s" in err
    assert any(call.startswith("python ") for call in calls)
    assert not any(call.startswith("rl ") and "--dry-run" not in call for call in calls)


def test_one_node_needs_no_broadcast(job):
    code, calls, _ = job("gsm8k", SLURM_JOB_NUM_NODES="1", NODES_THAT_JOIN="1")
    assert code == 0
    assert calls[-1] == (
        "rl train gsm8k trainer.placement.policy_num_nodes=1 trainer.placement.policy_num_gpus_per_node=8"
    )


def test_the_signal_before_the_jobs_end_reaches_the_run_and_the_job_returns_its_exit_code(job):
    code, calls, err = job("gsm8k", "trainer.slow=1")
    assert code == 130, err
    assert calls[-1] == "saved"


def test_the_script_passes_on_a_signal_that_arrives_before_it_knows_the_runs_process(job, tmp_path: Path):
    delay = tmp_path / "delay.sh"
    delay.write_text("""trap 'case "$BASH_COMMAND" in run=*) sleep 0.5;; esac' DEBUG\n""")
    code, calls, err = job("gsm8k", "trainer.slow=1", BASH_ENV=str(delay))
    assert code == 130, err
    assert calls[-1] == "saved"


def test_the_script_passes_shellcheck():
    subprocess.run([Path(sys.executable).with_name("shellcheck"), SCRIPT], check=True)
