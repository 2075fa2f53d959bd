"""The loop, the buffer and the rollouts together: the order of events, and that nothing is lost, at any staleness."""

from __future__ import annotations

import asyncio
import errno
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.batch import Batch
from rl_core.errors import DeadlineError, DiskFullError, GenerationError, WeightSyncError, WorkerError
from rl_core.interfaces import Manifest, Rendezvous
from rl_core.tasks import IdleTime
from rl_core.trainer.buffer import FinishedGroup
from rl_core.trainer.callbacks import Control
from rl_core.trainer.checkpoint import list_checkpoints, load_state
from rl_core.trainer.loop import TrainingLoop
from tests.core.scripted_run import (
    EventLog,
    Play,
    RecordedBuffer,
    RestartedEngine,
    Script,
    ScriptedEngine,
    ScriptedRun,
    SleepingEngine,
)
from tests.core.virtual_time import run_virtually, virtual_now

STALENESS = pytest.mark.parametrize("max_staleness", [0, 1, 3])


def one_after_another(group: int) -> Play:
    """Groups that are started together end one and a half seconds apart."""
    return Play(seconds=7.0 + 1.5 * (group % 4))


EVERYTHING = Script(
    steps=3,
    play=one_after_another,
    eval_rows=2,
    settings={"eval_interval": 2, "ckpt_interval": 2, "eval_before_train": True},
)


# --- the order of events ----------------------------------------------------------------------------------------------


def test_synchronous_training_does_one_thing_after_the_other(tmp_path: Path):
    assert ScriptedRun(tmp_path, EVERYTHING).go().timeline == [
        *("0 pause", "0 send 0", "2 serve 0"),
        *("2 evaluate", "8 evaluated 0", "8 row 0"),
        *("8 start 0 at 0", "8 start 1 at 0", "15 finish 0", "16.5 finish 1"),
        *("16.5 take 1: 0 1", "16.5 score", "17.5 train 1"),
        *("22.5 pause", "22.5 send 1", "24.5 serve 1", "24.5 published 1", "24.5 row 1"),
        *("24.5 start 2 at 1", "24.5 start 3 at 1", "34.5 finish 2", "36 finish 3"),
        *("36 take 2: 2 3", "36 score", "37 train 2"),
        *("42 pause", "42 send 2", "44 serve 2", "44 published 2"),
        # The next groups are under way while version 2 is evaluated and saved.
        *("44 evaluate", "44 start 4 at 2", "44 start 5 at 2", "50 evaluated 2", "50 row 2", "50 save 2"),
        *("51 finish 4", "52.5 finish 5", "53 checkpoint 2"),
        *("53 take 3: 4 5", "53 score", "54 train 3"),
        *("59 pause", "59 send 3", "61 serve 3", "61 published 3"),
        *("61 evaluate", "67 evaluated 3", "67 row 3", "67 save 3", "70 checkpoint 3", "70 end 3"),
    ]


def test_one_step_off_a_batch_is_generated_while_another_is_trained_on(tmp_path: Path):
    assert ScriptedRun(tmp_path, attrs.evolve(EVERYTHING, max_staleness=1)).go().timeline == [
        *("0 pause", "0 send 0", "2 serve 0"),
        *("2 evaluate", "8 evaluated 0", "8 row 0"),
        *("8 start 0 at 0", "8 start 1 at 0", "8 start 2 at 0", "8 start 3 at 0", "15 finish 0", "16.5 finish 1"),
        *("16.5 take 1: 0 1", "16.5 score", "17.5 train 1", "18 finish 2", "19.5 finish 3"),
        *("22.5 pause", "22.5 send 1", "24.5 serve 1", "24.5 published 1", "24.5 row 1"),
        *("24.5 start 4 at 1", "24.5 start 5 at 1"),
        *("24.5 take 2: 2 3", "24.5 score", "25.5 train 2"),
        # Group 4 would end at 31.5: it is frozen in the engine until the sync is over.
        *("30.5 pause", "30.5 send 2", "32.5 serve 2", "32.5 published 2"),
        *("32.5 evaluate", "32.5 finish 4", "33 finish 5", "38.5 evaluated 2", "38.5 row 2"),
        *("38.5 save 2", "41.5 checkpoint 2"),
        *("41.5 take 3: 4 5", "41.5 score", "42.5 train 3"),
        *("47.5 pause", "47.5 send 3", "49.5 serve 3", "49.5 published 3"),
        *("49.5 evaluate", "55.5 evaluated 3", "55.5 row 3", "55.5 save 3", "58.5 checkpoint 3", "58.5 end 3"),
    ]


def test_a_slow_group_is_overtaken_by_others_until_it_would_be_too_old(tmp_path: Path):
    script = Script(
        steps=5, groups_per_step=1, max_staleness=3, play=lambda group: Play(seconds=33.0 if group == 1 else 1)
    )
    run = ScriptedRun(tmp_path, script).go()
    assert run.taken == [(1, [0]), (2, [2]), (3, [3]), (4, [1]), (5, [4])]
    assert run.events_of("start") == ["start 0 at 0", "start 1 at 0", "start 2 at 0", "start 3 at 0", "start 4 at 1"]
    assert run.time_of("take 4: 1") == run.time_of("finish 1") == 35.0


def test_one_step_ahead_under_a_wide_bound_a_slow_group_is_overtaken_and_others_are_young(tmp_path: Path):
    """Group 1 takes 60 s, a step 8: with depth 1 under bound 4, steps 2 to 5 go on without it, and the fifth after its
    start waits for it. All other groups are trained on at most one version after their start."""

    def play(group: int) -> Play:
        return Play(seconds=60.0 if group == 1 else 4.0)

    script = Script(steps=9, groups_per_step=2, max_staleness=4, pipeline_depth=1, play=play)
    run = ScriptedRun(tmp_path, script).go()
    step_of = {group: step for step, groups in run.taken for group in groups}
    started_at = {int(event.split()[1]): int(event.split()[3]) for event in run.events_of("start")}
    ages = {group: step - 1 - started_at[group] for group, step in step_of.items()}
    assert ages.pop(1) == 4
    assert set(ages.values()) <= {0, 1}
    row = run.reports.rows[5]
    shares = [row[f"rollout/staleness/{age}"] for age in range(5)]
    assert shares[4] == 0.5
    assert sum(shares) == 1.0
    assert "rollout/staleness/5" not in row
    waiting = ScriptedRun(tmp_path / "depth", attrs.evolve(script, pipeline_depth=4)).go()
    assert waiting.reports.rows[9]["rollout/staleness_mean"] > 3.0 > run.reports.rows[9]["rollout/staleness_mean"]


