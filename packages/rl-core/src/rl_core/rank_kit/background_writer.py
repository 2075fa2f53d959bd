"""Saving a worker's state while training continues: the part that suits any format."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from rl_core.errors import DiskFullError, WorkerError
from rl_core.rank_kit.process_group import agree, new_cpu_group
from rl_core.rank_kit.state_writing import state_not_written


class BackgroundWriter:
    """Writes one state at a time while the calling thread continues. Each rank has its own writer; creating it
    is collective."""

    def __init__(self, *, is_alone: bool) -> None:
        self.group: dist.ProcessGroup | None = None if is_alone else new_cpu_group()
        """Process group for the collectives of writing, which must not mix with training's collectives. None for a
        single rank."""
        self._writing: Future[Any] | None = None
        self._found_no_room = False
        self._directory = Path()
        self._finish: Callable[[Any], None] = lambda result: None

    def start(self, directory: Path, write: Callable[[], Future[Any]], finish: Callable[[Any], None]) -> None:
        """Begins to write a state. All ranks call it together. If one rank cannot begin, all raise the same error.

        Args:
            directory: the state's directory; it is created.
            write: copies the state to separate CPU memory, starts writing the copy, and returns the future result.
            finish: called with that result when this rank's files are written, in the thread that calls `is_done`.

        Raises:
            WorkerError: the previous state is still being written.
            CheckpointError: this state cannot be written, or the previous state could not be written. After `is_done`
                has reported that the disk was full, `start` does not report this error again.
            RuntimeError: another rank was lost while the previous state was being written.
        """

        def begin() -> None:
            if not self._found_no_room and not self.is_done():
                raise WorkerError(f"{directory}: cannot be written while {self._directory} is still being written")
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise state_not_written(directory, error, "in the background") from error

        agree(begin)
        try:
            self._writing, self._directory, self._finish = write(), directory, finish
        except OSError as error:
            raise state_not_written(directory, error, "in the background") from error
        self._found_no_room = False

    def is_done(self) -> bool:
        """Whether this rank has written the state and called `finish`, or has no state to write. Never waits.

        Raises:
            CheckpointError: storage failed on this rank or on another.
            RuntimeError: another rank was lost.
        """
        if self._writing is None:
            return True
        if not self._writing.done():
            return False
        try:
            self._finish(self._writing.result())
        except (OSError, RuntimeError, CheckpointException) as error:
            failure = state_not_written(self._directory, error, "in the background")
            self._found_no_room = isinstance(failure, DiskFullError)
            raise failure from error
        self._writing = None
        return True

    @property
    def is_busy(self) -> bool:
        """Whether the writing thread is running. The thread would crash without the process group, so a rank that
        closes while the thread runs must not destroy the group. The group then ends with the process."""
        return self._writing is not None and not self._writing.done()
