"""A second Ctrl-C ends the process, even if its rank is in a long call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_rank_deep_in_a_long_call_does_not_keep_the_process_alive(start: Path, tmp_path: Path):
    overrides = {
        "trainer.strategy": "tests.examples.stuck:backend",
        "trainer.policy.model.path": start / "model",
        "data.train_data": f"[{start / 'train.parquet'}]",
        "data.val_data": f"[{start / 'few.parquet'}]",
        "trainer.run_dir": tmp_path / "run",
        "trainer.train_batch_size": 8,
        "trainer.policy_mini_batch_size": 8,
        "generator.n_samples_per_prompt": 4,
        "trainer.eval_before_train": "false",
    }
    command = [Path(sys.executable).with_name("rl"), "train", "quickstart"]
    command += [f"{key}={value}" for key, value in overrides.items()]
    # The rank's call alone would take ten minutes; 250 s are enough for the start on a busy machine.
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 130, ended.stderr[-3000:]
    assert "did not close: still busy after 5 s" in ended.stderr
    assert not any(word in ended.stderr for word in ("Traceback", "Fatal", "terminate called")), ended.stderr[-3000:]