def test_rows_say_who_waited_for_whom_and_what_was_queued(tmp_path: Path):
    """Worked by hand: a group takes 10 s, scoring 1, training 5, a sync 2, of which the first one is at 0."""
    names = ("time/step", "time/generate", "time/generation_idle", "rollout/queued_groups", "rollout/groups_under_way")

    def rows(directory: str, depth: int) -> list[tuple[float, ...]]:
        script = Script(max_staleness=depth)
        run = ScriptedRun(tmp_path / directory, script, clock=virtual_now).go()
        return [tuple(row[name] for name in names) for row in run.reports.rows.values()]

    assert rows("in_step", 0) == [
        (20.0, 10.0, 10.0, 0.0, 0.0),
        (18.0, 10.0, 8.0, 0.0, 0.0),
        (18.0, 10.0, 8.0, 0.0, 0.0),
    ]
    # Groups 2 and 3 wait for step 2; 4 and 5 are played while it trains, from 20 to 30; then none is needed any more.
    assert rows("ahead", 1) == [(20.0, 10.0, 10.0, 2.0, 0.0), (8.0, 0.0, 0.0, 0.0, 2.0), (10.0, 2.0, 8.0, 0.0, 0.0)]


class ManyEngines(ScriptedEngine):
    """Behind one client: half of them never have anything to do."""

    def __init__(self, log: EventLog, script: Script) -> None:
        super().__init__(log, script)
        self._idle = IdleTime(virtual_now)
        self._before_the_run_s = 100.0

    def idle_lap(self) -> dict[str, float]:
        seconds, self._before_the_run_s = self._idle.lap() + self._before_the_run_s, 0.0
        return {str(engine): seconds * (engine % 2) for engine in range(40)}


def test_rows_say_how_long_each_engine_had_nothing_to_do(tmp_path: Path):
    run = ScriptedRun(tmp_path, Script(), engine_class=ManyEngines, clock=virtual_now).go()
    for row in run.reports.rows.values():
        assert row["time/engine_idle"] == row["time/step"] / 2
        each = {name: seconds for name, seconds in row.items() if name.startswith("time/engine_idle/")}
        assert each == {f"time/engine_idle/{engine}": row["time/step"] * (engine % 2) for engine in range(32)}
    alone = ScriptedRun(tmp_path / "alone", Script()).go()
    assert not [name for row in alone.reports.rows.values() for name in row if "engine_idle" in name]


@STALENESS
def test_tokens_that_no_step_is_trained_on_are_counted(tmp_path: Path, max_staleness: int):
    def play(group: int) -> Play:
        return Play(rewards=(1.0, 1.0) if group == 1 else (0.0, 1.0))

    calm = ScriptedRun(tmp_path / "calm", Script(max_staleness=max_staleness, play=play)).go()
    assert {row["rollout/discarded_tokens"] for row in calm.reports.rows.values()} == {0.0}
    dropping = Script(max_staleness=max_staleness, play=play, drop_zero_variance=True)
    rows = ScriptedRun(tmp_path / "dropping", dropping).go().reports.rows.values()
    assert sum(row["rollout/discarded_tokens"] for row in rows) == 2.0, "two samples of one token each"
    rejecting = Script(max_staleness=max_staleness, play=play, min_replace_ratio=0.9)
    rows = ScriptedRun(tmp_path / "rejecting", rejecting).go().reports.rows.values()
    assert sum(row["rollout/discarded_tokens"] for row in rows) == 4.0, "groups 0 and 1, given up together"
    replacing = Script(max_staleness=max_staleness, play=play, min_replace_ratio=0.3)
    rows = ScriptedRun(tmp_path / "replacing", replacing).go().reports.rows.values()
    assert sum(row["rollout/discarded_tokens"] for row in rows) == 2.0, "group 1, replaced by a copy of group 0"


def test_engine_and_models_on_shared_devices_take_turns_and_no_group_is_played_in_between(tmp_path: Path):
    script = attrs.evolve(EVERYTHING, steps=2, groups_per_step=1, settings={"eval_interval": 1, "ckpt_interval": 1})
    run = ScriptedRun(tmp_path, script, engine_class=SleepingEngine).go()
    handover = ["offload", "wake weights", "pause"]
    assert run.events == [
        *handover, "send 0", "serve 0", "offload", "wake kv_cache",
        "start 0 at 0", "finish 0", "take 1: 0",
        "sleep", "score", "train 1",
        *handover, "send 1", "serve 1", "offload", "wake kv_cache",
        "evaluate", "evaluated 1", "row 1",
        "sleep", "save 1", "checkpoint 1",
        *handover, "send 1", "serve 1", "offload", "wake kv_cache", "published 1",
        "start 1 at 1", "finish 1", "take 2: 1",
        "sleep", "score", "train 2",
        *handover, "send 2", "serve 2", "offload", "wake kv_cache",
        "evaluate", "evaluated 2", "row 2",
        "sleep", "save 2", "checkpoint 2", "end 2",
    ]  # fmt: skip


@STALENESS
def test_the_row_of_a_step_is_written_before_its_checkpoint_and_after_its_evaluation(
    tmp_path: Path, max_staleness: int
):
    script = attrs.evolve(
        EVERYTHING,
        max_staleness=max_staleness,
        settings={"eval_interval": 1, "ckpt_interval": 1, "hf_save_interval": 2},
    )
    run = ScriptedRun(tmp_path, script).go()
    written = [["evaluate", f"evaluated {s}", f"row {s}", f"save {s}", f"checkpoint {s}"] for s in (1, 2, 3)]
    assert run.events_of("evaluate", "evaluated", "row", "save", "checkpoint", "export", "end") == [
        *written[0], *written[1], "export 2", *written[2], "end 3"
    ]  # fmt: skip
    assert all("eval/reward" in row for row in run.reports.rows.values())


def test_a_checkpoint_in_the_background_is_complete_at_a_step_boundary_and_at_the_end_at_the_latest(tmp_path: Path):
    script = Script(steps=3, save_s=20.0, settings={"ckpt_interval": 1, "saves_in_background": True})
    run = ScriptedRun(tmp_path, script).go()
    assert run.events_of("row", "copy", "checkpoint", "take", "end") == [
        "take 1: 0 1", "row 1", "copy 1",
        "take 2: 2 3", "row 2", "checkpoint 1", "copy 2",
        "take 3: 4 5", "row 3", "checkpoint 2", "copy 3", "checkpoint 3", "end 3",
    ]  # fmt: skip
    quick = ScriptedRun(tmp_path / "quick", attrs.evolve(script, save_s=4.0)).go()
    assert quick.events_of("take", "copy", "checkpoint", "score")[2:7] == [
        "copy 1", "take 2: 2 3", "checkpoint 1", "score", "copy 2"
    ]  # fmt: skip


