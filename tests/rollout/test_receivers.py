"""`installed_receivers` finds only installed transports; a server imports nothing from its working directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TRANSPORT = """
from rl_core.interfaces import WeightTransport

print("imported")

class Transport(WeightTransport):
    name, is_staged, receiver = "{name}", True, "{name}:Receiver"

    def open(self, *, num_ranks, num_engines): ...
    def sender(self, rendezvous, rank, world_size): ...
    def close(self, rendezvous): ...

transport = Transport()
"""


def write_transport(directory: Path, name: str) -> None:
    """Writes a distribution with an entry point, as an installer would."""
    metadata = directory / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[rl_core.weight_transports]\n{name} = {name}:transport\n")
    (directory / f"{name}.py").write_text(TRANSPORT.format(name=name))


def run_in(directory: Path, *arguments: str, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs Python in `directory`. It imports from `path` first, then from where this process imports."""
    others = [str(Path(place).resolve()) for place in sys.path if place]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), *others])}
    environment["RL_CONTROL_TOKEN_FILE"] = str(directory / "token")
    return subprocess.run(
        [sys.executable, *arguments], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )


def test_a_transport_in_the_working_directory_does_not_count_as_installed(tmp_path: Path):
    here, site = tmp_path / "here", tmp_path / "site"
    write_transport(here, "lying_about")
    write_transport(site, "properly_installed")
    code = "from rl_rollout.transports.receivers import installed_receivers as found; print(*sorted(found()))"
    ran = run_in(here, "-c", code, path=(site, here))
    imported, receivers = ran.stdout.splitlines()
    assert imported == "imported"
    assert "properly_installed:Receiver" in receivers.split()
    assert "FilesReceiver" in receivers
    assert "lying_about" not in receivers


def test_a_server_imports_nothing_from_its_working_directory(tmp_path: Path):
    write_transport(tmp_path, "lying_about")
    keys = ("trainer.policy.model.path=model", "generator.inference_engine.weight_sync_backend=lying_about")
    ran = run_in(tmp_path, "-m", "rl_rollout.vllm.serve", "quickstart", *keys)
    assert ran.returncode == 2, ran.stderr
    assert "'lying_about' is not among the installed" in ran.stderr
    assert "imported" not in ran.stdout
