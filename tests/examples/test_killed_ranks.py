"""A rank or the whole run is killed during a save. The run then resumes from the previous checkpoint."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import ray

import rl_transformers.rank.state
from rl_core.config import Config
from rl_core.errors import WorkerError
from rl_core.interfaces import Callback, Control
from rl_core.trainer.run import run_training
from tests.examples.child_output import exit_code_of
from tests.examples.test_resume import BuildConfig, require_same_run, train_in_child, without_times
from tests.local_ray import start_ray
from tests.ray.faulty_fsdp import METHODS

TWO_RANKS = {"trainer__placement__policy_num_gpus_per_node": 2, "trainer__worker_timeout_s": 120}
SAVES = ("save_state", "start_saving")


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def train_and_expect(complete: Sequence[Config], config: Config, methods: str) -> None:
    """Trains the runs of `complete`, then the run of `config`, which must end with the error of the rank that died. All
    runs share one Ray.
    """
    start_ray()
    try:
        for each in complete:
            run_training(each)
        with pytest.raises(WorkerError, match=rf"^policy rank 1 of 2 \(node .*\) died in ({methods}): "):
            run_training(config)
    finally:
        ray.shutdown()


def in_child(target: Callable[..., object], *args: object) -> int:
    """The exit code of a child process that runs `target` with its own Ray; takes minutes on a busy machine."""
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    return exit_code_of(process, within_s=500)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uninterrupted") / "run"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "phase",
    [
        random.Random(int(os.environ.get("SEED", "0"))).choice(SAVES),
        *(pytest.param(phase, marks=pytest.mark.soak) for phase in SAVES),
    ],
)
def test_a_run_continues_from_the_previous_checkpoint_if_a_rank_is_killed_while_saving(
    phase: str, small_run: BuildConfig, uninterrupted: Path, tmp_path: Path
):
    complete = [] if uninterrupted.exists() else [small_run(uninterrupted, **TWO_RANKS)]
    fault = {
        "trainer__strategy": "tests.ray.faulty_fsdp:faulty_fsdp",
        "trainer__policy__fsdp_config__fault_phase": phase,
        "trainer__policy__fsdp_config__fault_rank": 1,
        "trainer__policy__fsdp_config__fault_time": 1,
        "trainer__async_save": phase == "start_saving",
    }
    # If the save is in the background, the rank may die in any method.
    anything = {method for methods in METHODS.values() for method in methods} | {"publish"}
    methods = "save_state" if phase == "save_state" else "|".join(anything)
    run_dir = tmp_path / "run"
    assert in_child(train_and_expect, complete, small_run(run_dir, **TWO_RANKS, **fault), methods) == 0
    assert checkpoints(run_dir) == ["step_000002", "step_000004.partial"]
    assert len(without_times(run_dir)) < 7
    resumed = small_run(run_dir, **TWO_RANKS, trainer__async_save=phase == "start_saving")
    assert in_child(run_training, resumed) == 0
    assert checkpoints(run_dir) == ["step_000002", "step_000004", "step_000006"]
    require_same_run(run_dir, uninterrupted)


class SlowStorage(Callback):
    """The second checkpoint is never written completely: its writer sleeps for ten minutes, and the run is killed
    meanwhile.
    """

    def on_run_start(self, run_dir: Path, first_step: int, last_step: int) -> None:
        class SlowWriter(rl_transformers.rank.state.FileSystemWriter):
            def write_data(self, plan, planner):
                results = super().write_data(plan, planner)
                if "step_000004" in str(self.path):
                    time.sleep(600)
                return results

        rl_transformers.rank.state.FileSystemWriter = SlowWriter  # pyright: ignore[reportPrivateImportUsage]

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> Control | None:
        if step == 5:
            os.kill(os.getpid(), 9)
        return None


def test_a_run_killed_while_it_saves_in_the_background_resumes_exactly(
    small_run: BuildConfig, finished: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    assert train_in_child(small_run(tmp_path / "whole", trainer__async_save=True)) == 0
    require_same_run(tmp_path / "whole", finished)
    assert checkpoints(tmp_path / "whole") == ["step_000002", "step_000004", "step_000006"]
    run_dir, callback = tmp_path / "run", f"{__name__}:SlowStorage"
    assert train_in_child(small_run(run_dir, trainer__async_save=True, trainer__callbacks=[callback])) == -9
    assert checkpoints(run_dir) == ["step_000002", "step_000004.partial"]
    with caplog.at_level("WARNING"):
        run_training(small_run(run_dir, trainer__async_save=True))
    assert "step_000004.partial was left by a run that ended while saving" in caplog.text
    assert "is removed; continuing from step_000002" in caplog.text
    require_same_run(run_dir, finished)
