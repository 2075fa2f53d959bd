"""The distributions to be published, built once per session."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.installing import uv
from tests.workspace.imports import ROOT


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels and source distributions of all packages; if RL_DIST is set, the folder that it
    names."""
    if "RL_DIST" in os.environ:
        return Path(os.environ["RL_DIST"])
    folder = tmp_path_factory.mktemp("dist")
    command = [uv(), "build", "--quiet", "--all-packages", "--out-dir", folder]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder
