"""Checkpoints are copied to a remote store, and a run resumes from there."""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from pathlib import Path
from typing import BinaryIO, NoReturn

import attrs
import fsspec
import pytest
from fsspec.spec import AbstractFileSystem

from rl_core.config import Config, from_mapping, resolve
from rl_core.config.file_checks import check_files
from rl_core.errors import CheckpointError, ConfigError, DeadlineError
from rl_core.trainer import run as trainer_run
from rl_core.trainer.before.data import read_rows
from rl_core.trainer.loop.interrupts import Interrupts
from rl_core.trainer.state.checkpoint import (
    RunState,
    begin_checkpoint,
    complete_checkpoint,
    complete_checkpoints,
    load_state,
)
from rl_core.trainer.state.fingerprint import fingerprint
from rl_core.trainer.state.remote_checkpoints import CheckpointCopies, copies_of, fetch_checkpoint
from rl_core.trainer.state.saving import CheckpointSaver
from tests.core.stored_checkpoints import write_weights
from tests.core.test_saving import RecordedModels


def state_of(step: int) -> RunState:
    return RunState(step=step, next_group=step, restart_groups=(), kl_coef=0.0, nonfinite_steps=0)


def saver(root: Path, address: str, *, keep: int = -1, timeout_s: float = 60) -> CheckpointSaver:
    return CheckpointSaver(
        root,
        RecordedModels(),  # pyright: ignore[reportArgumentType]
        keep=keep,
        in_background=False,
        timeout_s=timeout_s,
        on_complete=lambda step, path: None,
        copies=CheckpointCopies(address),
    )


class Reached(Exception):
    """Ends a run where it would open its directory."""


def reached(config: Config) -> NoReturn:
    raise Reached


@pytest.fixture
def address() -> str:
    return f"memory://{uuid.uuid4().hex}/checkpoints"


async def test_each_checkpoint_is_copied_and_old_copies_are_deleted(tmp_path: Path, address: str):
    saving = saver(tmp_path / "here", address, keep=2)
    for step in (1, 2, 10):
        await saving.save(state_of(step))
    await saving.finish()
    assert CheckpointCopies(address).steps() == ["step_000002", "step_000010"]


async def test_another_machine_resumes_from_the_newest_copy(tmp_path: Path, address: str):
    for step in (2, 3):
        await saver(tmp_path / "here", address).save(state_of(step))
    keys = {"trainer.run_dir": str(tmp_path / "there"), "trainer.ckpt_path": address}
    config = from_mapping(keys)
    assert config.ckpt_dir == tmp_path / "there" / "checkpoints"
    await fetch_checkpoint(config)
    (found,) = complete_checkpoints(config.ckpt_dir)
    assert load_state(found) == state_of(3)
    await fetch_checkpoint(config)  # already downloaded: does nothing
    with pytest.raises(ConfigError, match=r"holds checkpoints \(step_000003\).*resume_mode=none does not resume"):
        await fetch_checkpoint(from_mapping({**keys, "trainer.resume_mode": "none"}))


@pytest.mark.parametrize(("keep", "kept"), [(-1, [1, 2, 3, 4]), (3, [2, 3, 4]), (1, [4])])
async def test_a_run_on_another_machine_keeps_as_many_earlier_copies_as_configured(
    tmp_path: Path, address: str, keep: int, kept: list[int]
):
    first = saver(tmp_path / "here", address)
    for step in (1, 2, 3):
        await first.save(state_of(step))
    CheckpointCopies(address).fetch_newest(tmp_path / "there")
    await saver(tmp_path / "there", address, keep=keep).save(state_of(4))
    assert CheckpointCopies(address).steps() == [f"step_{step:06d}" for step in kept]


async def test_copies_of_steps_that_were_set_aside_are_deleted(tmp_path: Path, address: str):
    saving = saver(tmp_path / "here", address)
    for step in (1, 2, 4):
        await saving.save(state_of(step))
    for name in ("step_000002", "step_000004"):
        (tmp_path / "here" / name).rename(tmp_path / name)
    await saving.save(state_of(3))
    assert CheckpointCopies(address).steps() == ["step_000001", "step_000003"]


