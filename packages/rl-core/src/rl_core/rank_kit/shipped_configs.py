"""Configurations of public models in installed packages, so that sizes are known without weights or network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core import plugins
from rl_core.rank_kit.model_shapes import read_config, written_config

GROUP = "rl_core.model_configs"


def shipped_config(path: str | None) -> Path | None:
    """The directory with the shipped `config.json` of the model with this name. None if no installed package has it, or
    if `path` exists locally or is not of the form `owner/name`."""
    if path is None or path.count("/") != 1 or path.startswith((".", "/", "~")) or Path(path).exists():
        return None
    # By import path: several packages may use the same name, because users do not write the names of these plug-ins.
    roots = (plugins.load(GROUP, plugin.value) for plugin in plugins.installed(GROUP))
    return next((root / path for root in roots if (root / path / "config.json").is_file()), None)


def known_config(path: str | None) -> Mapping[str, Any] | None:
    """The fields of a local or cached model's `config.json`, else of a shipped configuration; None if neither
    exists."""
    written = None if path is None else written_config(path)
    if written is None and (directory := shipped_config(path)) is not None:
        return read_config(str(directory))
    return written


def here_or_shipped(path: str | None) -> str | None:
    """The path from which a model's configuration can be read: the model's own path, or the path of a shipped
    configuration if the model has not been downloaded."""
    if path is None or written_config(path) is not None:
        return path
    shipped = shipped_config(path)
    return path if shipped is None else str(shipped)
