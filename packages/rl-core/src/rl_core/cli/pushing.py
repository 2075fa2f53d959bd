"""`rl push`: uploads the model of a run to the hub."""

from __future__ import annotations

from pathlib import Path

import click

from rl_core import hub
from rl_core.errors import ConfigError


def push_run(run: Path, name: str, *, is_private: bool) -> None:
    """Uploads a run's final model, or a model directory, and prints its address on the hub. Raises ConfigError if there
    is no model, `name` is malformed, the user is not logged in, the hub cannot be reached, or the upload fails."""
    if name.count("/") != 1 or not all(name.split("/")):
        raise ConfigError(f"rl push: got {name!r}; expected a name such as me/my-model")
    address = hub.push_model(model_of(run), name, is_private=is_private)
    click.echo(f"{model_of(run)} is at {address}")


def model_of(run: Path) -> Path:
    """The directory that contains the model: `run` itself, or `model` in it. Raises ConfigError if neither contains a
    model."""
    for directory in (run, run / "model"):
        if (directory / "config.json").is_file() and any(directory.glob("*.safetensors")):
            return directory
    saved = sorted(path for path in (run / "model").glob("step_*") if (path / "config.json").is_file())
    remedy = f"to upload the model of a step: rl push {saved[-1]} NAME" if saved else "a run writes it at its end"
    raise ConfigError(
        f"rl push: {run} has no model (config.json and *.safetensors, there or in {run / 'model'}); {remedy}. If "
        "trainer.export_path was set, use that directory"
    )
