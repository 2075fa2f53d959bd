"""Saving a worker's state while training goes on: what every `BackgroundSaver` needs besides its file format."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from rl_core.errors import DiskFullError, WorkerError
from rl_core.rank_kit.process_group import new_cpu_group
from rl_core.rank_kit.state_files import state_not_written


class BackgroundWriter:
    """One state at a time is written while the calling thread goes on. Belongs to one rank; all ranks make theirs
    together."""

    def __init__(self, *, is_alone: bool) -> None:
        self.group: dist.ProcessGroup | None = None if is_alone else new_cpu_group()
        """For the writing's messages between ranks, which must not fall between those of training; None for one rank
        alone."""
        self._writing: Future[Any] | None = None
        self._found_no_room = False
        self._directory = Path()
        self._finish: Callable[[Any], None] = lambda result: None

    def start(self, directory: Path, write: Callable[[], Future[Any]], finish: Callable[[Any], None]) -> None:
        """Begins to write a state.

        Args:
            directory: of the state; is made.
            write: copies the state to memory of the CPU's own, starts writing the copy, and returns the result to come.
            finish: is given that result when this rank's files are there, in the thread that asks `is_done`.

        Raises:
            WorkerError: the state before is still being written.
            CheckpointError: this state cannot be written; or the one before could not, unless it found no room and that
                was told.
        """
        if not self._found_no_room and not self.is_done():
            raise WorkerError(f"{directory}: {self._directory} is still being written, and one state is at a time")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._writing, self._directory, self._finish = write(), directory, finish
        except OSError as error:
            raise state_not_written(directory, error, "in the background") from error
        self._found_no_room = False

    def is_done(self) -> bool:
        """What was started is written and finished on this rank; never waits.

        Raises:
            CheckpointError: the storage failed, on this rank or on another.
            RuntimeError: another rank was lost.
        """
        if self._writing is None:
            return True
        if not self._writing.done():
            return False
        try:
            self._finish(self._writing.result())
        except (OSError, RuntimeError, CheckpointException) as error:
            told = state_not_written(self._directory, error, "in the background")
            self._found_no_room = isinstance(told, DiskFullError)
            raise told from error
        self._writing = None
        return True

    @property
    def is_busy(self) -> bool:
        """Its thread is at work. It would crash without the process group, so a rank that closes leaves the group to
        the end of the process."""
        return self._writing is not None and not self._writing.done()