async def test_resuming_from_a_copy_reports_changed_settings_and_rows(
    tmp_path: Path, address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    data = {"data.train_data": [str(tmp_path / "train.jsonl")], "data.val_data": [str(tmp_path / "few.jsonl")]}
    keys = {"trainer.ckpt_path": address, "trainer.run_dir": str(tmp_path / "there"), **data}
    for (path,) in data.values():
        Path(path).write_text('{"prompt": "1+1="}\n')
    config = resolve(from_mapping(keys))
    rows = read_rows(config.data.train_data, key="data.train_data", prompt_key="prompt")
    partial = begin_checkpoint(tmp_path / "here", state_of(3), fingerprint=fingerprint(config, rows, [*rows, *rows]))
    await write_weights(partial)
    complete_checkpoint(partial)
    CheckpointCopies(address).send(tmp_path / "here")
    monkeypatch.setattr(trainer_run, "open_run_directory", reached)
    with pytest.raises(Reached):
        await trainer_run._train(resolve(from_mapping({**keys, "trainer.train_batch_size": 8})), 0.0, Interrupts())
    assert "those of step_000003: trainer.train_batch_size: " in caplog.text
    assert "data.val_data: the rows differ from those of step_000003" in caplog.text


async def test_a_copy_that_was_cut_off_is_no_checkpoint_and_is_made_again(tmp_path: Path, address: str):
    await saver(tmp_path / "here", address).save(state_of(1))
    fsspec.filesystem("memory").rm(f"{address.removeprefix('memory:/')}/step_000001/complete.json")
    copies = CheckpointCopies(address)
    assert copies.steps() == []
    copies.send(tmp_path / "here")
    assert copies.steps() == ["step_000001"]


async def test_a_step_trained_again_is_no_checkpoint_until_all_its_files_are_copied(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
):
    await saver(tmp_path / "before", address).save(state_of(1))
    copy = shutil.copyfileobj

    def copies_run_state(source: BinaryIO, target: BinaryIO, length: int) -> None:
        if not str(source.name).endswith("run.json"):
            raise OSError("the network failed")
        copy(source, target, length)

    monkeypatch.setattr(shutil, "copyfileobj", copies_run_state)
    await saver(tmp_path / "again", address).save(attrs.evolve(state_of(1), kl_coef=0.5))
    monkeypatch.undo()
    assert CheckpointCopies(address).steps() == []
    CheckpointCopies(address).send(tmp_path / "again")
    CheckpointCopies(address).fetch_newest(tmp_path / "there")
    assert load_state(tmp_path / "there" / "step_000001").kl_coef == 0.5


async def test_a_store_that_fails_is_an_error_only_at_the_end_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    saving = saver(tmp_path / "here", "nowhere://bucket")
    await saving.save(state_of(1))
    assert "the next checkpoint tries again" in caplog.text
    assert len(complete_checkpoints(tmp_path / "here")) == 1
    with pytest.raises(CheckpointError, match="the run's directory has them all"):
        await saving.finish()


async def test_a_download_that_fails_is_an_error_of_the_key(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
):
    await saver(tmp_path / "here", address).save(state_of(1))

    def fails(*_: object) -> None:
        raise OSError("the network failed")

    monkeypatch.setattr(shutil, "copyfileobj", fails)
    config = from_mapping({"trainer.run_dir": str(tmp_path / "there"), "trainer.ckpt_path": address})
    with pytest.raises(CheckpointError, match=r"^trainer\.ckpt_path: the newest checkpoint .* \(the network failed\)"):
        await fetch_checkpoint(config)


async def test_an_incomplete_local_checkpoint_is_replaced_by_the_remote_one(tmp_path: Path, address: str):
    await saver(tmp_path, address).save(state_of(1))
    (tmp_path / "step_000001" / "complete.json").unlink()
    CheckpointCopies(address).fetch_newest(tmp_path)
    assert load_state(tmp_path / "step_000001").step == 1


async def test_a_resumed_run_with_nothing_left_to_save_copies_what_the_store_lacks(tmp_path: Path, address: str):
    await saver(tmp_path, "nowhere://bucket").save(state_of(1))
    await saver(tmp_path, address).finish()
    assert CheckpointCopies(address).steps() == ["step_000001"]


class SilentStore(AbstractFileSystem):
    """A store that never answers."""

    protocol = "silent"

    def exists(self, path: str, **_: object) -> bool:
        threading.Event().wait()
        return False


async def test_a_run_waits_only_until_the_deadline_for_a_store_that_never_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    fsspec.register_implementation("silent", SilentStore, clobber=True)
    saving = saver(tmp_path / "here", "silent://bucket", timeout_s=0.2)
    begun = time.monotonic()
    for step in (1, 2):
        await saving.save(state_of(step))
    assert len(complete_checkpoints(tmp_path / "here")) == 2
    assert caplog.text.count("silent://bucket: checkpoints not copied, the store does not answer") == 2
    with pytest.raises(CheckpointError, match=r"no answer within 0\.2 s \(trainer\.worker_timeout_s\)"):
        await saving.finish()
    config = from_mapping(
        {
            "trainer.run_dir": str(tmp_path / "there"),
            "trainer.ckpt_path": "silent://bucket",
            "trainer.worker_timeout_s": 0.2,
        }
    )
    with pytest.raises(DeadlineError, match=r"ckpt_path: silent://bucket did not answer within 0\.2 s"):
        await fetch_checkpoint(config)
    assert time.monotonic() - begun < 200


class ForbiddenStore(AbstractFileSystem):
    """A store whose content this user may not see."""

    protocol = "forbidden"

    def exists(self, path: str, **_: object) -> bool:
        raise PermissionError("Forbidden")


@pytest.mark.parametrize("mode", ["latest", "none"])
async def test_a_store_that_may_not_be_read_is_an_error_of_the_key_before_a_run(tmp_path: Path, mode: str):
    fsspec.register_implementation("forbidden", ForbiddenStore, clobber=True)
    settings = {"run_dir": str(tmp_path), "ckpt_path": "forbidden://bucket", "resume_mode": mode}
    with pytest.raises(ConfigError, match=r"^trainer\.ckpt_path: forbidden://bucket cannot be read: Forbidden"):
        await fetch_checkpoint(from_mapping({"trainer": settings}))


def test_only_checkpoints_may_be_at_a_remote_address(tmp_path: Path):
    config = from_mapping({"trainer.run_dir": str(tmp_path), "trainer.export_path": "s3://bucket/model"})
    assert copies_of(config) is None
    with pytest.raises(ConfigError, match=r"trainer\.export_path: s3://bucket/model is a remote address"):
        check_files(config)
