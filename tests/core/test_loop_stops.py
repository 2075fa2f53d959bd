"""A run that is stopped or ended at any moment, and the run that resumes from it, lose nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import attrs
import pytest

from rl_core.trainer.groups import FinishedGroup
from rl_core.trainer.state.checkpoint import list_checkpoints, load_state
from tests.core.loop_checks import (
    EVERYTHING,
    STALENESS,
    one_after_another,
    require_nothing_is_lost,
    runs_stopped_at_any_moment,
)
from tests.core.scripted_run import Play, RecordedBuffer, Script, ScriptedEngine, ScriptedRun, SleepingEngine
from tests.core.virtual_time import run_virtually

PHASES = {
    "score": ("score", 0.5, 1),
    "train": ("train 2", 2.0, 2),
    "publish": ("send 2", 1.0, 2),
    "evaluate": ("evaluate", 3.0, 2),
    "checkpoint": ("save 2", 1.0, 2),
}
"""Phase → event, seconds from the event to the stop, and the last step of the stopped run."""


@pytest.mark.parametrize("phase", PHASES)
@STALENESS
def test_a_stop_in_the_middle_of_a_phase_finishes_the_step_and_saves_it(tmp_path: Path, max_staleness: int, phase: str):
    settings = {"eval_interval": 2, "ckpt_interval": 2 if phase == "checkpoint" else -1}
    script = attrs.evolve(EVERYTHING, steps=6, max_staleness=max_staleness, settings=settings)
    run = ScriptedRun(tmp_path, script)
    event, after_s, last = PHASES[phase]
    run.log.when(event, run.loop.stop, after_s=after_s)
    run.go()
    assert run.loop.was_stopped
    assert list(run.reports.rows) == list(range(1, last + 1))
    assert len(run.taken) == last, "no further step may begin"
    is_cut = phase in ("train", "publish", "evaluate")
    assert run.events_of("evaluated") == ([] if is_cut else ["evaluated 2"][: last - 1])
    assert run.events[-2:] == [f"checkpoint {last}", f"end {last}"]
    resumed = run.resumed()
    require_nothing_is_lost(run, resumed)
    if is_cut:
        assert resumed.events_of("evaluated", "row", "start")[:2] == ["evaluated 2", "row 2"]
        assert resumed.reports.rows[2].keys() >= run.reports.rows[2].keys() | {"eval/reward"}


@STALENESS
def test_a_stop_does_not_wait_for_the_groups_of_a_step(tmp_path: Path, max_staleness: int):
    script = Script(steps=6, max_staleness=max_staleness, play=lambda group: Play(seconds=60.0 + group % 2))
    run = ScriptedRun(tmp_path, script)
    last = max_staleness + 1
    newest = f"start {2 * last} at 1"
    run.log.when(newest, run.loop.stop, after_s=50.0)
    run.go()
    assert list(run.reports.rows) == list(range(1, last + 1))
    assert run.events[-3:] == [f"save {last}", f"checkpoint {last}", f"end {last}"]
    assert run.ended_at == run.time_of(newest) + 50.0 + script.save_s
    require_nothing_is_lost(run, run.resumed())


class ForgetsWhatIsFinished(RecordedBuffer):
    """A faulty buffer: a checkpoint neither stores the finished groups that wait to be trained on nor lists them to be
    played again."""

    @property
    def outstanding(self) -> tuple[int, ...]:
        return tuple(group for group in super().outstanding if group not in self._finished)

    @property
    def untrained(self) -> tuple[FinishedGroup, ...]:
        return ()


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_finished_groups_are_in_the_checkpoint_and_not_played_again(tmp_path: Path, max_staleness: int):
    """When the run ends, group 3 is still being played, and group 2 is finished with one failed sample."""

    def play(group: int) -> Play:
        return Play(seconds=100.0 if group == 3 else 5.0, rewards=(0.25, None) if group == 2 else (0.25, 1.0))

    script = Script(steps=6, max_staleness=max_staleness, play=play, settings={"ckpt_interval": 1})
    run = ScriptedRun(tmp_path, script)
    run.log.when("train 1", run.loop.stop)
    run.go()
    checkpoint = list_checkpoints(tmp_path / "checkpoints")[-1]
    state = load_state(checkpoint)
    assert 2 in state.finished_groups
    assert 3 in state.restart_groups
    resumed = run.resumed()
    require_nothing_is_lost(run, resumed)
    again = {int(event.split()[1]) for event in resumed.events_of("start")}
    assert not again & set(state.finished_groups)
    assert again >= set(state.restart_groups)
    rows = [row for each in (run, resumed) for row in each.reports.rows.values()]
    assert sum(row["rollout/failed"] for row in rows) == 1.0
    assert all(row["rollout/staleness_max"] <= max_staleness for row in rows)
    step = next(step for step, groups in resumed.trained.items() if 2 in groups)
    (sample,) = [one for one in resumed.reports.groups[step] if one.group_id == 2]
    assert (sample.start_version, sample.reward, [list(one.tokens) for one in sample.steps]) == (0, 0.25, [[1, 2]])


def test_a_failed_sample_of_a_waiting_group_is_counted_once_after_an_error(tmp_path: Path):
    """The failing run writes the sample immediately, under a step that it never reaches. Its checkpoint has the sample
    too."""
    rewards = {2: (0.25, None)}

    def play(group: int) -> Play:
        return Play(seconds=30.0 if group == 5 else 5.0 + group, rewards=rewards.get(group, (0.25, 1.0)))

    def failing(group: int) -> Play:
        return attrs.evolve(play(group), error=OSError("gone") if group == 5 else None)

    run = ScriptedRun(tmp_path, Script(steps=6, max_staleness=3, train_s=40.0, play=failing))
    with pytest.raises(OSError, match="gone"):
        run.go()
    assert run.reports.failed == [(2, 2, 1)]
    assert 2 in load_state(list_checkpoints(tmp_path / "checkpoints")[-1]).finished_groups
    resumed = run.resumed(play=play)
    require_nothing_is_lost(run, resumed)
    assert [(group, sample) for _, group, sample in resumed.reports.failed] == [(2, 1)]
    assert sum(row["rollout/failed"] for row in resumed.reports.rows.values()) == 1.0


def test_the_check_for_lost_groups_detects_a_group_missing_from_a_checkpoint(tmp_path: Path):
    """Negative control of `require_nothing_is_lost`."""
    run = ScriptedRun(tmp_path, attrs.evolve(EVERYTHING, steps=6), buffer_class=ForgetsWhatIsFinished)
    run.log.when("finish 2", run.loop.stop, after_s=0.5)
    run.go()
    with pytest.raises(AssertionError):
        require_nothing_is_lost(run, run.resumed())


def test_a_stop_before_the_first_step_plays_no_group(tmp_path: Path):
    run = ScriptedRun(tmp_path, EVERYTHING)
    run.log.when("evaluate", run.loop.stop, after_s=1.0)
    run.go()
    assert run.events == ["pause", "send 0", "serve 0", "evaluate", "end 0"]
    assert run.ended_at == run.time_of("evaluate") + 1.0


@pytest.mark.parametrize(
    ("max_staleness", "engine_class"),
    [(0, ScriptedEngine), (1, ScriptedEngine), (3, ScriptedEngine), (0, SleepingEngine)],
)
def test_a_stop_at_any_moment_loses_no_group(
    tmp_path_factory: pytest.TempPathFactory, max_staleness: int, engine_class: type[ScriptedEngine]
):
    """Stops a separate run at each turn of the event loop. The resumed run must train on everything that is left."""
    script = Script(steps=3, max_staleness=max_staleness, play=one_after_another)

    def stopped_at(turn: int) -> ScriptedRun:
        run = ScriptedRun(tmp_path_factory.mktemp("run"), script, engine_class=engine_class)
        return run.go(on_turn=lambda number: run.loop.stop() if number == turn else None)

    steps_done = []
    while steps_done.count(script.steps) < 2:
        run = stopped_at(turn=len(steps_done))
        steps_done.append(run.loop.steps_done)
        if run.loop.was_stopped and run.loop.steps_done > 0:
            require_nothing_is_lost(run, run.resumed())
    assert steps_done == sorted(steps_done)
    assert min(steps_done.count(step) for step in range(script.steps)) > 5


@STALENESS
def test_a_stop_at_any_moment_counts_each_failed_sample_and_dropped_group_once(
    tmp_path_factory: pytest.TempPathFactory, max_staleness: int
):
    """Some groups are finished but not trained on before the stop, and the resumed run plays others again."""

    def play(group: int) -> Play:
        rewards = (None, None) if group == 5 else (None, 1.0) if group % 2 else (0.0, 1.0)
        return Play(seconds=one_after_another(group).seconds, rewards=rewards)

    script = Script(steps=4, max_staleness=max_staleness, play=play)
    for runs in runs_stopped_at_any_moment(tmp_path_factory, script):
        failed = Counter((group, sample) for run in runs for _, group, sample in run.reports.failed)
        assert max(failed.values()) == 1
        rows = [row for run in runs for row in run.reports.rows.values()]
        assert sum(row["rollout/failed"] for row in rows) == len(failed)
        assert sum(row["rollout/dropped_failed"] for row in rows) == 1.0


def test_runs_that_end_without_an_error_save_nothing_extra(tmp_path: Path):
    """A run that ends well saves no checkpoint. A stopped run saves one checkpoint and no model."""
    script = Script(settings={"model_path": tmp_path / "model"})
    assert ScriptedRun(tmp_path, script).go().events_of("save", "end", "export") == ["end 3", "export model"]
    stopped = ScriptedRun(tmp_path, script)
    stopped.log.when("train 2", stopped.loop.stop)
    assert stopped.go().events_of("save", "end", "export") == ["save 2", "end 2"]


@STALENESS
def test_a_resumed_run_writes_a_model_whose_export_was_killed(tmp_path: Path, max_staleness: int):
    settings = {"ckpt_interval": 2, "hf_save_interval": 2}
    run = ScriptedRun(tmp_path, Script(steps=4, max_staleness=max_staleness, settings=settings)).go()
    state = load_state(tmp_path / "checkpoints" / "step_000002")
    models = tmp_path / "exports"
    assert ScriptedRun(tmp_path, run.script, state=state).go().events_of("export") == ["export 4"]
    (models / "step_000002").rename(models / "step_000002.partial")  # as a kill during the export leaves it
    assert ScriptedRun(tmp_path, run.script, state=state).go().events_of("export") == ["export 2", "export 4"]
    assert sorted(path.name for path in models.iterdir()) == ["step_000002", "step_000004"]


@STALENESS
def test_a_run_cancelled_at_any_moment_leaves_complete_checkpoints_and_no_task(
    tmp_path_factory: pytest.TempPathFactory, max_staleness: int
):
    """Cancels a separate run every two virtual seconds, as a second signal does. `ScriptedRun.work` fails if a task
    is left."""
    script = attrs.evolve(EVERYTHING, max_staleness=max_staleness, settings={"ckpt_interval": 1, "eval_interval": 2})
    resumed_after = set()
    for second in range(0, 72, 2):
        run = ScriptedRun(tmp_path_factory.mktemp("run"), script)
        ended_after(run, second + 0.25)
        complete = [int(event.split()[1]) for event in run.events_of("checkpoint")]
        assert len(list_checkpoints(run.directory / "checkpoints")) == len(complete)
        if complete and complete[-1] < script.steps:
            resumed = run.resumed().go()
            assert resumed.taken[0][0] == complete[-1] + 1
            assert list(resumed.reports.rows) == list(range(complete[-1] + 1, script.steps + 1))
            resumed_after.add(complete[-1])
    assert resumed_after == {1, 2}


def ended_after(run: ScriptedRun, seconds: float) -> None:
    async def work() -> None:
        task = asyncio.create_task(run.work())
        asyncio.get_running_loop().call_later(seconds, task.cancel)
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()):
            raise error

    run_virtually(work())


def test_a_resumed_run_publishes_its_version_and_plays_unfinished_groups_first(tmp_path: Path):
    script = Script(
        steps=4, groups_per_step=2, max_staleness=1, settings={"ckpt_interval": 2, "eval_before_train": True}
    )
    run = ScriptedRun(tmp_path, attrs.evolve(script, eval_rows=1))
    run.log.when("save 2", run.loop.stop)
    run.go()
    resumed = run.resumed().go()
    assert resumed.events[:7] == [
        "pause", "send 2", "serve 2", "start 4 at 2", "start 5 at 2", "start 6 at 2", "start 7 at 2"
    ]  # fmt: skip
    assert resumed.taken == [(3, [4, 5]), (4, [6, 7])]
    assert list(resumed.reports.rows) == [3, 4], "the evaluation before training must not be repeated"


def test_a_second_stop_before_all_stored_groups_have_restarted_loses_no_group(tmp_path: Path):
    """The second run generates less far ahead, so it starts only two of the first run's groups. The others wait, and
    the third run starts them before new ones."""
    run = ScriptedRun(tmp_path, Script(steps=6, max_staleness=3))
    run.log.when("train 1", run.loop.stop)
    run.go()
    second = run.resumed(max_staleness=0)
    second.log.when("train 2", second.loop.stop)
    second.go()
    # With max_staleness=0, the groups that the first run finished are too old and are played again.
    assert second.events_of("start") == ["start 2 at 1", "start 3 at 1"]
    third = second.resumed()
    require_nothing_is_lost(run, second, third)
    assert third.events_of("start")[:4] == ["start 4 at 2", "start 5 at 2", "start 6 at 3", "start 7 at 3"]
