"""A killed and resumed run leaves the same metrics, samples and weights as an uninterrupted run."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rl_core.config import Config
from rl_core.interfaces import Callback, Control, Trajectory
from rl_core.reports.jsonl import read_rows
from rl_core.reports.trackers import JsonlTracker
from rl_core.trainer.loop import interrupts
from rl_core.trainer.run import run_training
from rl_core.trainer.state.checkpoint import complete_checkpoints
from tests.examples.child_output import exit_code_of, print_into

BuildConfig = Callable[..., Config]


class KillAtGroups(Callback):
    """SIGKILL in step 3, after the weights are published and before the step's metrics are written."""

    def on_groups(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


class KillAfterCheckpoint(Callback):
    """SIGKILL right after the checkpoint of step 4."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGKILL)


class KillInStepAfterCheckpoint(Callback):
    """SIGKILL in step 5: step 4 has a checkpoint, and some rows of step 5 are written."""

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


class KillAtStep4(Callback):
    """SIGKILL in step 4, before its metrics are written."""

    def on_groups(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGKILL)


class StopAtStep3(Callback):
    """Stops the run after step 3, as Ctrl-C would."""

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> Control | None:
        return Control(stop=True) if step == 3 else None


class PressAtStep3(Callback):
    """Ctrl-C in step 3, pressed twice at once, as a bouncing key does."""

    def on_groups(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        if step == 3:
            # A busy machine may pause this process between the two signals.
            interrupts._BOUNCE_S = 600.0
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)


class TerminateAtStep3(Callback):
    """SIGTERM in step 3. A scheduler sends this signal first, and SIGKILL later."""

    def on_groups(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


class PressTwiceAtStep3(Callback):
    """Ctrl-C in step 3, and again 1.05 s later."""

    def on_groups(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.05)  # within 1 s, a second signal counts as the bounce of a key
            os.kill(os.getpid(), signal.SIGINT)


class PressingTracker(JsonlTracker):
    """Ctrl-C during set-up: the models are loaded, and the run makes its trackers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        super().__init__(*args, **kwargs)


def train_and_say(config: Config, stderr: Path) -> None:
    """Trains as the command line does: exits with 130 after an interruption, and prints into `stderr`."""
    print_into(stderr)
    try:
        summary = run_training(config)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(130 if summary.interrupted else 0)


def interrupted_in_child(config: Config, stderr: Path) -> str:
    """Trains in a forked process that interrupts itself; returns what it printed."""
    process = multiprocessing.get_context("fork").Process(target=train_and_say, args=(config, stderr))
    process.start()
    assert exit_code_of(process, within_s=120) == 130
    printed = stderr.read_text()
    assert "press Ctrl-C again" in printed, "the message about a second Ctrl-C is missing"
    return printed


def train_in_child(config: Config) -> int:
    """Trains in a forked process and returns its exit code: −9 after SIGKILL."""
    process = multiprocessing.get_context("fork").Process(target=run_training, args=(config,))
    process.start()
    return exit_code_of(process, within_s=120)


def without_times(run_dir: Path) -> list[dict[str, float]]:
    rows = list(read_rows(run_dir / "metrics.jsonl"))
    return [{name: v for name, v in row.items() if not name.startswith(("time/", "tokens_per_second"))} for row in rows]


def require_same_run(run_dir: Path, expected: Path, *, engine_tolerance: float = 0.0) -> None:
    """Requires equal metrics (except times), samples and weights, bit for bit. If environments run in other threads
    or processes, chance decides which requests share an engine batch, and with it how float32 sums are rounded. Then
    the difference between engine and trainer log-probs need not be equal in both runs, only at most `engine_tolerance`.
    """
    rows, expected_rows = without_times(run_dir), without_times(expected)
    for row in (*rows, *expected_rows) if engine_tolerance else ():
        for name in ("rollout/logprob_diff_mean", "rollout/logprob_diff_max"):
            assert row.pop(name, 0.0) <= engine_tolerance
    assert rows == expected_rows
    assert (run_dir / "samples.jsonl").read_text() == (expected / "samples.jsonl").read_text()
    files = [sorted(f.relative_to(path) for f in path.glob("model/**/*.safetensors")) for path in (run_dir, expected)]
    assert files[0] == files[1]
    for file in files[1]:
        weights, expected_weights = load_file(run_dir / file), load_file(expected / file)
        assert weights.keys() == expected_weights.keys()
        assert all(weights[name].equal(expected_weights[name]) for name in weights)


@pytest.mark.parametrize("callback", [KillAtGroups, KillAfterCheckpoint, KillInStepAfterCheckpoint])
def test_a_killed_run_resumes_exactly(callback: type[Callback], small_run: BuildConfig, finished: Path, tmp_path: Path):
    path = f"{__name__}:{callback.__name__}"
    assert train_in_child(small_run(tmp_path / "run", trainer__callbacks=[path])) == -signal.SIGKILL
    assert len(without_times(tmp_path / "run")) < 7
    assert train_in_child(small_run(tmp_path / "run")) == 0
    require_same_run(tmp_path / "run", finished)


@pytest.mark.parametrize(
    ("overrides", "also_saved"),
    [
        (
            {
                "trainer__algorithm__advantage_estimator": "gae",
                "trainer__critic_mini_batch_size": 8,
                "trainer__critic__optimizer_config__lr": 1e-3,
            },
            "critic/value_head.safetensors",
        ),
        ({"trainer__policy__model__lora__rank": 4}, "adapter/adapter_model.safetensors"),
    ],
    ids=["critic", "adapters"],
)
def test_a_killed_run_with_critic_or_adapters_resumes_exactly(
    overrides: dict[str, object], also_saved: str, small_run: BuildConfig, tmp_path: Path
):
    assert train_in_child(small_run(tmp_path / "expected", **overrides)) == 0
    assert (tmp_path / "expected" / "model" / also_saved).exists()
    callbacks = {"trainer__callbacks": [f"{__name__}:KillAtGroups"]}
    assert train_in_child(small_run(tmp_path / "run", **overrides, **callbacks)) == -signal.SIGKILL
    assert train_in_child(small_run(tmp_path / "run", **overrides)) == 0
    require_same_run(tmp_path / "run", tmp_path / "expected")


def test_a_stopped_run_leaves_a_checkpoint_and_resumes_exactly(small_run: BuildConfig, finished: Path, tmp_path: Path):
    path = f"{__name__}:StopAtStep3"
    assert train_in_child(small_run(tmp_path / "run", trainer__callbacks=[path])) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["interrupted"] is True
    assert (tmp_path / "run" / "checkpoints" / "step_000003" / "complete.json").exists()
    assert train_in_child(small_run(tmp_path / "run")) == 0
    require_same_run(tmp_path / "run", finished)


@pytest.mark.parametrize("callback", [PressAtStep3, TerminateAtStep3, PressTwiceAtStep3])
def test_an_interrupted_run_ends_cleanly_and_resumes_exactly(
    callback: type[Callback], small_run: BuildConfig, finished: Path, tmp_path: Path
):
    path = f"{__name__}:{callback.__name__}"
    printed = interrupted_in_child(small_run(tmp_path / "run", trainer__callbacks=[path]), tmp_path / "stderr")
    at_once = callback is PressTwiceAtStep3
    assert len(without_times(tmp_path / "run")) == (3 if at_once else 4)
    assert (tmp_path / "run" / "checkpoints" / "step_000003").exists() is not at_once
    assert not any(word in printed for word in ("Traceback", "never", "destroyed")), printed
    assert train_in_child(small_run(tmp_path / "run")) == 0
    require_same_run(tmp_path / "run", finished)


def test_an_interruption_during_set_up_ends_at_once_and_cleanly(small_run: BuildConfig, tmp_path: Path):
    config = small_run(tmp_path / "run", trainer__logger=[f"{__name__}:PressingTracker"])
    printed = interrupted_in_child(config, tmp_path / "stderr")
    assert not any(word in printed for word in ("Traceback", "never", "destroyed")), printed
    assert without_times(tmp_path / "run") == []


def test_a_run_resumed_from_an_older_checkpoint_can_be_resumed_with_latest(
    small_run: BuildConfig, finished: Path, tmp_path: Path
):
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    path = str(run_dir / "checkpoints" / "step_000002")
    back = {"trainer__resume_mode": "from_path", "trainer__resume_path": path, "trainer__ckpt_interval": -1}
    stops = {"trainer__callbacks": [f"{__name__}:KillAtStep4"]}
    assert train_in_child(small_run(run_dir, **back, **stops)) == -signal.SIGKILL
    assert [row["step"] for row in without_times(run_dir)] == [0, 1, 2, 3]
    assert [row["step"] for row in without_times(run_dir / "replaced_1")] == [3, 4, 5, 6]
    assert (run_dir / "replaced_1" / "model" / "config.json").exists()
    assert train_in_child(small_run(run_dir)) == 0
    require_same_run(run_dir, finished)
    assert [row["step"] for row in without_times(run_dir / "replaced_2")] == [3]


def test_a_finished_run_says_that_nothing_is_left_to_train(
    small_run: BuildConfig, finished: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    shutil.copytree(finished, tmp_path / "run")
    assert run_training(small_run(tmp_path / "run")).steps == 6
    assert "step_000006 is the end of the run, which has 6 steps, so nothing is trained" in caplog.text
    require_same_run(tmp_path / "run", finished)


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "model/model.safetensors"])
def test_the_comparison_notices_a_changed_reward_or_weight(name: str, finished: Path, tmp_path: Path):
    """Negative control."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    require_same_run(run_dir, finished)
    if name.endswith(".jsonl"):
        text = (run_dir / name).read_text()
        (run_dir / name).write_text(re.sub(r'"reward(/mean)?": ?', r"\g<0>1", text, count=1))
    else:
        weights = load_file(run_dir / name)
        next(iter(weights.values())).view(-1)[0] += 1.0
        save_file(weights, run_dir / name)
    with pytest.raises(AssertionError):
        require_same_run(run_dir, finished)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(12))
def test_a_run_killed_at_random_moments_ends_as_the_uninterrupted_one(
    seed: int, small_run: BuildConfig, finished: Path, tmp_path: Path
):
    """Kills attempts at random moments, some of them within a save, until an attempt finishes. After an attempt
    without a new checkpoint, the next attempt gets a little more time."""
    rng, scale, num_saved = random.Random(seed), 1.0, 0
    config = small_run(tmp_path / "run", trainer__ckpt_interval=1)
    for _ in range(40):
        process = multiprocessing.get_context("fork").Process(target=run_training, args=(config,))
        process.start()
        process.join(scale * rng.uniform(0.6, 2.5))
        if process.exitcode is None:
            process.kill()
            process.join()
        if process.exitcode == 0:
            break
        num_saved, before = len(complete_checkpoints(tmp_path / "run" / "checkpoints")), num_saved
        scale *= 1.2 if num_saved == before else 1.0
    assert process.exitcode == 0
    require_same_run(tmp_path / "run", finished)
