"""`state.json`, written last beside the files of a worker's state: it lists them, and without it there is no state."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

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


def state_not_written(directory: Path, error: BaseException, how: str = "") -> Exception:
    """A CheckpointError where the storage failed; else, as when a rank is lost, an error of this program.

    Args:
        directory: of the state.
        error: what torch's writer raised.
        how: "in the background", for the message.
    """
    failures = [e for e, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    kind = CheckpointError if all(isinstance(failure, OSError) for failure in failures) else RuntimeError
    return kind(f"{directory}: could not be written{how and ' '}{how} ({reason_of(error)})")


def reason_of(error: BaseException) -> str:
    """In a line, of all ranks; torch tells it with every rank's traceback, in an exception that is no `Exception`."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    return "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in error.failures.items())
