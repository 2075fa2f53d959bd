"""What a run stores: damaged checkpoints and changed prompts are refused, and training continues on a full disk."""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pyarrow.parquet
import pytest
import torch

from rl_core.config import Config
from rl_core.errors import CheckpointError, ConfigError, ConfigErrors, DiskFullError, StorageError, WeightSyncError
from rl_core.interfaces import Action, Callback, Row, StepResult
from rl_core.rank_kit.weight_buckets import pack_buckets
from rl_core.stored_files import is_disk_full
from rl_core.trainer import run as trainer_run
from rl_core.trainer.before.preflight import preflight
from rl_core.trainer.loop.interrupts import Interrupts
from rl_core.trainer.run import run_generation, run_training
from rl_core.trainer.state.checkpoint import list_checkpoints
from rl_rollout.transports.files import FilesTransport
from tests.examples.child_output import exit_code_of
from tests.examples.environments import FirstDigit
from tests.examples.test_resume import require_same_run, train_in_child

BuildConfig = Callable[..., Config]
_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000


@pytest.fixture
def stopped(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, cut back to its state right after the checkpoint of step 4."""
    shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("step_000006", "model"))
    for name in ("metrics.jsonl", "samples.jsonl"):
        lines = (tmp_path / "run" / name).read_text().splitlines(keepends=True)
        (tmp_path / "run" / name).write_text("".join(line for line in lines if json.loads(line)["step"] <= 4))
    return tmp_path / "run"


# --- damage ---------------------------------------------------------------------------------------------------------


def test_a_flipped_byte_in_any_file_of_a_checkpoint_is_found_before_the_run_changes(
    stopped: Path, small_run: BuildConfig
):
    before = left_by(stopped)
    checkpoint = stopped / "checkpoints" / "step_000004"
    for file in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        written = file.read_bytes()
        place = len(written) * 2 // 3
        file.write_bytes(written[:place] + bytes([written[place] ^ 4]) + written[place + 1 :])
        with pytest.raises(CheckpointError, match="step_000004"):
            run_training(small_run(stopped))
        file.write_bytes(written)
    assert left_by(stopped) == before
    run_training(small_run(stopped))  # control: the undamaged checkpoint resumes


def left_by(run_dir: Path) -> dict[str, bytes]:
    """Path → content of the run's files, without the configurations that resumed attempts write."""
    files = (path for path in run_dir.rglob("*") if path.is_file() and not path.name.startswith("config.resumed"))
    return {str(path): path.read_bytes() for path in files}


def test_a_checkpoint_stays_usable_if_a_crash_lost_the_last_metric_rows(stopped: Path, small_run: BuildConfig):
    rows = (stopped / "metrics.jsonl").read_text().splitlines(keepends=True)
    (stopped / "metrics.jsonl").write_text("".join(rows[:-2]) + rows[-2][:40])
    assert train_in_child(small_run(stopped)) == 0
    done = [json.loads(line)["step"] for line in (stopped / "metrics.jsonl").read_text().splitlines()]
    assert done == [0, 1, 2, 5, 6]
    assert not stopped.with_name("run.1").exists()


# --- what is resumed ------------------------------------------------------------------------------------------------


def other_rows(source: Path, target: Path, change: Callable[[pyarrow.Table], pyarrow.Table]) -> str:
    pyarrow.parquet.write_table(change(pyarrow.parquet.read_table(source)), target)
    return str(target)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"trainer__seed": 7}, r"trainer\.seed: got 7, .*step_000004 was made with 0"),
        ({"data__shuffle": False}, r"data\.shuffle: got false, .* was made with true"),
        ({"data__train_data": "fewer"}, r"data\.train_data: has 300 rows, .* was made with 400 rows"),
        ({"data__train_data": "reversed"}, r"data\.train_data: .* the same number of other rows"),
    ],
    ids=["seed", "shuffle", "fewer rows", "another order"],
)
def test_changes_to_the_groups_prompts_are_refused_before_anything_is_written(
    overrides: dict[str, object], key: str, stopped: Path, small_run: BuildConfig, start: Path, tmp_path: Path
):
    changes: Mapping[object, Callable[[pyarrow.Table], pyarrow.Table]] = {
        "fewer": lambda table: table.slice(0, 300),
        "reversed": lambda table: table.take(list(reversed(range(len(table))))),
    }
    change = changes.get(overrides.get("data__train_data"))
    if change is not None:
        overrides = {"data__train_data": [other_rows(start / "train.parquet", tmp_path / "other.parquet", change)]}
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    for begin in (preflight, run_training):
        with pytest.raises(ConfigError, match=key) as raised:
            begin(small_run(stopped, **overrides))
        assert "trainer.resume_mode=none" in str(raised.value)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_several_changes_to_the_groups_prompts_are_listed_together(stopped: Path, small_run: BuildConfig):
    with pytest.raises(ConfigErrors) as raised:
        preflight(small_run(stopped, trainer__seed=3, data__shuffle=False))
    assert [str(error).partition(":")[0] for error in raised.value.errors] == ["trainer.seed", "data.shuffle"]