def test_an_evaluation_pauses_neither_the_engine_nor_the_groups_under_way(tmp_path: Path):
    script = attrs.evolve(
        EVERYTHING, max_staleness=1, steps=4, eval_play=Play(seconds=50.0), settings={"eval_interval": 1}
    )
    run = ScriptedRun(tmp_path, script).go()
    parts = " ".join(run.events).split("evaluate ")[1:]
    during = [part.split("evaluated")[0] for part in parts]
    assert len(during) == 4
    for part in during:
        assert not {"pause", "send", "serve", "published", "take"} & set(part.split()), "it sees one version"
    assert ["finish" in part for part in during] == [True, True, False, False], "all groups are finished by step 3"


def test_what_a_callback_asks_for_is_done_at_the_end_of_that_step(tmp_path: Path):
    answers = {1: Control(save=True), 2: Control(evaluate=True), 3: Control(stop=True)}
    run = ScriptedRun(tmp_path, Script(steps=5, eval_rows=1, answers=answers)).go()
    assert run.events_of("evaluate", "evaluated", "row", "save", "checkpoint", "end") == [
        "row 1", "save 1", "checkpoint 1",
        "evaluate", "evaluated 2", "row 2",
        "row 3", "save 3", "checkpoint 3", "end 3",
    ]  # fmt: skip
    assert run.loop.was_stopped


@STALENESS
def test_the_last_step_evaluates_and_saves_and_leaves_no_group_behind(tmp_path: Path, max_staleness: int):
    script = Script(
        steps=5, max_staleness=max_staleness, eval_rows=1, settings={"eval_interval": 3, "ckpt_interval": 4}
    )
    run = ScriptedRun(tmp_path, script).go()
    assert len(run.events_of("start")) == len(run.events_of("finish")) == 10
    assert run.buffer.outstanding == ()
    assert run.events_of("evaluated", "checkpoint") == [
        "evaluated 3", "checkpoint 4", "evaluated 5", "checkpoint 5"
    ]  # fmt: skip
    assert run.events[-4:] == ["row 5", "save 5", "checkpoint 5", "end 5"]
    assert not run.loop.was_stopped


# --- the staleness bound ----------------------------------------------------------------------------------------------


def random_script(max_staleness: int, seed: int, *, pipeline_depth: int | None = None) -> Script:
    """Parts that take any time, evaluations and checkpoints now and then."""
    rng = random.Random(seed)
    seconds = [rng.choice([0.0, 0.5, 3.0, 10.0, 40.0]) for _ in range(40)]
    return Script(
        steps=rng.randint(2, 7),
        groups_per_step=rng.randint(1, 3),
        max_staleness=max_staleness,
        pipeline_depth=pipeline_depth,
        play=lambda group: Play(seconds=seconds[group % 40]),
        eval_rows=2,
        eval_play=Play(seconds=rng.choice([1.0, 30.0])),
        score_s=rng.choice([0.0, 2.0]),
        train_s=rng.choice([0.0, 8.0]),
        send_s=rng.choice([0.0, 3.0]),
        save_s=rng.choice([0.0, 5.0]),
        settings={
            "eval_interval": rng.choice([-1, 1, 2]),
            "ckpt_interval": rng.choice([-1, 1, 2]),
            "saves_in_background": rng.random() < 0.5,
        },
    )


def require_the_bound(run: ScriptedRun) -> None:
    """No group is trained on more than `max_staleness` versions after its start; each is, once."""
    started_at = {int(event.split()[1]): int(event.split()[3]) for event in run.events_of("start")}
    for step, groups in run.taken:
        assert len(groups) == run.script.groups_per_step
        for group in groups:
            assert step - 1 - started_at[group] <= run.script.max_staleness, f"group {group} is too old for step {step}"
    taken = [group for _, groups in run.taken for group in groups]
    assert sorted(taken) == sorted(started_at), "each group that was started is trained on once"


def require_generation_as_far_ahead_as_it_may(run: ScriptedRun) -> None:
    """When a version is published, all groups that it may start are started at that moment, and no others until the
    next one."""
    script = run.script
    started, started_by_version = 0, []
    for event in [*run.events_of("start", "published"), "published end"]:
        if event.startswith("start"):
            assert int(event.split()[3]) == len(started_by_version), "at the version that is published"
            started += 1
        else:
            started_by_version.append(started)
    expected = [min(version + script.depth + 1, script.steps) for version in range(script.steps + 1)]
    assert started_by_version == [steps * script.groups_per_step for steps in expected]
    for version in range(1, script.steps):
        times = {
            time for time, event in run.log.entries if event.startswith("start") and event.endswith(f"at {version}")
        }
        assert times <= {run.time_of(f"published {version}")}, "at once"


@settings(max_examples=40)
@given(
    depth_and_bound=st.sampled_from([(0, 0), (1, 1), (3, 3), (0, 2), (1, 2), (1, 4), (2, 4)]),
    seed=st.integers(0, 10_000),
)
def test_however_long_things_take_the_bound_holds_and_generation_runs_as_far_ahead_as_it_may(
    tmp_path_factory: pytest.TempPathFactory, depth_and_bound: tuple[int, int], seed: int
):
    depth, bound = depth_and_bound
    run = ScriptedRun(tmp_path_factory.mktemp("run"), random_script(bound, seed, pipeline_depth=depth)).go()
    require_the_bound(run)
    require_generation_as_far_ahead_as_it_may(run)
    assert list(run.reports.rows) == list(range(1, run.script.steps + 1))


@STALENESS
def test_no_group_is_started_before_its_version_is_served(tmp_path: Path, max_staleness: int):
    require_groups_start_at_served_versions(
        ScriptedRun(tmp_path, attrs.evolve(EVERYTHING, max_staleness=max_staleness)).go()
    )


def require_groups_start_at_served_versions(run: ScriptedRun) -> None:
    served = -1
    for event in run.events_of("serve", "start"):
        if event.startswith("serve"):
            served = int(event.split()[1])
        else:
            assert int(event.split()[3]) == served, f"{event}, while version {served} is served"


class OneMoreVersion(RecordedBuffer):
    """Wrong: starts groups for one step more than the bound allows."""

    def _has_room(self) -> bool:
        self._pipeline_depth += 1
        try:
            return super()._has_room()
        finally:
            self._pipeline_depth -= 1

    def _choice(self) -> list[FinishedGroup]:
        oldest = sorted(self._finished.values(), key=lambda group: group.group_id)[: self._groups_per_step]
        return oldest if len(oldest) == self._groups_per_step else []


class OneVersionLess(RecordedBuffer):
    """Wrong: holds generation back by one step."""

    def _has_room(self) -> bool:
        self._pipeline_depth -= 1
        try:
            return super()._has_room()
        finally:
            self._pipeline_depth += 1


class StartsBeforePublishing(TrainingLoop):
    """Wrong: groups are started with a version that the engine does not serve yet."""

    async def _publish(self) -> dict[str, float]:
        await self._buffer.published(self.steps_done)
        return await super()._publish()


