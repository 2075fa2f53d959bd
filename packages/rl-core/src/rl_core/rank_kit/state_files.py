"""`state.json`, written last, lists the files of a worker's state with sizes and checksums. A directory without it
contains no complete state.

Each rank computes the checksums of its own files (`state_writing.FileSystemWriter`). Before any rank loads the state,
the ranks share the work of checking all files (`require_complete_state`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist

from rl_core.errors import CheckpointError
from rl_core.stored_files import FileRecord, changed, missized, recorded

STATE_LIST = "state.json"
CHECKSUM_NOTE = ".checksums"
"""Suffix of the note that a rank writes next to each of its files, with the file's size and checksum.
`write_state_list` reads and deletes the notes."""


def write_state_list(directory: Path, names: Iterable[str], *, steps_done: int) -> None:
    """Writes the list of the state's files, with sizes, checksums and the number of optimizer steps. One rank calls it
    after all ranks have written their files."""
    wanted = {name for name in names if not name.endswith(CHECKSUM_NOTE)}
    notes = {path.name.removesuffix(CHECKSUM_NOTE): path for path in directory.glob(f"*{CHECKSUM_NOTE}")}
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
