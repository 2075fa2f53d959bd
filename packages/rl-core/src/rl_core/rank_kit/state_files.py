"""`state.json`, written last, lists the files of a worker's state with sizes and checksums. A directory without it
contains no complete state.

Each rank computes the checksums of its own files (`FileSystemWriter`). Before any rank loads the state, the ranks share
the work of checking all files (`require_complete_state`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException

from rl_core.errors import CheckpointError, DiskFullError, StorageError
from rl_core.stored_files import FileRecord, changed, is_disk_full, missized, recorded

STATE_LIST = "state.json"
_OF_A_RANK = ".checksums"
"""Suffix of a note with the size and checksum of one file, which the rank writes next to the file. `write_state_list`
reads and deletes the notes."""


class FileSystemWriter(filesystem.FileSystemWriter):
    """torch's writer of a rank's files, which also records their checksums for `write_state_list`."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Writes like torch's writer, then reads the files once for their checksums."""
        written = super().write_data(plan, planner)
        directory, names = Path(self.path), {result.storage_data.relative_path for result in written.value()}
        for name, record in recorded(directory, names).items():
            (directory / f"{name}{_OF_A_RANK}").write_text(json.dumps(record.as_json()))
        return written


def write_state_list(directory: Path, names: Iterable[str], *, steps_done: int) -> None:
    """Writes the list of the state's files, with sizes, checksums and the number of optimizer steps. One rank calls it
    after all ranks have written their files."""
    wanted = {name for name in names if not name.endswith(_OF_A_RANK)}
    notes = {path.name.removesuffix(_OF_A_RANK): path for path in directory.glob(f"*{_OF_A_RANK}")}
    files = {name: FileRecord.from_json(json.loads(path.read_text())) for name, path in notes.items()}
    files |= recorded(directory, wanted - files.keys())
    listed = {name: files[name].as_json() for name in sorted(wanted)}
    (directory / STATE_LIST).write_text(json.dumps({"steps_done": steps_done, "files": listed}, indent=2) + "\n")
    for path in notes.values():
        path.unlink()


def require_complete_state(directory: Path) -> int:
    """Checks a state and returns its number of optimizer steps. All ranks call it; each checks a part of the files.

    Raises:
        CheckpointError: the list is missing or unreadable, a file is missing or truncated, or a file that this rank
            checks has changed.
    """
    path = directory / STATE_LIST
    try:
        listed = json.loads(path.read_text())
        files = {name: FileRecord.from_json(entry) for name, entry in listed["files"].items()}
        steps_done: int = listed["steps_done"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: missing or incomplete ({error}); resume from an earlier checkpoint") from error
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    own = {name: files[name] for name in sorted(files)[rank::num_ranks]}
    damage = missized(directory, files) or changed(directory, own)
    if damage is not None:
        raise CheckpointError(f"{damage}; resume from an earlier checkpoint")
    return steps_done


def listed_files(directory: Path) -> dict[str, FileRecord]:
    """Returns the records of all files that any `state.json` below `directory` lists, by path relative to `directory`.
    Unreadable lists and files without a checksum are left out."""
    files: dict[str, FileRecord] = {}
    for path in directory.rglob(STATE_LIST):
        above = path.parent.relative_to(directory)
        try:
            listed = json.loads(path.read_text())["files"].items()
            records = {str(above / name): FileRecord.from_json(entry) for name, entry in listed}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
        files |= {name: record for name, record in records.items() if record.crc32 is not None}
    return files


def state_not_written(directory: Path, error: BaseException, how: str = "") -> Exception:
    """Returns the exception to raise for a failed write: DiskFullError if the disk was full, StorageError for other
    failures of the storage, RuntimeError for anything else, such as a lost rank.

    Args:
        directory: the state's directory.
        error: the exception of torch's writer.
        how: how the state was written, e.g. "in the background", for the message.
    """
    failures = [e for e, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    what = f"{directory}: could not be written{how and ' '}{how} ({reason_of(error)})"
    # On a full disk, torch may only report an unexpected file position.
    if any(is_disk_full(failure, directory) for failure in failures):
        return DiskFullError(f"disk full: {what}")
    kind = StorageError if all(isinstance(failure, OSError) for failure in failures) else RuntimeError
    return kind(what)


def reason_of(error: BaseException) -> str:
    """The reasons of all ranks in one line. The text of torch's CheckpointException also has every rank's traceback."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    return "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in error.failures.items())