@STALENESS
def test_a_bound_that_is_off_by_one_is_seen(tmp_path: Path, max_staleness: int):
    """Negative controls of the checks above."""
    script = Script(steps=6, max_staleness=max_staleness)
    loose = ScriptedRun(tmp_path / "loose", script, buffer_class=OneMoreVersion).go()
    with pytest.raises(AssertionError, match="is too old for step"):
        require_the_bound(loose)
    with pytest.raises(AssertionError):
        require_generation_as_far_ahead_as_it_may(loose)
    if max_staleness > 0:
        tight = ScriptedRun(tmp_path / "tight", script, buffer_class=OneVersionLess).go()
        require_the_bound(tight)
        with pytest.raises(AssertionError):
            require_generation_as_far_ahead_as_it_may(tight)
    early = ScriptedRun(tmp_path / "early", script, loop_class=StartsBeforePublishing).go()
    with pytest.raises(AssertionError, match="while version 0 is served"):
        require_groups_start_at_served_versions(early)


# --- groups that are not trained on -----------------------------------------------------------------------------------


@STALENESS
def test_a_group_whose_samples_all_fail_is_dropped_and_another_one_is_played_at_once(
    tmp_path: Path, max_staleness: int
):
    rewards = {1: (None, None), 2: (1.0, None)}

    def play(group: int) -> Play:
        return Play(seconds=10.0 + group, rewards=rewards.get(group, (0.0, 1.0)))

    run = ScriptedRun(tmp_path, Script(steps=4, max_staleness=max_staleness, play=play)).go()
    after = run.events.index("drop 1") + 1
    assert run.events[after].startswith("start"), "the room that it gives back is used"
    assert run.time_of("drop 1") == run.log.entries[after][0]
    assert 1 not in [group for _, groups in run.taken for group in groups]
    assert len(run.events_of("start")) == 4 * 2 + 1
    assert sum(row["rollout/failed"] for row in run.reports.rows.values()) == 3.0
    assert sum(row["rollout/dropped_failed"] for row in run.reports.rows.values()) == 1.0


@STALENESS
def test_a_greedy_answer_is_part_of_its_group_and_is_not_trained_on(tmp_path: Path, max_staleness: int):
    """It counts with the group in room, versions and order; the group waits for it where it takes longest."""

    def play(group: int) -> Play:
        return Play(greedy=group / 10, greedy_seconds=4.0 if group % 2 else 13.0)

    script = Script(steps=3, max_staleness=max_staleness, play=play, plays_greedy=True)
    run = ScriptedRun(tmp_path, script).go()
    starts = run.events_of("start")
    assert [event.replace("greedy", "start") for event in run.events_of("greedy")] == starts
    assert run.time_of("finish 0") == pytest.approx(run.time_of("start 0 at 0") + 13.0)
    assert run.time_of("finish 1") == pytest.approx(run.time_of("start 1 at 0") + 10.0)
    require_the_bound(run)
    for step, groups in run.taken:
        samples = run.reports.groups[step]
        assert [(sample.group_id, sample.greedy_reward) for sample in samples] == [
            (group, group / 10) for group in groups for _ in range(2)
        ]
        assert run.reports.rows[step]["rollout/sampled_tokens"] == 4.0, "two samples of two groups, one token each"
        assert run.reports.rows[step]["rollout/greedy_reward"] == pytest.approx(sum(groups) / 20)
    rows = run.reports.rows.values()
    assert sum(row["rollout/greedy_tokens"] for row in rows) == len(starts) == 6
    assert {row["reward/mean"] for row in rows} == {0.5}


def test_a_group_whose_greedy_answer_fails_has_no_baseline_and_is_dropped(tmp_path: Path):
    def play(group: int) -> Play:
        return Play(greedy=None if group == 1 else 0.5)

    run = ScriptedRun(tmp_path, Script(steps=2, play=play, plays_greedy=True)).go()
    assert run.taken == [(1, [0, 2]), (2, [3, 4])]
    assert run.reports.rows[1]["rollout/failed"] == run.reports.rows[1]["rollout/dropped_failed"] == 1.0
    assert run.reports.rows[1]["rollout/greedy_reward"] == 0.5
    never = Script(play=lambda group: Play(greedy=None), plays_greedy=True, max_dropped_groups=2)
    with pytest.raises(GenerationError, match=r"3 groups in a row gave nothing .* its greedy answer: OSError: gone"):
        ScriptedRun(tmp_path / "never", never).go()


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_resumed_run_plays_greedy_answers_of_unfinished_groups_again(tmp_path: Path, max_staleness: int):
    script = Script(steps=4, max_staleness=max_staleness, plays_greedy=True, settings={"ckpt_interval": 1})
    run = ScriptedRun(tmp_path, script)
    run.log.when("train 2", run.loop.stop)
    run.go()
    resumed = run.resumed()
    require_nothing_is_lost(run, resumed)
    again = [event.replace("greedy", "start") for event in resumed.events_of("greedy")]
    assert again == resumed.events_of("start")
    assert all(sample.greedy_reward == 0.5 for step in (3, 4) for sample in resumed.reports.groups[step])


@STALENESS
def test_failed_samples_are_written_with_their_step_counted_by_kind_and_warned_of_at_once(
    tmp_path: Path, max_staleness: int, caplog: Any
):
    warned_at: list[int] = []

    def play(group: int) -> Play:
        warned_at.append(caplog.text.count("a sample failed and is not used: OSError: gone (the first OSError;"))
        return Play(seconds=10.0 + group, rewards={1: (None, None), 4: (1.0, None)}.get(group, (0.0, 1.0)))

    run = ScriptedRun(tmp_path, Script(steps=4, max_staleness=max_staleness, play=play)).go()
    assert sorted((group, sample) for _, group, sample in run.reports.failed) == [(1, 0), (1, 1), (4, 1)]
    for step, row in run.reports.rows.items():
        failed = sum(step == of_step for of_step, _, _ in run.reports.failed)
        assert row["rollout/failed"] == row.get("rollout/failed/OSError", 0.0) == failed
    assert warned_at[-1] == 1, "once, while the run goes on"


@STALENESS
def test_more_failures_than_allowed_stop_the_run_with_a_checkpoint_and_are_all_written(
    tmp_path: Path, max_staleness: int
):
    """Of each step's eight samples four may fail."""
    rewards = {0: (0.0, 1.0, None, None)}

    def play(group: int) -> Play:
        return Play(rewards=rewards.get(group % 2, (0.0, 1.0, None, None) if group < 4 else (1.0, None, None, None)))

    script = Script(
        steps=6, max_staleness=max_staleness, play=play, max_failure_rate=0.5, eval_play=Play(rewards=(0.0,) * 4)
    )
    run = ScriptedRun(tmp_path, script)
    message = (
        r"rollout: \d+ of \d+ samples failed, of 8 that belong together \(\d+ OSError\), and "
        r"trainer\.max_failure_rate is 0\.5; the last one: OSError: gone"
    )
    with pytest.raises(GenerationError, match=message):
        run.go()
    last = run.loop.steps_done
    assert last > 0
    assert run.events_of("checkpoint") == [f"checkpoint {last}"]
    assert sum(row["rollout/failed"] for row in run.reports.rows.values()) == sum(
        s <= last for s, _, _ in run.reports.failed
    )
    assert {step for step, _, _ in run.reports.failed} <= set(range(1, last + 2))
    written = Counter(group for _, group, _ in run.reports.failed)
    assert written == {group: play(group).rewards.count(None) for group in written}
    assert written.keys() >= {int(event.split()[1]) for event in run.events_of("finish")}
    require_nothing_is_lost(run, run.resumed(max_failure_rate=1.0))


