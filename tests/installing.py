"""Installs packages for a test into a directory outside of this environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.workspace.imports import ROOT

COMMANDS = Path(sys.executable).parent


def uv() -> str | Path:
    """The executable `uv`: from PATH, else the one that `make setup` downloaded."""
    found = shutil.which("uv") or next(ROOT.glob(".tools/uv-*/bin/uv"), None)
    assert found is not None, "found no uv on PATH or in .tools: run `make setup`"
    return found


def find_links() -> list[str]:
    """The locations in PIP_FIND_LINKS, as arguments of uv."""
    return [f"--find-links={place}" for place in os.environ.get("PIP_FIND_LINKS", "").split()]


def installed_in(folder: Path, *projects: Path) -> dict[str, str]:
    """Installs copies of the projects into `folder`. Returns the environment variables with which Python finds them, in
    addition to the packages of this environment."""
    left_out = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    sources = [shutil.copytree(project, folder / "source" / project.name, ignore=left_out) for project in projects]
    target = folder / "installed"
    command = [uv(), "--no-config", "pip", "install", "--quiet", "--no-deps", f"--python={sys.executable}"]
    run([*command, *find_links(), f"--target={target}", *sources], dict(os.environ), folder)
    return {"PYTHONPATH": str(target)}


def run(command: list[str | Path], environment: dict[str, str], folder: Path) -> str:
    """The standard output of a command. If the command fails, the test fails with the end of its output."""
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout[-5000:]}\n{result.stderr[-5000:]}"
    return result.stdout
