"""If one of Ray's servers dies or is stopped, a run reports this as its error before Ray ends the run's process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak  # each starts Ray in a process of its own


@pytest.mark.parametrize(
    ("server", "signal", "message"),
    [
        ("raylet", "SIGKILL", r"WorkerError: policy: .*node manager \(raylet\) on this machine died"),
        ("gcs_server", "SIGKILL", r"WorkerError: policy: .*control server \(gcs_server\) at .* died"),
        (
            "raylet",
            "SIGSTOP",
            r"DeadlineError: policy: Ray's object store did not take the batch for forward within 10 s",
        ),
    ],
)
def test_a_lost_or_stopped_server_of_ray_is_an_error_of_the_run(server: str, signal: str, message: str):
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.ray.lost_server", server, signal],
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert re.search(message, ran.stdout)  # Ray prints to the same stream
