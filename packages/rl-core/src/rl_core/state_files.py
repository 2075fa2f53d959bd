"""`state.json`, written last beside the files of a worker's state: it lists them, and without it there is no state."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from rl_core.errors import CheckpointError

STATE_LIST = "state.json"


def write_state_list(directory: Path, names: Iterable[str], *, steps_done: int) -> None:
    """Lists the state's files with their sizes, and the optimizer steps behind it."""
    files = {name: (directory / name).stat().st_size for name in sorted(names)}
    (directory / STATE_LIST).write_text(json.dumps({"steps_done": steps_done, "files": files}, indent=2) + "\n")


def require_complete_state(directory: Path) -> int:
    """The optimizer steps behind a state. Raises CheckpointError if a file of it is missing or cut off."""
    path = directory / STATE_LIST
    try:
        listed = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: missing or incomplete ({error}); resume from an earlier checkpoint") from error
    for name, num_bytes in listed["files"].items():
        path = directory / name
        found = path.stat().st_size if path.is_file() else None
        if found != num_bytes:
            state = "is missing" if found is None else f"has {found} bytes"
            raise CheckpointError(f"{path}: {state}, expected {num_bytes} bytes; resume from an earlier checkpoint")
    return listed["steps_done"]
