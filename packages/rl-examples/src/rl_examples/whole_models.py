"""Makes the start models of recipes. If a directory holds an incomplete model, the model is made again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from rl_core.config.file_checks import TOKENIZER_FILES
from rl_core.stored_files import sync, sync_all


def is_whole(directory: Path) -> bool:
    """Whether the directory has a configuration, a tokenizer and complete weight files."""
    try:
        json.loads((directory / "config.json").read_bytes())
        weights = sorted(directory.glob("*.safetensors"))
        has_tokenizer = any((directory / name).is_file() for name in TOKENIZER_FILES)
        return bool(weights) and has_tokenizer and all(map(_is_whole_file, weights))
    except (OSError, ValueError):
        return False


def is_to_be_made(directory: Path) -> bool:
    """Whether the directory is missing or holds an incomplete model. An empty directory belongs to the user and is left
    for a later check to report."""
    return not directory.exists() or (directory.is_dir() and any(directory.iterdir()) and not is_whole(directory))


def make_whole(directory: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` make a model in a temporary directory, then moves the model into place. So a kill or a crash of the
    machine leaves no half-written model in `directory`. Replaces an incomplete model, but keeps a complete model that
    another run has made meanwhile."""
    partial = directory.with_name(f"{directory.name}.partial{os.getpid()}")
    for left in directory.parent.glob(f"{directory.name}.partial*"):
        if not _is_running(left.name.removeprefix(f"{directory.name}.partial")):
            shutil.rmtree(left, ignore_errors=True)
    try:
        write(partial)
        sync_all(partial)
        if directory.exists() and not is_whole(directory):
            shutil.rmtree(directory)
        if not directory.exists():
            partial.rename(directory)
            sync(directory.parent)
    except OSError:
        if not is_whole(directory):
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_whole_file(path: Path) -> bool:
    """Whether a safetensors file is complete. Such a file consists of eight bytes with the header's length, the header
    with each tensor's position, and the tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            return False
        header = json.loads(file.read(length))
    end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    return path.stat().st_size == 8 + length + end


def _is_running(pid: str) -> bool:
    if not pid.isdigit():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