def test_more_failures_in_an_evaluation_than_allowed_stop_the_run_and_it_is_evaluated_again(tmp_path: Path):
    script = Script(
        play=lambda group: Play(rewards=(0.0, 1.0, 0.0)),
        eval_rows=2,
        eval_play=Play(rewards=(None, 1.0, None)),
        settings={"eval_interval": 1},
        max_failure_rate=0.5,
    )
    run = ScriptedRun(tmp_path, script)
    with pytest.raises(GenerationError, match=r"eval: 4 of 6 samples failed, of 6 that belong together \(4 OSError\)"):
        run.go()
    assert run.events_of("evaluated", "row", "checkpoint") == ["row 1", "checkpoint 1"]
    assert run.reports.failed_in_evaluation == 4
    resumed = run.resumed(max_failure_rate=0.7).go()
    assert resumed.reports.rows[1]["eval/failed/OSError"] == 4.0


def test_groups_without_a_signal_are_dropped_until_too_many_of_them_end_the_run(tmp_path: Path):
    def play(group: int) -> Play:
        return Play(rewards=(1.0, 1.0) if group >= 2 else (0.0, 1.0))

    run = ScriptedRun(tmp_path, Script(play=play, drop_zero_variance=True, max_dropped_groups=4))
    with pytest.raises(GenerationError, match="5 groups in a row gave nothing to train on, and the limit is 4"):
        run.go()
    assert list(run.reports.rows) == [1]
    assert len(run.events_of("drop")) == 4
    assert run.events[-3:] == ["fail GenerationError", "save 1", "checkpoint 1"]


def test_a_batch_that_is_given_up_is_taken_again_from_new_groups_of_the_same_version(tmp_path: Path):
    def play(group: int) -> Play:
        return Play(rewards=(1.0, 1.0) if group in (2, 3) else (0.0, 1.0))

    run = ScriptedRun(tmp_path, Script(play=play, min_replace_ratio=0.6)).go()
    assert run.taken == [(1, [0, 1]), (2, [2, 3]), (2, [4, 5]), (3, [6, 7])]
    assert "start 4 at 1" in run.events
    assert list(run.reports.rows) == [1, 2, 3]


REJECTING = {"replace": {"min_replace_ratio": 0.6}, "filter": {"drop_zero_variance": True}}


@pytest.mark.parametrize("rule", REJECTING)
@pytest.mark.parametrize("useless", [(4, 5), (4, 5, 6, 7), (2, 3, 5)])
@STALENESS
def test_a_last_batch_that_is_given_up_is_taken_again_too(
    tmp_path: Path, max_staleness: int, useless: tuple[int, ...], rule: str
):
    def play(group: int) -> Play:
        return Play(rewards=(1.0, 1.0) if group in useless else (0.0, 1.0))

    run = ScriptedRun(tmp_path, Script(play=play, max_staleness=max_staleness, **REJECTING[rule])).go()
    assert list(run.reports.rows) == [1, 2, 3]
    assert run.events[-1] == "end 3"


@pytest.mark.parametrize("rule", REJECTING)
@STALENESS
def test_a_stop_at_any_moment_loses_no_group_where_batches_are_given_up(
    tmp_path_factory: pytest.TempPathFactory, max_staleness: int, rule: str
):
    """Each is trained on once, or given up: then it is played again, as in the run without the stop."""

    def play(group: int) -> Play:
        return Play(seconds=one_after_another(group).seconds, rewards=(1.0, 1.0) if group in (2, 3, 6) else (0.0, 1.0))

    script = Script(steps=3, max_staleness=max_staleness, play=play, **REJECTING[rule])
    is_over, turn = False, max_staleness
    while not is_over:
        run = ScriptedRun(tmp_path_factory.mktemp("run"), script)
        run.go(on_turn=lambda number, run=run, turn=turn: run.loop.stop() if number == turn else None)
        is_over, turn = not run.loop.was_stopped, turn + 4  # the moments of one step come again in the next
        runs = [run, run.resumed().go()] if run.loop.was_stopped and run.loop.steps_done > 0 else [run]
        if run.loop.steps_done > 0:
            assert [step for each in runs for step in each.trained] == [1, 2, 3]
            require_every_group_was_trained_on_or_given_up(*runs)


def require_every_group_was_trained_on_or_given_up(*runs: ScriptedRun) -> None:
    known = Counter(group for run in runs for groups in run.trained.values() for group in groups)
    assert max(known.values()) == 1
    rejected = [groups for run in runs for _, groups in run.taken if groups not in run.trained.values()]
    known.update(group for groups in rejected for group in groups)
    known.update(int(event.split()[1]) for run in runs for event in run.events_of("drop"))
    started = {int(event.split()[1]) for run in runs for event in run.events_of("start")}
    assert started <= known.keys() | set(runs[-1].buffer.outstanding)


# --- what goes wrong --------------------------------------------------------------------------------------------------


@STALENESS
def test_a_generator_that_raises_ends_the_run_after_the_step_under_way_with_its_own_error_and_a_checkpoint(
    tmp_path: Path, max_staleness: int
):
    """At staleness 0 the step waits for it; else it raises while another step is trained, which is finished first."""
    boom = OSError("the environment is gone")
    script = Script(
        max_staleness=max_staleness, play=lambda group: Play(seconds=13.0, error=boom) if group == 3 else Play()
    )
    run = ScriptedRun(tmp_path, script)
    with pytest.raises(OSError, match="the environment is gone"):
        run.go()
    assert run.events_of("row", "save", "fail") == (
        ["row 1", "fail OSError", "save 1"] if max_staleness == 0 else ["fail OSError", "row 1", "save 1"]
    )
    assert not any(event.startswith("finish") for event in run.events[run.events.index("fail OSError") :])
    require_nothing_is_lost(run, run.resumed(play=lambda group: Play()))


