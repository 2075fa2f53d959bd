"""Writing a worker's state with torch's distributed checkpoints, and the errors of a failed write.

The module is separate from `state_files`, because torch takes a second to import its distributed checkpoints, and the
controller only reads the lists of states.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException

from rl_core.errors import DiskFullError, StorageError
from rl_core.rank_kit.state_files import CHECKSUM_NOTE
from rl_core.stored_files import is_disk_full, recorded


class FileSystemWriter(filesystem.FileSystemWriter):
    """torch's writer of a rank's files, which also records their checksums for `write_state_list`."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Writes like torch's writer, then reads the files once for their checksums."""
        written = super().write_data(plan, planner)
        directory, names = Path(self.path), {result.storage_data.relative_path for result in written.value()}
        for name, record in recorded(directory, names).items():
            (directory / f"{name}{CHECKSUM_NOTE}").write_text(json.dumps(record.as_json()))
        return written


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
