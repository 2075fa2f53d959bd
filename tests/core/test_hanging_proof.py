"""A run that is killed during a model proof leaves no process behind, and the next start removes its folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rl_core.held_folders import make_folder, remove_folder

QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def wait_until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 500  # two interpreters import torch and transformers one after the other
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def has_ended(process: psutil.Process) -> bool:
    """Whether all threads of the process have ended. The main thread may end first; the last thread frees the locks."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() == 1
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_proof_leaves_no_process_and_the_next_start_removes_its_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, file, temporary = tmp_path / "model", tmp_path / "pid", tmp_path / "temporary"
    model.mkdir()
    temporary.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN2))
    program = subprocess.Popen(
        [sys.executable, "-c", f"from tests.core.hanging_proof import main; main({str(model)!r}, {str(file)!r})"],
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    try:
        wait_until(lambda: file.is_file() and file.read_text())
        processes = psutil.Process(program.pid).children(recursive=True)
        assert int(file.read_text()) in [process.pid for process in processes]
        assert len(list(temporary.glob("rl-proof-hanging-*"))) == 2, (
            "one folder for the job and one for the small model"
        )
    finally:
        program.kill()
        program.wait()
    wait_until(lambda: all(map(has_ended, processes)))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    remove_folder(make_folder(tmp_path, "next"))
    assert not list(temporary.glob("rl-*"))
