"""When a checkpoint is complete: written directly, or written in the background while the run continues."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_core.errors import CheckpointError, DeadlineError
from rl_core.stored_files import is_disk_full
from rl_core.trainer.state.checkpoint import RunState, list_checkpoints, list_unfinished, load_state
from rl_core.trainer.state.saving import CheckpointSaver


class RecordedModels:
    """Models that write one file; during a background save they write it when the test calls `write`."""

    def __init__(self) -> None:
        self.directory = Path()
        self.is_written = True
        self.error: Exception | None = None

    async def save_state(self, directory: Path) -> None:
        self.directory = directory
        self.write()

    async def start_saving(self, directory: Path) -> None:
        self.directory, self.is_written = directory, False

    async def has_saved(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.is_written

    async def save_model(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.write()

    def write(self) -> None:
        (self.directory / "weights.bin").write_bytes(b"x" * 1000)
        self.is_written = True


@pytest.fixture
def models() -> RecordedModels:
    return RecordedModels()


@pytest.fixture
def new_saver(tmp_path: Path, models: RecordedModels) -> Callable[..., CheckpointSaver]:
    """Returns a function that makes a saver; `saver.completed` lists the steps of its complete checkpoints."""

    def new(*, in_background: bool = True, timeout_s: float = 60.0, keep: int = -1) -> CheckpointSaver:
        completed: list[int] = []
        saver: Any = CheckpointSaver(
            tmp_path,
            models,  # pyright: ignore[reportArgumentType]
            keep=keep,
            in_background=in_background,
            timeout_s=timeout_s,
            on_complete=lambda step, path: completed.append(step),
        )
        saver.completed = completed
        return saver

    return new


def state(step: int) -> RunState:
    return RunState(step=step, next_group=step * 4, restart_groups=(), kl_coef=0.1, nonfinite_steps=0)


async def test_a_checkpoint_is_complete_when_save_returns_or_once_all_ranks_have_written(tmp_path, models, new_saver):
    saver = new_saver(in_background=False)
    await saver.save(state(1))
    assert saver.completed == [1]
    saver = new_saver()
    await saver.save(state(2))
    await saver.poll()
    assert saver.completed == []
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000001"]
    assert [path.name for path in list_unfinished(tmp_path)] == ["step_000002.partial"]
    models.write()
    await saver.poll()
    await saver.poll()
    assert saver.completed == [2]
    assert load_state(list_checkpoints(tmp_path)[-1]) == state(2)
    assert list_unfinished(tmp_path) == []


async def test_a_save_waits_for_the_previous_one_and_deletes_old_checkpoints_when_complete(tmp_path, models, new_saver):
    saver = new_saver(keep=1, timeout_s=0.2)
    await saver.save(state(1))
    with pytest.raises(DeadlineError, match=r"step_000001\.partial: waited 0\.2 s \(trainer\.worker_timeout_s\)"):
        await saver.save(state(2))
    models.write()
    await saver.save(state(2))
    assert saver.completed == [1]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000001"], "the newest complete one must be kept"
    models.write()
    await saver.finish()
    await saver.finish()
    assert saver.completed == [1, 2]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000002"]


@pytest.mark.parametrize("wait", ["poll", "finish", "save"])
async def test_an_error_in_the_background_is_raised_at_the_next_wait(wait, tmp_path, models, new_saver):
    saver = new_saver()
    await saver.save(state(1))
    models.write()
    models.error = CheckpointError("the disk is full")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="disk is full"):
            await (saver.save(state(2)) if wait == "save" else getattr(saver, wait)())
    assert saver.completed == []
    assert list_checkpoints(tmp_path) == []


async def test_a_kill_during_the_replacement_of_a_model_leaves_no_part_of_it_under_its_name(
    tmp_path: Path, new_saver: Callable[..., CheckpointSaver], monkeypatch: pytest.MonkeyPatch
):
    saver, model = new_saver(), tmp_path / "step_000002"
    assert await saver.export(model)

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if path.exists():
            next(path.iterdir()).unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        await saver.export(model)
    monkeypatch.undo()
    assert not model.exists()
    assert len(list_unfinished(tmp_path)) == 2
    assert await saver.export(model)


async def test_a_full_disk_and_the_first_checkpoint_after_it_are_logged_once(
    models: RecordedModels,
    new_saver: Callable[..., CheckpointSaver],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    saver, write = new_saver(in_background=False), models.write

    def no_room() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(models, "write", no_room)
    for step in (1, 2, 3):
        await saver.save(state(step))
        assert saver.is_behind
    monkeypatch.setattr(models, "write", write)
    await saver.save(state(4))
    await saver.save(state(5))
    full, room = (record.getMessage() for record in caplog.records)
    assert full.startswith("disk full: ")
    assert "step_000001.partial was removed" in full
    assert room.startswith("the disk has room again; wrote ")
    assert room.endswith("step_000004")


def test_an_error_that_is_the_cause_of_its_own_cause_is_no_full_disk():
    """`raise first from second` makes such a cycle if `second` was raised while `first` was handled."""
    first, second = OSError(errno.EIO, "gone"), ValueError("clean-up failed")
    first.__cause__, second.__context__ = second, first
    assert not is_disk_full(first)


@pytest.mark.parametrize("in_background", [False, True])
async def test_a_full_disk_in_a_callback_does_not_count_as_a_full_disk_of_the_checkpoint(
    tmp_path: Path, models: RecordedModels, new_saver: Callable[..., CheckpointSaver], in_background: bool
):
    saver: Any = new_saver(in_background=in_background)

    def copies_elsewhere(step: int, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/elsewhere")

    async def save() -> None:
        await saver.save(state(1))
        models.write()
        await saver.poll()

    saver._on_complete = copies_elsewhere
    with pytest.raises(OSError, match="/elsewhere"):
        await save()
    assert not saver.is_behind
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000001"]
    await saver.finish()