@pytest.mark.parametrize(
    ("event", "error", "after"),
    [
        ("score", WorkerError("rank 0 died"), []),
        ("train 2", WorkerError("rank 0 died"), []),
        ("send 2", WeightSyncError("a tensor is missing"), ["row 2", "save 2", "checkpoint 2"]),
        ("evaluated 2", OSError("no space for the samples"), ["row 2", "save 2", "checkpoint 2"]),
        ("row 2", OSError("no space for the row"), ["save 2", "checkpoint 2"]),
        ("save 2", OSError("the disk is full"), []),
        ("export 2", OSError("the disk is full"), []),
    ],
)
@STALENESS
def test_an_error_of_a_part_ends_the_run_there_and_saves_the_last_step_where_its_weights_are_whole(
    tmp_path: Path, max_staleness: int, event: str, error: Exception, after: list[str]
):
    """Nothing is trained, published or evaluated after it, and what failed to be written is not tried again; an engine
    whose sync broke stays paused."""
    settings = {"ckpt_interval": 2, "eval_interval": 2, "hf_save_interval": 2}
    script = Script(max_staleness=max_staleness, errors={event: error}, settings=settings, eval_rows=1)
    run = ScriptedRun(tmp_path, script)
    with pytest.raises(type(error), match=str(error)):
        run.go()
    found = run.events[run.events.index(event) + 1 :]
    assert [each for each in found if not each.startswith("finish")] == after
    assert run.engine.serves.is_set() == (not event.startswith("send"))
    saved = [2] if after or event == "export 2" else []
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == [f"step_{step:06d}" for step in saved]
    if saved:
        resumed = run.resumed(errors={}).go()
        is_complete = event == "export 2"
        assert list(resumed.reports.rows) == ([3] if is_complete else [2, 3])
        assert resumed.events_of("evaluated")[0] == ("evaluated 3" if is_complete else "evaluated 2")
        assert resumed.buffer.outstanding == ()


@STALENESS
@pytest.mark.parametrize("num_scored", [2, 3])
def test_groups_that_were_taken_when_the_error_came_are_played_again(
    tmp_path: Path, max_staleness: int, num_scored: int
):
    run = ScriptedRun(tmp_path, Script(steps=5, max_staleness=max_staleness))
    update: Any = run.update
    score, scored = update.score, []

    async def scored_or_raised(batch: Batch) -> Batch:
        scored.append(batch)
        if len(scored) == num_scored:
            raise WorkerError("rank 0 died")
        return await score(batch)

    update.score = scored_or_raised
    with pytest.raises(WorkerError, match="rank 0 died"):
        run.go()
    assert run.events_of("save") == [f"save {num_scored - 1}"]
    require_nothing_is_lost(run, run.resumed())


def test_an_error_after_which_nothing_can_be_saved_is_still_the_error(tmp_path: Path, caplog: Any):
    errors = {"send 2": WorkerError("rank 0 died"), "save 2": WorkerError("the ranks have ended")}
    with pytest.raises(WorkerError, match="rank 0 died"):
        ScriptedRun(tmp_path, Script(errors=errors)).go()
    assert "step 2 could not be saved after WorkerError: the ranks have ended" in caplog.text


def test_an_evaluation_in_which_everything_fails_ends_the_run_before_the_row(tmp_path: Path):
    script = Script(
        eval_rows=2, eval_play=Play(rewards=(None, None)), settings={"eval_interval": 1, "ckpt_interval": 1}
    )
    run = ScriptedRun(tmp_path, script)
    with pytest.raises(GenerationError, match=r"evaluation: all 4 samples failed; the first: OSError: gone"):
        run.go()
    assert run.events_of("evaluated", "row", "save") == ["row 1", "save 1"]
    assert "eval/reward" not in run.reports.rows[1]
    resumed = run.resumed(eval_play=Play()).go()
    assert resumed.events_of("evaluated", "row")[:2] == ["evaluated 1", "row 1"]
    assert resumed.reports.rows[1]["eval/reward"] == 0.5


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)], ids=["one is lost", "one comes back"])
def test_a_sync_that_another_number_of_engines_broke_is_done_again_for_those_that_are_there(
    tmp_path: Path, before: int, after: int
):
    class TwoEngines(ScriptedEngine):
        num_alive = before

        def num_weight_receivers(self) -> int:
            return self.num_alive

        async def update_weights(self, rendezvous: Rendezvous, version: int) -> Manifest:
            if version == 1 and self.num_alive == before:
                self.num_alive = after
                raise WeightSyncError("the sync was opened for other engines")
            return await super().update_weights(rendezvous, version)

    run = ScriptedRun(tmp_path, Script(steps=2), engine_class=TwoEngines).go()
    assert run.events_of("pause", "send", "serve", "published") == [
        "pause", "send 0", "serve 0",
        "pause", "send 1", "pause", "send 1", "serve 1", "published 1",
        "pause", "send 2", "serve 2", "published 2",
    ]  # fmt: skip


class LosesItself(ScriptedEngine):
    """An only engine whose process ends in a sync: it refuses its part before anybody knows that it is dead, and is
    started again a minute later."""

    num_losses = 1
    is_lost = False

    def num_weight_receivers(self) -> int:
        return 1

    async def has_lost_engines(self) -> bool:
        await asyncio.sleep(60.0 if self.is_lost else 10.0)
        return self.is_lost

    async def update_weights(self, rendezvous: Rendezvous, version: int) -> Manifest:
        self.is_lost = version == 1 and self.num_losses > 0
        if self.is_lost:
            self.num_losses -= 1
            raise WeightSyncError("the only engine did not take it")
        return await super().update_weights(rendezvous, version)


@pytest.mark.parametrize("num_losses", [1, 2])
def test_a_run_outlives_its_only_engine_that_is_lost_in_a_sync(tmp_path: Path, num_losses: int):
    class Lost(LosesItself):
        pass

    Lost.num_losses = num_losses
    run = ScriptedRun(tmp_path, Script(steps=2), engine_class=Lost).go()
    assert run.events_of("pause", "send", "serve", "published") == [
        "pause", "send 0", "serve 0",
        *["pause", "send 1"] * (1 + num_losses), "serve 1", "published 1",
        "pause", "send 2", "serve 2", "published 2",
    ]  # fmt: skip
    assert run.time_of("serve 1") - run.time_of("send 1") > 60.0 * num_losses


def test_a_sync_that_ends_the_engine_in_every_try_ends_the_run(tmp_path: Path):
    class AlwaysLost(LosesItself):
        num_losses = 100

    run = ScriptedRun(tmp_path, Script(steps=2), engine_class=AlwaysLost)
    with pytest.raises(WeightSyncError, match=r"engines were lost in each of 3 tries to publish it; .*did not take it"):
        run.go()
    assert run.events_of("send") == ["send 0", "send 1", "send 1", "send 1"]


def test_a_sync_that_fails_with_all_engines_alive_ends_the_run_with_its_own_error(tmp_path: Path):
    class Refuses(LosesItself):
        async def update_weights(self, rendezvous: Rendezvous, version: int) -> Manifest:
            if version == 1:
                raise WeightSyncError("it does not fit")
            return await super().update_weights(rendezvous, version)

    run = ScriptedRun(tmp_path, Script(steps=2), engine_class=Refuses)
    with pytest.raises(WeightSyncError, match="it does not fit"):
        run.go()
    assert run.events_of("send") == ["send 0", "send 1"]


