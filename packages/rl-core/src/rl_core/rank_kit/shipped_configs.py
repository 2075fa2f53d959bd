"""Configurations of public models that installed packages bring: sizes are known without weights or a network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core import plugins
from rl_core.rank_kit.model_proof import written_config
from rl_core.rank_kit.model_shapes import read_config

GROUP = "rl_core.model_configs"


def shipped_config(path: str | None) -> Path | None:
    """The directory that has the `config.json` of the model with this name; None: no installed package brings it, or a
    local directory is meant."""
    if path is None or path.count("/") != 1 or path.startswith((".", "/", "~")) or Path(path).exists():
        return None
    roots = (plugins.load(GROUP, plugin.name) for plugin in plugins.installed(GROUP))
    return next((root / path for root in roots if (root / path / "config.json").is_file()), None)


def known_config(path: str | None) -> Mapping[str, Any] | None:
    """The fields of the `config.json` of a model that is in a local directory or in the hub's cache, or of one that is
    shipped; None: none is there."""
    written = None if path is None else written_config(path)
    if written is None and (directory := shipped_config(path)) is not None:
        return read_config(str(directory))
    return written


def here_or_shipped(path: str | None) -> str | None:
    """Where a model's configuration can be read: its own path, or the directory of one that is shipped where the model
    was not fetched yet."""
    if path is None or written_config(path) is not None:
        return path
    shipped = shipped_config(path)
    return path if shipped is None else str(shipped)
