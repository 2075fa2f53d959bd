"""Trackers and the files that they write. A kill at any byte loses no complete row, and a resumed run records no step
twice.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.config import from_mapping
from rl_core.errors import DataError, PluginError, StorageError
from rl_core.interfaces import Tracker, Trajectory, TrajectoryStep
from rl_core.reports import progress
from rl_core.reports.jsonl import StepLog, read_rows
from rl_core.reports.run_reporter import RunReporter
from rl_core.reports.samples import SamplesWriter, read_samples, sample_of, with_logprobs
from rl_core.reports.trackers import ConsoleTracker, JsonlTracker, TensorBoardTracker, WandbTracker
from rl_core.trainer.update.collate import collate


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def jsonl_tracker(run_dir: Path, first_step: int = 0) -> JsonlTracker:
    return JsonlTracker(None, run_dir, total_steps=10, first_step=first_step)


def log_steps(tracker: Tracker, steps: range, value: float = 0.0) -> None:
    for step in steps:
        tracker.log(step, {"reward/mean": value})
    tracker.close()


def test_a_row_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    tracker = jsonl_tracker(tmp_path)
    tracker.log(3, {"reward/mean": 0.5})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 3, "reward/mean": 0.5}\n'
    tracker.close()


def test_a_resumed_run_has_no_step_twice_and_keeps_the_earlier_bytes(tmp_path):
    log_steps(jsonl_tracker(tmp_path), range(8), value=0.1)
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()[:5]
    log_steps(jsonl_tracker(tmp_path, first_step=5), range(5, 10), value=0.2)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines[:5] == before
    assert steps_in(tmp_path / "metrics.jsonl") == list(range(10))
    assert json.loads(lines[5])["reward/mean"] == 0.2


@given(cut=st.integers(min_value=0, max_value=200), first_step=st.integers(min_value=0, max_value=6))
def test_a_file_cut_at_any_byte_is_continued_without_a_broken_row(tmp_path_factory, cut, first_step):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    lines = [json.dumps({"step": step, "text": "ä ⁻⁴ 語"}, ensure_ascii=False) + "\n" for step in range(5)]
    data = "".join(lines).encode()[:cut]
    path.write_bytes(data)
    # A row is complete once its closing brace is written, with or without the end of its line.
    num_complete = sum(len("".join(lines[: i + 1]).encode()) - 1 <= cut for i in range(5))
    log = StepLog(path, first_step=first_step)
    log.write([{"step": 99}])
    log.close()
    assert steps_in(path) == [*range(min(num_complete, first_step)), 99]


def test_a_process_killed_while_logging_leaves_whole_rows_for_the_next_one(tmp_path):
    program = (
        "import os, signal; from pathlib import Path; from rl_core.reports.trackers import JsonlTracker\n"
        f"tracker = JsonlTracker(None, Path({str(tmp_path)!r}), total_steps=9, first_step=0)\n"
        "for step in range(4): tracker.log(step, {'a': 1.0})\n"
        'tracker._log._file.write(\'{"step": 4, "a\'); tracker._log._file.flush()\n'
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert len(list(read_rows(tmp_path / "metrics.jsonl"))) == 4
    log_steps(jsonl_tracker(tmp_path, first_step=3), range(3, 6))
    assert steps_in(tmp_path / "metrics.jsonl") == list(range(6))


def test_a_broken_line_in_the_middle_is_named_and_the_file_is_left_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\nnot json\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: not a JSON object"):
        jsonl_tracker(tmp_path, first_step=2)
    assert path.read_text() == '{"step": 0}\nnot json\n{"step": 2}\n'


@pytest.mark.parametrize("change", ["removed", "moved", "replaced"])
def test_writing_to_a_moved_or_replaced_file_is_an_error(tmp_path: Path, change: str):
    path = tmp_path / "run" / "metrics.jsonl"
    log = StepLog(path, first_step=0)
    log.write([{"step": 0}])
    path.rename(tmp_path / "moved.jsonl")
    if change == "removed":
        (tmp_path / "moved.jsonl").unlink()
    if change == "replaced":
        path.touch()
    with pytest.raises(
        StorageError, match=r"run/metrics\.jsonl was removed, moved or replaced while .*resume_mode=latest"
    ):
        log.write([{"step": 1}])
    log.close()  # the row is lost; closing the file raises no second error


def test_numbers_that_are_not_finite_are_null_so_that_any_json_reader_reads_the_file(tmp_path):
    tracker = jsonl_tracker(tmp_path)
    tracker.log(1, {"policy/grad_norm": float("inf"), "policy/loss": float("nan")})
    tracker.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail) == {
        "step": 1,
        "policy/grad_norm": None,
        "policy/loss": None,
    }


def trajectory(**changes: object) -> Trajectory:
    step = TrajectoryStep(
        tokens=[5, 6, 7],
        sampled=[False, True, True],
        rollout_logprobs=[0.0, -0.5, -0.25],
        policy_version=[-1, 0, 0],
        reward=1.0,
        stop_reason="length",
    )
    known = {
        "group_id": 4,
        "sample_index": 1,
        "steps": (step,),
        "prompt_text": "1+1=",
        "response_text": "2",
        "start_version": 0,
    }
    return Trajectory(**(known | changes))


def test_samples_come_back_as_they_were_written(tmp_path):
    plain = sample_of(trajectory(metrics={"digits": 1.0}), step=1, purpose="train")
    sequences = collate([trajectory()]).with_columns(old_logprobs=torch.tensor([0.0, -0.5, -0.125]))
    full = with_logprobs(plain, sequences)
    writer = SamplesWriter(tmp_path / "samples.jsonl", first_step=0)
    writer.write([plain, full])
    writer.close()
    assert list(read_samples(tmp_path)) == [plain, full]
    assert "tokens" not in json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[0])
    assert (full.tokens, full.trainer_logprobs) == ([[5, 6, 7]], [[0.0, -0.5, -0.125]])


def test_a_failed_rollout_has_no_reward_and_says_why(tmp_path):
    sample = sample_of(trajectory(steps=(), failure="ValueError: no"), step=1, purpose="eval")
    assert (sample.reward, sample.stop_reason, sample.failure) == (None, None, "ValueError: no")


def test_samples_of_steps_that_are_run_again_are_dropped(tmp_path):
    for first_step, steps in ((0, range(1, 6)), (4, range(4, 7))):
        writer = SamplesWriter(tmp_path / "samples.jsonl", first_step=first_step)
        for step in steps:
            writer.write([sample_of(trajectory(sample_index=i), step=step, purpose="train") for i in range(2)])
        writer.close()
    assert [sample.step for sample in read_samples(tmp_path)] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]


def test_a_repeated_evaluation_keeps_the_training_samples_of_its_step(tmp_path):
    for evaluates_again in (False, True, True):
        writer = SamplesWriter(tmp_path / "samples.jsonl", first_step=3, evaluates_again=evaluates_again)
        for step in (1, 2) if not evaluates_again else ():
            writer.write([sample_of(trajectory(), step=step, purpose="train")])
        for step in (1, 2) if not evaluates_again else (2,):
            writer.write([sample_of(trajectory(), step=step, purpose="eval")])
        writer.close()
    assert [(sample.step, sample.purpose) for sample in read_samples(tmp_path)] == [
        (1, "train"), (2, "train"), (1, "eval"), (2, "eval")
    ]  # fmt: skip


@given(text=st.text(st.characters(), max_size=30))
def test_any_text_survives_even_lone_surrogates_and_odd_line_ends(tmp_path_factory, text):
    run_dir = tmp_path_factory.mktemp("run")
    writer = SamplesWriter(run_dir / "samples.jsonl", first_step=0)
    writer.write([sample_of(trajectory(response_text=text), step=1, purpose="train")])
    writer.close()
    SamplesWriter(run_dir / "samples.jsonl", first_step=2).close()
    assert [sample.response for sample in read_samples(run_dir)] == [text]


def test_a_row_that_is_no_sample_is_named(tmp_path):
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "purpose": "test"}\n')
    with pytest.raises(DataError, match=r"samples\.jsonl, row 1: not a sample"):
        list(read_samples(tmp_path))


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    # TensorBoard reads event files in the order of their names, which contain the second of their creation and end in a
    # counter of this process. Both files of this test may be from one second. `10` would then be read before `9`, so
    # the counter starts at 0. A real resumed run starts in a later second.
    event_file_writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    for first_step, steps, value in ((0, range(6), 0.1), (4, range(4, 8), 0.2)):
        tracker = TensorBoardTracker(None, tmp_path, total_steps=8, first_step=first_step)
        log_steps(tracker, steps, value)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("reward/mean")
    assert [scalar.step for scalar in scalars] == list(range(8))
    assert [round(scalar.value, 1) for scalar in scalars] == [0.1] * 4 + [0.2] * 4


def test_dates_of_chat_messages_are_written_as_text(tmp_path):
    row = {"prompt": [{"role": "user", "content": "1+1=", "timestamp": datetime(2024, 5, 1, tzinfo=UTC)}]}
    writer = SamplesWriter(tmp_path / "samples.jsonl", first_step=0)
    writer.write([sample_of(trajectory(), step=1, purpose="train", row=row)])
    writer.close()
    (read,) = read_samples(tmp_path)
    assert read.messages == [{"role": "user", "content": "1+1=", "timestamp": "2024-05-01 00:00:00+00:00"}]


@pytest.mark.parametrize(("tracker", "package"), [(TensorBoardTracker, "tensorboard"), (WandbTracker, "wandb")])
def test_a_tracker_whose_package_is_missing_says_how_to_install_it(tmp_path, monkeypatch, tracker, package):
    for name in [
        name for name in sys.modules if name.split(".")[0] == package or name.startswith("torch.utils.tensorboard")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PluginError, match=rf"pip install {package}"):
        tracker(None, tmp_path, total_steps=1, first_step=0)


@attrs.frozen
class WandbSettings:
    project_name: str = "rl"
    run_name: str = "a run"
    tags: tuple[str, ...] = ("test",)


@attrs.frozen
class WandbConfig:
    trainer: WandbSettings = WandbSettings()


def test_tensorboard_names_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "tensorboard").touch()
    with pytest.raises(StorageError, match=r"tensorboard could not be written \(.* or remove tensorboard from trainer"):
        TensorBoardTracker(None, tmp_path, total_steps=4, first_step=0)


def test_wandb_that_cannot_start_says_what_to_do(tmp_path, monkeypatch):
    import wandb

    def refuse(**_: object) -> None:
        raise wandb.errors.CommError("connection refused")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(PluginError, match=r"\(connection refused\); .* set WANDB_MODE=offline, or remove wandb"):
        WandbTracker(WandbConfig(), tmp_path, total_steps=4, first_step=0)


def test_wandb_keeps_its_run_over_a_resume_and_its_last_uploads_have_a_deadline(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "200")
    first = WandbTracker(WandbConfig(), tmp_path, total_steps=4, first_step=0)
    assert wandb.run is not None
    assert 0 < wandb.run.settings.finish_timeout <= 300, "the last uploads must have a deadline"
    log_steps(first, range(2))
    first_id = (tmp_path / "wandb_run_id.txt").read_text()
    (first_run,) = (tmp_path / "wandb").glob("offline-run-*")
    while f"{datetime.now():%Y%m%d_%H%M%S}" in first_run.name:  # else both runs have one folder
        time.sleep(0.01)
    log_steps(WandbTracker(WandbConfig(), tmp_path, total_steps=4, first_step=2), range(2, 4))
    assert (tmp_path / "wandb_run_id.txt").read_text() == first_id
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2


def test_the_console_shows_steps_accuracy_reward_and_speed(tmp_path, capsys):
    tracker = ConsoleTracker(None, tmp_path / "quickstart", total_steps=2, first_step=0)
    tracker.log(0, {"eval/accuracy": 0.25})
    tracker.log(2, {"reward/mean": 0.5, "policy/kl": 0.1, "tokens_per_second": 3600.0})
    tracker.close()
    first, last = capsys.readouterr().err.splitlines()
    assert first == "quickstart: 0/2 steps · held-out accuracy 0.250"
    assert last.startswith("quickstart: 2/2 steps · held-out accuracy 0.250 · reward 0.500 · tokens/s 3,600 · after ")


def test_the_console_shows_the_number_of_failed_samples_if_there_are_any(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 600.0)  # else a slow machine shows the second step, too
    tracker = ConsoleTracker(None, tmp_path / "run", total_steps=9, first_step=0)
    tracker.log(0, {"eval/failed": 0.0})
    tracker.log(1, {"rollout/failed": 3.0, "rollout/failed/OSError": 3.0})
    tracker.log(2, {"rollout/failed": 1.0, "eval/failed": 2.0})
    tracker.close()
    first, last = capsys.readouterr().err.splitlines()
    assert "failed" not in first
    assert "failed samples 6" in last


def test_all_failed_samples_are_written_besides_num_logged_samples(tmp_path):
    config = from_mapping({"trainer.num_logged_samples": 1, "trainer.logger": []})
    reporter = RunReporter(config, tmp_path, total_steps=2, steps_done=None)
    failed = [
        trajectory(sample_index=index, steps=(), failure="rows:1: OSError: gone", failure_kind="OSError")
        for index in range(1, 4)
    ]
    reporter.failed_samples(1, failed)
    reporter.eval_samples(1, [trajectory(sample_index=0), *failed])
    reporter.close()
    samples = [(sample.purpose, sample.sample, sample.failure is None) for sample in read_samples(tmp_path)]
    lost = [(index, False) for index in (1, 2, 3)]
    assert samples == [*(("train", *each) for each in lost), ("eval", 0, True), *(("eval", *each) for each in lost)]


def test_a_row_written_again_replaces_the_earlier_row(tmp_path):
    config = from_mapping({"trainer.logger": []})
    first = RunReporter(config, tmp_path, total_steps=3, steps_done=None)
    for step in (1, 2):
        first.step(step, {"reward/mean": 0.5})
        first.failed_samples(step, [trajectory(steps=(), failure="gone")])
    first.close()
    resumed = RunReporter(config, tmp_path, total_steps=3, steps_done=2, writes_last_row_again=True)
    resumed.step(2, {"reward/mean": 0.5, "eval/reward": 1.0})
    resumed.close()
    rows = list(read_rows(tmp_path / "metrics.jsonl"))
    assert rows == [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.5, "eval/reward": 1.0}]
    assert [sample.step for sample in read_samples(tmp_path)] == [1, 2], "samples of the repeated row must be kept"