@pytest.mark.parametrize(
    ("event", "after_s", "expected", "num_syncs"),
    [
        ("start 2 at 1", 5.0, ["pause", "send 1", "serve 1", "take 2: 2 3", "score", "train 2", "pause", "send 2"], 5),
        ("train 2", 1.0, ["pause", "send 2", "serve 2", "published 2", "row 2"], 4),
        ("send 2", 1.0, ["serve 2", "published 2", "row 2", "pause", "send 2", "serve 2"], 5),
    ],
    ids=["between two steps", "while a step changes the weights", "in the middle of a sync"],
)
def test_an_engine_that_comes_back_gets_the_version_at_once_or_with_the_step_that_is_changing_it(
    tmp_path: Path, event: str, after_s: float, expected: list[str], num_syncs: int
):
    run = ScriptedRun(tmp_path, Script(), engine_class=RestartedEngine)
    assert isinstance(run.engine, RestartedEngine)
    run.log.when(event, run.engine.restart, after_s=after_s)
    run.go()
    events = [each for each in run.events if not each.startswith(("start", "finish"))]
    restarted = events.index("restart") + 1
    assert events[restarted : restarted + len(expected)] == expected
    assert len(run.events_of("send")) == num_syncs


# --- deadlines --------------------------------------------------------------------------------------------------------


def test_a_group_that_never_ends_is_a_deadline_that_says_what_is_missing(tmp_path: Path):
    script = Script(
        play=lambda group: Play(seconds=1e9 if group == 3 else 10.0), settings={"generation_timeout_s": 600.0}
    )
    run = ScriptedRun(tmp_path, script)
    missing = r"step 1: 1 of 2 groups were finished in 600 s \(trainer\.generation_timeout_s\); 2 are outstanding"
    with pytest.raises(DeadlineError, match=missing):
        run.go()
    assert run.time_of("save 1") == run.time_of("row 1") + 600.0


def test_an_evaluation_that_never_ends_is_a_deadline_and_what_it_played_ends_with_it(tmp_path: Path):
    script = Script(
        eval_rows=3, eval_play=Play(seconds=1e9), settings={"eval_interval": 2, "generation_timeout_s": 90.0}
    )
    run = ScriptedRun(tmp_path, script)
    with pytest.raises(
        DeadlineError, match=r"evaluation of 3 rows was not finished within 90 s \(trainer\.generation_"
    ):
        run.go()
    assert run.time_of("save 2") == run.time_of("evaluate") + 90.0


@pytest.mark.parametrize(("ckpt_interval", "waits_from"), [(1, "row 2"), (3, "copy 3")], ids=["next save", "end"])
def test_ranks_that_never_finish_a_save_in_the_background_are_a_deadline(
    tmp_path: Path, ckpt_interval: int, waits_from: str
):
    """The next save waits for them, and the end of the run."""
    settings = {"ckpt_interval": ckpt_interval, "saves_in_background": True, "worker_timeout_s": 300.0}
    run = ScriptedRun(tmp_path, Script(save_s=1e9, settings=settings))
    partial = rf"step_00000{ckpt_interval}\.partial: waited 300 s \(trainer\.worker_timeout_s\) for the ranks to write"
    with pytest.raises(DeadlineError, match=partial):
        run.go()
    assert run.ended_at == pytest.approx(run.time_of(waits_from) + 300.0, abs=0.2), "it looks every 0.05 s"
    assert list_checkpoints(tmp_path / "checkpoints") == []


# --- stops ------------------------------------------------------------------------------------------------------------

PHASES = {
    "score": ("score", 0.5, 1),
    "train": ("train 2", 2.0, 2),
    "publish": ("send 2", 1.0, 2),
    "evaluate": ("evaluate", 3.0, 2),
    "checkpoint": ("save 2", 1.0, 2),
}
"""An event, the seconds after it, and the last step of a run that is stopped then."""


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
    assert len(run.taken) == last, "no other step is begun"
    is_cut = phase in ("train", "publish", "evaluate")
    assert run.events_of("evaluated") == ([] if is_cut else ["evaluated 2"][: last - 1])
    assert run.events[-2:] == [f"checkpoint {last}", f"end {last}"]
    resumed = run.resumed()
    require_nothing_is_lost(run, resumed)
    if is_cut:
        assert resumed.events_of("evaluated", "row", "start")[:2] == ["evaluated 2", "row 2"]
        assert resumed.reports.rows[2].keys() >= run.reports.rows[2].keys() | {"eval/reward"}


@STALENESS
def test_a_stop_while_a_step_waits_for_its_groups_waits_for_none_of_them(tmp_path: Path, max_staleness: int):
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


def require_nothing_is_lost(*runs: ScriptedRun) -> None:
    """The runs, each of which continues the one before, together train every step, and every group once."""
    runs[-1].go()
    assert [step for run in runs for step in run.trained] == list(range(1, runs[0].script.steps + 1))
    groups = Counter(group for run in runs for groups in run.trained.values() for group in groups)
    assert groups == Counter(range(runs[0].script.steps * runs[0].script.groups_per_step))


class ForgetsWhatIsFinished(RecordedBuffer):
    """Wrong: a checkpoint neither holds the groups that wait to be trained on nor lists them to be played again."""

    @property
    def outstanding(self) -> tuple[int, ...]:
        return tuple(group for group in super().outstanding if group not in self._finished)

    @property
    def untrained(self) -> tuple[FinishedGroup, ...]:
        return ()


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_groups_that_wait_to_be_trained_on_are_in_the_checkpoint_and_not_played_again(
    tmp_path: Path, max_staleness: int
):
    """Group 3 is still being played when the run ends, one sample of group 2 failed."""

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


def test_a_failed_sample_of_a_group_that_waits_is_counted_once_where_an_error_ends_the_run(tmp_path: Path):
    """The run that ends writes it at once, under a step that is not reached; its checkpoint still has it."""
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


def test_a_group_that_a_checkpoint_does_not_list_is_seen(tmp_path: Path):
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
    """At every turn of the event loop, whatever is half done: the resumed run trains on all that is left."""
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
    """Those of groups that the resumed run plays again too: finished, and not trained on yet."""

    def play(group: int) -> Play:
        rewards = (None, None) if group == 5 else (None, 1.0) if group % 2 else (0.0, 1.0)
        return Play(seconds=one_after_another(group).seconds, rewards=rewards)

    script = Script(steps=4, max_staleness=max_staleness, play=play)
    is_over, turn = False, max_staleness
    while not is_over:
        run = ScriptedRun(tmp_path_factory.mktemp("run"), script)
        run.go(on_turn=lambda number, run=run, turn=turn: run.loop.stop() if number == turn else None)
        is_over, turn = not run.loop.was_stopped, turn + 4
        runs = [run, run.resumed().go()] if run.loop.was_stopped and run.loop.steps_done > 0 else [run]
        if run.loop.steps_done > 0:
            failed = Counter((group, sample) for each in runs for _, group, sample in each.reports.failed)
            assert max(failed.values()) == 1
            rows = [row for each in runs for row in each.reports.rows.values()]
            assert sum(row["rollout/failed"] for row in rows) == len(failed)
            assert sum(row["rollout/dropped_failed"] for row in rows) == 1.0