def test_other_changes_are_named_but_moved_rows_are_no_change(
    stopped: Path, small_run: BuildConfig, start: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    moved = other_rows(start / "train.parquet", tmp_path / "moved.parquet", lambda table: table)
    with caplog.at_level(logging.WARNING):
        preflight(small_run(stopped, data__train_data=[moved], trainer__run_name="elsewhere"))
        assert "resuming with" not in caplog.text
        preflight(small_run(stopped, trainer__train_batch_size=16, generator__n_samples_per_prompt=2))
    (message,) = [record.getMessage() for record in caplog.records if "resuming with" in record.getMessage()]
    assert message == (
        "resuming with settings that differ from those of step_000004: trainer.train_batch_size: 8 → 16; "
        "generator.n_samples_per_prompt: 4 → 2"
    )


def test_a_run_names_each_change_once(
    stopped: Path, small_run: BuildConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def begun(config: Config) -> NoReturn:
        raise InterruptedError("the run begins")

    monkeypatch.setattr(trainer_run, "open_run_directory", begun)
    with pytest.raises(InterruptedError, match="the run begins"):
        run_training(small_run(stopped, generator__n_samples_per_prompt=2))
    assert caplog.text.count("those of step_000004: generator.n_samples_per_prompt: 4 → 2") == 1


def test_changed_held_out_rows_cause_a_warning(
    stopped: Path, small_run: BuildConfig, start: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    message = "data.val_data: the rows differ from those of step_000004"
    same = other_rows(start / "few.parquet", tmp_path / "same.parquet", lambda table: table)
    preflight(small_run(stopped, data__val_data=[same]))
    assert message not in caplog.text
    fewer = other_rows(start / "few.parquet", tmp_path / "fewer.parquet", lambda table: table.slice(0, 30))
    preflight(small_run(stopped, data__val_data=[fewer]))
    assert message in caplog.text


def test_a_length_limit_that_selects_other_prompts_is_refused(stopped: Path, small_run: BuildConfig, tmp_path: Path):
    file = tmp_path / "mixed.jsonl"
    rows = [{"prompt": "1" * length + "+1=", "answer": "2", "env_class": "arithmetic"} for length in range(1, 33)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    limits = {"data__train_data": [str(file)], "data__on_long_prompt": "drop", "trainer__max_training_steps": 2}
    run_training(small_run(tmp_path / "new", **limits, trainer__max_prompt_length=20))
    with pytest.raises(ConfigError, match=r"trainer\.max_prompt_length: leaves 27 prompts, .* was made with 17"):
        run_training(
            small_run(tmp_path / "new", **{**limits, "trainer__max_training_steps": 4}, trainer__max_prompt_length=30)
        )


def test_a_run_starts_by_removing_folders_of_killed_runs(
    small_run: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    left = tmp_path / "temporary" / "rl-weights-x-1-old"
    left.mkdir(parents=True)
    os.utime(left, (0, 0))
    monkeypatch.setattr(tempfile, "tempdir", str(left.parent))
    # Skips training, because an engine may remove the folder too.
    monkeypatch.setattr(Interrupts, "run", lambda self, train: None)
    run_training(small_run(tmp_path / "run"))
    assert not left.exists()


# --- full disks -----------------------------------------------------------------------------------------------------


class MakesRoomAtStep5(Callback):
    """Fills the disk at the start, and removes the filler at step 5."""

    def on_run_start(self, run_dir: Path, first_step: int, last_step: int) -> None:
        self._filler = run_dir / "filler"
        fill(self._filler)

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        assert shutil.disk_usage(self._filler.parent).free < 50_000 or step >= 5
        if step == 5:
            self._filler.unlink()


class FillsAtStep3(Callback):
    """Fills the disk at step 3 and leaves it full."""

    def on_run_start(self, run_dir: Path, first_step: int, last_step: int) -> None:
        self._run_dir = run_dir

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 3:
            fill(self._run_dir / "filler")


class RemovesRunAtStep3(Callback):
    def on_run_start(self, run_dir: Path, first_step: int, last_step: int) -> None:
        self._run_dir = run_dir

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 3:
            shutil.rmtree(self._run_dir)


class RemovesRunAfterStep2(FirstDigit):
    """Removes the run's directory while step 3 is played."""

    def __init__(self, row: Row, options: Mapping[str, Any]):
        super().__init__(row, options)
        self._run_dir = Path(options["run_dir"])

    async def step(self, action: Action) -> StepResult:
        if (self._run_dir / "checkpoints" / "step_000002").exists():
            shutil.rmtree(self._run_dir)
        return await super().step(action)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                pass


def on_small_disk(folder: Path, function: Callable[[], None]) -> int:
    """Runs `function` in a forked process, and returns its exit code. Only that process sees a disk of 24 MiB at
    `folder`. The disk's files are copied to `<folder>.left`, and log messages go to `<folder>.log`.
    """

    def inside() -> None:
        user, group = os.getuid(), os.getgid()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_NEW_USER | _NEW_MOUNTS) != 0:
            os._exit(77)  # tells the parent to skip the test
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        mount = ["mount", "-t", "tmpfs", "-o", "size=24M", "none", str(folder)]
        if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
            os._exit(77)
        logging.getLogger().addHandler(logging.FileHandler(folder.with_suffix(".log")))
        try:
            function()
        finally:
            shutil.copytree(folder, folder.with_suffix(".left"), ignore=shutil.ignore_patterns("filler"))

    folder.mkdir()
    process = multiprocessing.get_context("fork").Process(target=inside)
    process.start()
    code = exit_code_of(process, within_s=200)
    if code == 77:
        pytest.skip("a user may not mount a disk on this machine")
    return code


def test_a_sync_without_room_names_its_folder(tmp_path: Path):
    disk = tmp_path / "disk"
    transport = FilesTransport(directory=str(disk))

    def send() -> None:
        rendezvous = transport.open(num_ranks=1, num_engines=1)
        buckets = pack_buckets([("weight", torch.zeros(30 << 20, dtype=torch.uint8))], 1 << 30)
        message = f"weight version 1 to {disk}/rl-weights-.*: .*No space left"
        with pytest.raises(WeightSyncError, match=message) as raised:
            transport.sender(rendezvous, 0, 1).send(buckets, 1)
        assert is_disk_full(raised.value)
        transport.close(rendezvous)

    assert on_small_disk(disk, send) == 0


@pytest.mark.parametrize("async_save", [False, True], ids=["at once", "in the background"])
def test_a_run_continues_on_a_full_disk_and_saves_once_there_is_room(
    async_save: bool, small_run: BuildConfig, finished: Path, tmp_path: Path
):
    disk = tmp_path / "disk"
    config = small_run(
        disk / "run", trainer__async_save=async_save, trainer__callbacks=[f"{__name__}:MakesRoomAtStep5"]
    )
    assert on_small_disk(disk, lambda: print(run_training(config))) == 0
    left = tmp_path / "disk.left" / "run"
    require_same_run(left, finished)
    # The checkpoints of steps 2 and 4 found no room. The next one is saved as soon as there is room, at step 5.
    assert [path.name for path in list_checkpoints(left / "checkpoints")] == ["step_000005", "step_000006"]
    assert len(list((left / "checkpoints").iterdir())) == 2
    said = (tmp_path / "disk.log").read_text()
    assert "step_000002.partial was removed; the run continues and saves as soon as there is room" in said
    assert "rows of" in said
    assert "Traceback" not in said


def test_a_run_on_a_full_disk_ends_and_resumes_from_its_last_checkpoint(
    small_run: BuildConfig, finished: Path, tmp_path: Path
):
    disk = tmp_path / "disk"
    config = small_run(disk / "run", trainer__callbacks=[f"{__name__}:FillsAtStep3"])

    def train() -> None:
        with pytest.raises(DiskFullError, match=r"no room in .*; the last complete checkpoint is .*step_000002\. M"):
            run_training(config)
        assert [path.name for path in (disk / "run" / "checkpoints").iterdir()] == ["step_000002"]
        (disk / "run" / "filler").unlink()
        run_training(small_run(disk / "run"))

    assert on_small_disk(disk, train) == 0
    require_same_run(tmp_path / "disk.left" / "run", finished)


class FillsDisk(FirstDigit):
    """Fills the disk of the file `options.filler`."""

    def __init__(self, row: Row, options: Mapping[str, Any]):
        super().__init__(row, options)
        self._filler = Path(options["filler"])

    async def step(self, action: Action) -> StepResult:
        if not self._filler.exists():
            fill(self._filler)
        return await super().step(action)


def test_generation_whose_samples_find_no_room_is_an_error(small_run: BuildConfig, tmp_path: Path):
    disk = tmp_path / "disk"
    config = small_run(
        tmp_path / "run",
        environment__env_class=f"{__name__}:FillsDisk",
        environment__options={"filler": str(disk / "filler")},
    )

    def generate() -> None:
        with pytest.raises(DiskFullError, match=r"disk full: the 160 samples of .*samples\.jsonl are lost; make room"):
            run_generation(config, disk / "samples.jsonl")
        assert [path.name for path in disk.iterdir()] == ["filler"]

    assert on_small_disk(disk, generate) == 0


@pytest.mark.parametrize(
    ("changes", "file"),
    [
        ({"trainer__callbacks": [f"{__name__}:RemovesRunAtStep3"]}, "metrics"),
        ({"environment__env_class": f"{__name__}:RemovesRunAfterStep2"}, "samples"),
    ],
)
def test_a_run_whose_directory_is_removed_fails_but_saves_its_last_step(
    changes: dict[str, Any], file: str, small_run: BuildConfig, tmp_path: Path
):
    config = small_run(tmp_path / "run", environment__options={"run_dir": str(tmp_path / "run")}, **changes)
    with pytest.raises(StorageError, match=rf"run/{file}\.jsonl was removed, .*resume_mode=latest"):
        run_training(config)
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step_000003"]


def test_the_error_of_failing_storage_names_the_file_of_the_run(
    small_run: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    directory = tmp_path / "run" / "checkpoints" / "step_000002.partial"

    def fail(self: Interrupts, train: object) -> NoReturn:
        raise OSError(errno.EROFS, "Read-only file system", failing)

    monkeypatch.setattr(Interrupts, "run", fail)
    failing = str(directory)
    with pytest.raises(
        StorageError, match=r"step_000002\.partial could not be read or written \(Read-only.*resume_mode=latest"
    ):
        run_training(small_run(tmp_path / "run"))
    failing = str(tmp_path / "elsewhere")  # control: an error about any other file is not about the run's storage
    with pytest.raises(OSError, match="elsewhere") as raised:
        run_training(small_run(tmp_path / "run"))
    assert not isinstance(raised.value, StorageError)


class OpensAMissingFile(Callback):
    def on_run_start(self, run_dir: Path, first_step: int, last_step: int) -> None:
        (run_dir / "notes.json").read_text()


def test_a_missing_file_in_a_callback_is_not_reported_as_failing_storage(small_run: BuildConfig, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"notes\.json"):
        run_training(small_run(tmp_path / "run", trainer__callbacks=[f"{__name__}:OpensAMissingFile"]))
