"""Writing a run's checkpoints: at once, or in the background while training goes on (`trainer.async_save`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from rl_core.errors import DeadlineError
from rl_core.trainer.checkpoint import (
    RunState,
    begin_checkpoint,
    complete_checkpoint,
    delete_old_checkpoints,
    save_checkpoint,
    step_of,
)
from rl_core.trainer.models import Models

_POLL_S = 0.05


class CheckpointSaver:
    """Writes checkpoints, one at a time. One that is written in the background is completed at the first step boundary
    at which all ranks have their files: until then it is a partial directory that no run resumes from.

    consumes     states of the run (`save`)
    produces     complete checkpoints, of which `on_complete` hears
    waits for    the ranks: `save` for their files or, in the background, their copies and the save before; `finish`
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
    ):
        self._root = root
        self._models = models
        self._keep = keep
        self._in_background = in_background
        self._timeout_s = timeout_s
        self._on_complete = on_complete
        self._partial: Path | None = None

    async def save(self, state: RunState) -> None:
        """Writes the checkpoint of `state.step`; in the background, it starts to. Raises what the save before met."""
        await self.finish()
        if self._in_background:
            partial = begin_checkpoint(self._root, state)
            await self._models.start_saving(partial)
            self._partial = partial
        else:
            self._completed(await save_checkpoint(self._root, state, self._models.save_state))

    async def poll(self) -> None:
        """Completes the checkpoint in the background if all ranks have their files. Raises what went wrong with it."""
        if self._partial is not None and await self._models.has_saved():
            partial, self._partial = self._partial, None
            # Flushing large files takes seconds, in which the engine's answers can be read.
            self._completed(await asyncio.to_thread(complete_checkpoint, partial))

    async def finish(self) -> None:
        """Waits until no checkpoint is in the background. Raises what went wrong with it, DeadlineError."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._timeout_s
        while self._partial is not None:
            await self.poll()
            if self._partial is not None and clock() > deadline:
                raise DeadlineError(
                    f"{self._partial}: waited {self._timeout_s:g} s (trainer.worker_timeout_s) for the ranks to write "
                    "this checkpoint in the background; the one before it is complete. Is the storage too slow or full?"
                )
            await asyncio.sleep(_POLL_S if self._partial is not None else 0)

    def _completed(self, path: Path) -> None:
        delete_old_checkpoints(self._root, self._keep)
        self._on_complete(step_of(path), path)