class Once(dict[str, BaseException]):
    """Errors that are raised once."""

    def __getitem__(self, event: str) -> BaseException:
        return self.pop(event)


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [FULL, WeightSyncError("rank 0 could not write to /tmp/x: No space left on device")])
@STALENESS
def test_a_weight_sync_that_finds_no_room_is_done_again_once_there_is_some(
    tmp_path: Path, max_staleness: int, error: Exception, caplog: pytest.LogCaptureFixture
):
    script = Script(max_staleness=max_staleness, errors=Once({"send 2": error}))
    run = ScriptedRun(tmp_path, script).go()
    assert (run.events.count("send 2"), run.events.count("serve 2")) == (2, 1)
    assert [*run.trained] == [1, 2, 3]
    assert f"disk full: weight version 2 is sent again in 5 s ({error}). Make room there, or" in caplog.text


def test_a_weight_sync_that_never_finds_room_ends_the_run_with_a_checkpoint(tmp_path: Path):
    run = ScriptedRun(tmp_path, Script(errors={"send 2": FULL}))
    with pytest.raises(DiskFullError, match=r"disk full: weight version 2 found no room within 600 s \(.*Make room"):
        run.go()
    assert run.events[-2:] == ["save 2", "checkpoint 2"]


def test_a_model_that_found_no_room_is_written_by_the_next_step(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    script = Script(steps=6, settings={"hf_save_interval": 2}, errors=Once({"export 2": FULL, "export 3": FULL}))
    run = ScriptedRun(tmp_path, script).go()
    assert run.events_of("export") == [f"export {step}" for step in (2, 3, 4, 6)]
    assert sorted(path.name for path in (tmp_path / "exports").iterdir()) == ["step_000004", "step_000006"]
    assert caplog.text.count("the run continues, and every step tries to write its own") == 2


@pytest.mark.parametrize("event", ["end 3", "export model"])
@STALENESS
def test_trained_weights_are_saved_where_the_last_export_fails(tmp_path: Path, max_staleness: int, event: str):
    """Also in a run that saves no checkpoints."""
    settings = {"ckpt_interval": -1, "model_path": tmp_path / "model"}
    script = Script(max_staleness=max_staleness, settings=settings, errors={event: OSError("the disk is gone")})
    run = ScriptedRun(tmp_path, script)
    with pytest.raises(OSError, match="the disk is gone"):
        run.go()
    assert run.events[-1] == "checkpoint 3"
    shutil.rmtree(tmp_path / "model", ignore_errors=True)
    resumed = run.resumed(errors={}).go()
    assert resumed.events_of("train", "end", "export") == ["end 3", "export model"]


def test_a_run_that_ends_well_or_is_stopped_saves_no_more_than_it_was_told(tmp_path: Path):
    """Negative control."""
    script = Script(settings={"model_path": tmp_path / "model"})
    assert ScriptedRun(tmp_path, script).go().events_of("save", "end", "export") == ["end 3", "export model"]
    stopped = ScriptedRun(tmp_path, script)
    stopped.log.when("train 2", stopped.loop.stop)
    assert stopped.go().events_of("save", "end", "export") == ["save 2", "end 2"]


@STALENESS
def test_a_model_that_a_kill_came_before_is_written_by_the_run_that_goes_on(tmp_path: Path, max_staleness: int):
    settings = {"ckpt_interval": 2, "hf_save_interval": 2}
    run = ScriptedRun(tmp_path, Script(steps=4, max_staleness=max_staleness, settings=settings)).go()
    state = load_state(tmp_path / "checkpoints" / "step_000002")
    models = tmp_path / "exports"
    assert ScriptedRun(tmp_path, run.script, state=state).go().events_of("export") == ["export 4"]
    (models / "step_000002").rename(models / "step_000002.partial")  # what a kill in the middle leaves
    assert ScriptedRun(tmp_path, run.script, state=state).go().events_of("export") == ["export 2", "export 4"]
    assert sorted(path.name for path in models.iterdir()) == ["step_000002", "step_000004"]


@STALENESS
def test_a_run_that_is_ended_at_any_moment_leaves_no_task_and_a_whole_last_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, max_staleness: int
):
    """A second signal cancels the run: `ScriptedRun.go` sees to it that no task is left."""
    script = attrs.evolve(EVERYTHING, max_staleness=max_staleness, settings={"ckpt_interval": 1, "eval_interval": 2})
    for second in range(0, 72, 2):
        run = ScriptedRun(tmp_path_factory.mktemp("run"), script)
        ended_after(run, second + 0.25)
        complete = [int(event.split()[1]) for event in run.events_of("checkpoint")]
        assert len(list_checkpoints(run.directory / "checkpoints")) == len(complete)
        if complete and complete[-1] < script.steps:
            resumed = run.resumed().go()
            assert resumed.taken[0][0] == complete[-1] + 1
            assert list(resumed.reports.rows) == list(range(complete[-1] + 1, script.steps + 1))


def ended_after(run: ScriptedRun, seconds: float) -> None:
    async def work() -> None:
        task = asyncio.create_task(run.work())
        asyncio.get_running_loop().call_later(seconds, task.cancel)
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()):
            raise error

    run_virtually(work())


# --- resumed runs -----------------------------------------------------------------------------------------------------


def test_a_resumed_run_publishes_its_version_and_plays_what_was_under_way_before_anything_new(tmp_path: Path):
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
    assert list(resumed.reports.rows) == [3, 4], "the evaluation before training was the first run's"


def test_a_run_that_is_stopped_before_it_started_all_earlier_groups_again_loses_none(tmp_path: Path):
    """It has less room for them than the run before: they wait, and come before new ones."""
    run = ScriptedRun(tmp_path, Script(steps=6, max_staleness=3))
    run.log.when("train 1", run.loop.stop)
    run.go()
    second = run.resumed(max_staleness=0)
    second.log.when("train 2", second.loop.stop)
    second.go()
    # The bound of the second run is too narrow for groups that the first one finished: they are played again.
    assert second.events_of("start") == ["start 2 at 1", "start 3 at 1"]
    third = second.resumed()
    require_nothing_is_lost(run, second, third)
    assert third.events_of("start")[:4] == ["start 4 at 2", "start 5 at 2", "start 6 at 3", "start 7 at 3"]
