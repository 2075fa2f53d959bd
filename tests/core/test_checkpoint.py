from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_core.errors import CheckpointError
from rl_core.trainer.state import checkpoint
from rl_core.trainer.state.checkpoint import (
    RunState,
    delete_old_checkpoints,
    list_checkpoints,
    list_unfinished,
    load_state,
)
from tests.core.stored_checkpoints import save_checkpoint, write_weights


def state(step: int) -> RunState:
    return RunState(step=step, next_group=step * 4, restart_groups=(1, 2), kl_coef=0.1, nonfinite_steps=0)


async def test_a_checkpoint_gives_back_the_state_it_was_written_with(tmp_path: Path):
    path = await save_checkpoint(tmp_path, state(3))
    assert load_state(path) == state(3)
    assert list_checkpoints(tmp_path) == [path]


async def test_after_an_unfinished_save_the_previous_checkpoint_is_the_newest(tmp_path: Path):
    first = await save_checkpoint(tmp_path, state(9))

    async def killed(directory: Path) -> None:
        await write_weights(directory)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await save_checkpoint(tmp_path, state(10), killed)
    assert list_checkpoints(tmp_path) == [first]
    second = await save_checkpoint(tmp_path, state(10))
    assert list_checkpoints(tmp_path) == [first, second]


@pytest.mark.parametrize("damage", ["truncate", "remove"])
async def test_a_damaged_checkpoint_is_refused_with_the_file_named(tmp_path: Path, damage: str):
    path = await save_checkpoint(tmp_path, state(3))
    weights = path / "policy" / "weights.bin"
    weights.write_bytes(b"x" * 10) if damage == "truncate" else weights.unlink()
    with pytest.raises(
        CheckpointError, match=r"weights\.bin (has 10 bytes|is missing); expected 1000 bytes.*resume_path"
    ):
        load_state(path)


@pytest.mark.parametrize("name", ["complete.json", "run.json"])
@pytest.mark.parametrize("content", [b'{"step": 3, "rest', b"[]", b"\xff\xfe"])
async def test_an_unreadable_json_file_is_refused_with_its_name(tmp_path: Path, name: str, content: bytes):
    path = await save_checkpoint(tmp_path, state(3))
    listing = json.loads((path / "complete.json").read_text())
    (path / name).write_bytes(content)
    if name == "run.json":
        (path / "complete.json").write_text(json.dumps(listing | {name: len(content)}))
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read .*this checkpoint is damaged.*resume_path"):
        load_state(path)


async def test_a_state_of_another_version_is_refused(tmp_path: Path):
    path = await save_checkpoint(tmp_path, state(3))
    run = (path / "run.json").read_text()
    (path / "run.json").write_text(run.replace('"next_group"', '"nxet_group"'))
    with pytest.raises(CheckpointError, match=r"run\.json: this version cannot read the run state"):
        load_state(path)


async def test_a_directory_without_the_list_of_its_files_is_no_checkpoint(tmp_path: Path):
    path = await save_checkpoint(tmp_path, state(3))
    (path / "complete.json").unlink()
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        load_state(path)


async def test_only_the_newest_checkpoints_are_kept(tmp_path: Path):
    for step in (8, 9, 10, 100):
        await save_checkpoint(tmp_path, state(step))
    delete_old_checkpoints(tmp_path, -1)
    assert len(list_checkpoints(tmp_path)) == 4
    delete_old_checkpoints(tmp_path, 2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000010", "step_000100"]
    delete_old_checkpoints(tmp_path, 0)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000100"], "the newest one is kept even at 0"


async def test_a_flipped_bit_in_any_file_of_a_checkpoint_is_found(tmp_path: Path):
    path = await save_checkpoint(tmp_path, state(3))
    for file in sorted(path.rglob("*")):
        written = file.read_bytes() if file.is_file() else b""
        for place in {0, len(written) // 2, len(written) - 1} if written else ():
            file.write_bytes(written[:place] + bytes([written[place] ^ 1]) + written[place + 1 :])
            with pytest.raises(CheckpointError):
                load_state(path)
        if written:
            file.write_bytes(written)
    assert load_state(path) == state(3)


async def test_a_partly_removed_checkpoint_is_ignored(tmp_path: Path):
    """A kill during `rmtree` leaves some of the files. The directory is renamed first, because otherwise it could look
    complete."""
    path = await save_checkpoint(tmp_path, state(3))
    await save_checkpoint(tmp_path, state(4))
    seen: list[list[str]] = []

    def record(directory: Path, *_: object, **__: object) -> None:
        seen.append([other.name for other in list_checkpoints(tmp_path)])

    remove, checkpoint.shutil.rmtree = checkpoint.shutil.rmtree, record
    try:
        delete_old_checkpoints(tmp_path, 1)
    finally:
        checkpoint.shutil.rmtree = remove
    assert seen[-1] == ["step_000004"]
    assert not path.exists()
    assert list_unfinished(tmp_path), "the remains must be listed, so that the next run removes them"


async def test_a_checkpoint_that_lists_only_file_sizes_can_be_loaded(tmp_path: Path):
    path = await save_checkpoint(tmp_path, state(3))
    listing = json.loads((path / "complete.json").read_text())
    sizes = {name: entry["bytes"] for name, entry in listing.items()}
    (path / "complete.json").write_text(json.dumps(sizes))
    assert load_state(path) == state(3)
