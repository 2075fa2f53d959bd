"""Writes a run's checkpoints, either at once or in the background while training continues (`trainer.async_save`)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_core.errors import DeadlineError, DiskFullError
from rl_core.stored_files import is_disk_full
from rl_core.trainer.state.checkpoint import (
    PARTIAL,
    RunState,
    after_making_room,
    begin_checkpoint,
    complete_checkpoint,
    delete_old_checkpoints,
    partial_path,
    remove_complete,
    remove_unfinished,
    step_of,
)
from rl_core.trainer.state.remote_checkpoints import CheckpointCopies
from rl_core.trainer.state.stored_groups import StartedGroup, StoredGroup
from rl_core.trainer.update.models import Models

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_REPEAT_S = 60.0
"""Minimum number of seconds between two warnings about a full disk. Saving is tried more often, after every step."""


class CheckpointSaver:
    """Writes checkpoints, one at a time. A background save is completed at the first step boundary at which all ranks
    have written their files. Until then it is a partial directory from which no run resumes.

    A full disk does not end the run: the partial files are removed, and `is_behind` tells the loop to save again at the
    next step boundary.

    consumes     states of the run (`save`)
    produces     complete checkpoints, each reported to `on_complete`
    waits for    the ranks: `save` until their files are written or, in the background, until the previous save is
                 complete and the state is copied to memory; `finish` until the last save is complete
    unblocked by the ranks, an error of one of them, or the deadline
    """

    def __init__(
        self,
        root: Path,
        models: Models,
        *,
        keep: int,
        in_background: bool,
        timeout_s: float,
        on_complete: Callable[[int, Path], None],
        fingerprint: Mapping[str, Any] | None = None,
        copies: CheckpointCopies | None = None,
    ):
        self._root = root
        self._models = models
        self._keep = keep
        self._in_background = in_background
        self._timeout_s = timeout_s
        self._on_complete = on_complete
        self._fingerprint = fingerprint
        self._copies = copies
        self._partial: Path | None = None
        self._full: BaseException | None = None
        self._warned_full_at: float | None = None
        self._deadline: float | None = None

    @property
    def is_behind(self) -> bool:
        """Whether the last checkpoint failed because the disk was full."""
        return self._full is not None

    async def save(
        self, state: RunState, finished: Sequence[StoredGroup] = (), started: Sequence[StartedGroup] = ()
    ) -> None:
        """Writes the checkpoint of `state.step`, or starts to write it in the background. First waits for the previous
        background save, and raises its error; a full disk is no error here. Raises DeadlineError if that save takes too
        long."""
        await self._wait()
        self._full = None
        partial, path = partial_path(self._root, state.step), None
        with self._room_for(partial):
            # Writing many long samples takes seconds. A thread does it, so that the event loop can read the engine's
            # answers meanwhile.
            await asyncio.to_thread(
                begin_checkpoint,
                self._root,
                state,
                finished=finished,
                started=started,
                fingerprint=self._fingerprint,
            )
            if self._in_background:
                await self._models.start_saving(partial)
                self._partial, self._deadline = partial, None
            else:
                await self._models.save_state(partial)
                path = complete_checkpoint(partial)
        if path is not None:
            await self._completed(path)

    async def export(self, directory: Path) -> bool:
        """Writes the model atomically in Hugging Face format. Must be called between two steps. Returns False, with a
        warning, if the disk is full."""
        partial = directory.with_name(f"{directory.name}{PARTIAL}")
        remove_unfinished(partial)
        try:
            await self._models.save_model(partial)
            remove_complete(directory)
            partial.rename(directory)
            return True
        except Exception as error:
            if not is_disk_full(error):
                raise
            remove_unfinished(partial)
            logger.warning(
                "disk full: %s was not written (%s); the run continues, and each further step tries to export its own "
                "model until one is written",
                directory,
                error,
            )
            return False

    async def poll(self) -> None:
        """Completes the background checkpoint if all ranks have written their files. If this save failed, raises
        its error; if the disk was full, only sets `is_behind`."""
        if self._partial is None:
            return
        partial, path = self._partial, None
        with self._room_for(partial):
            if await self._models.has_saved():
                # Flushing large files takes seconds. A thread does it, so that the event loop can read the engine's
                # answers meanwhile.
                self._partial, path = None, await asyncio.to_thread(complete_checkpoint, partial)
        if path is not None:
            await self._completed(path)

    async def finish(self) -> None:
        """Waits for the background checkpoint. If this run had nothing to save, copies earlier checkpoints that the
        remote store lacks.

        Raises:
            DeadlineError: the ranks did not write it in time.
            DiskFullError: the disk had no room for the last checkpoint.
            CheckpointError, OSError: writing the checkpoint, or copying it to a remote store, failed.
        """
        await self._wait()
        if self._full is not None:
            raise DiskFullError(
                f"disk full: no room in {self._root} for the run's last checkpoint; {after_making_room(self._root)}"
            ) from self._full
        if self._copies is not None:
            if not self._copies.has_begun:  # this run had nothing to save, but an earlier run's copy may have failed
                await self._copy()
            self._copies.require_sent()

    async def _wait(self) -> None:
        clock = asyncio.get_running_loop().time
        while self._partial is not None:
            await self.poll()
            if self._partial is None:
                return
            # One deadline for all waits for this checkpoint, so that the end of the run does not wait again in full.
            self._deadline = self._deadline or clock() + self._timeout_s
            if clock() > self._deadline:
                raise DeadlineError(
                    f"{self._partial}: waited {self._timeout_s:g} s (trainer.worker_timeout_s) for the ranks to write "
                    "this checkpoint in the background; earlier checkpoints are complete. Is the storage too slow "
                    "or full?"
                )
            await asyncio.sleep(_POLL_S)

    @contextmanager
    def _room_for(self, partial: Path) -> Iterator[None]:
        """Context that handles a full disk: removes the partial checkpoint, and sets `is_behind`."""
        try:
            yield
        except Exception as error:
            if not is_disk_full(error):
                raise
            self._partial, self._full = None, error
            remove_unfinished(partial)
            self._warn_full(partial, error)

    def _warn_full(self, partial: Path, error: Exception) -> None:
        now = time.monotonic()
        if self._warned_full_at is None or now - self._warned_full_at >= _REPEAT_S:
            self._warned_full_at = now
            logger.warning(
                "disk full: %s was removed; the run continues and saves as soon as there is room (%s)", partial, error
            )

    async def _copy(self) -> None:
        """Copies checkpoints to `trainer.ckpt_path`. A thread does it, so that the event loop can read the engine's
        answers meanwhile."""
        if self._copies is not None:
            await self._copies.send_within(self._root, self._timeout_s, keep=self._keep)

    async def _completed(self, path: Path) -> None:
        if self._warned_full_at is not None:
            self._warned_full_at = None
            logger.warning("the disk has room again; wrote %s", path)
        delete_old_checkpoints(self._root, self._keep)
        self._on_complete(step_of(path), path)
        await self._copy()
