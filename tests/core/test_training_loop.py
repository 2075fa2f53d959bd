"""Loop, buffer and rollouts together: the order of events at several staleness bounds."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from rl_core.interfaces import Control
from rl_core.tasks import IdleTime
from tests.core.loop_checks import EVERYTHING, STALENESS
from tests.core.scripted_run import EventLog, Play, Script, ScriptedEngine, ScriptedRun, SleepingEngine
from tests.core.virtual_time import virtual_now


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


def test_one_step_off_policy_training_generates_a_batch_while_another_is_trained_on(tmp_path: Path):
    assert ScriptedRun(tmp_path, attrs.evolve(EVERYTHING, max_staleness=1)).go().timeline == [
        *("0 pause", "0 send 0", "2 serve 0"),
        *("2 evaluate", "8 evaluated 0", "8 row 0"),
        *("8 start 0 at 0", "8 start 1 at 0", "8 start 2 at 0", "8 start 3 at 0", "15 finish 0", "16.5 finish 1"),
        *("16.5 take 1: 0 1", "16.5 score", "17.5 train 1", "18 finish 2", "19.5 finish 3"),
        *("22.5 pause", "22.5 send 1", "24.5 serve 1", "24.5 published 1", "24.5 row 1"),
        *("24.5 start 4 at 1", "24.5 start 5 at 1"),
        *("24.5 take 2: 2 3", "24.5 score", "25.5 train 2"),
        # Group 4 would finish at 31.5, but the engine freezes it until the sync is over.
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


def test_with_depth_one_and_a_wide_bound_only_the_slow_group_is_over_one_version_old(tmp_path: Path):
    """Group 1 takes 60 s, a step 8 s. With pipeline depth 1 and staleness bound 4, steps 1 to 4 overtake group 1, and
    step 5 waits for it. All other groups are trained on at most one version after their start."""

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


def test_rows_have_idle_times_and_queued_groups(tmp_path: Path):
    """Worked by hand: a group takes 10 s, scoring 1 s, training 5 s, a sync 2 s; the first sync is at 0."""
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
    # Groups 2 and 3 are finished before step 2 begins. Groups 4 and 5 are played from 20 to 30; then no group is left
    # to play.
    assert rows("ahead", 1) == [(20.0, 10.0, 10.0, 2.0, 0.0), (8.0, 0.0, 0.0, 0.0, 2.0), (10.0, 2.0, 8.0, 0.0, 0.0)]


class ManyEngines(ScriptedEngine):
    """Forty engines behind one client. Every second engine is always idle."""

    def __init__(self, log: EventLog, script: Script) -> None:
        super().__init__(log, script)
        self._idle = IdleTime(virtual_now)
        self._before_the_run_s = 100.0  # idle before the first step: no row may count it

    def idle_lap(self) -> dict[str, float]:
        seconds, self._before_the_run_s = self._idle.lap() + self._before_the_run_s, 0.0
        return {str(engine): seconds * (engine % 2) for engine in range(40)}


def test_rows_have_the_idle_time_of_each_of_the_first_32_engines(tmp_path: Path):
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
    assert sum(row["rollout/discarded_tokens"] for row in rows) == 2.0, (
        "the dropped group has two samples of one token each"
    )
    rejecting = Script(max_staleness=max_staleness, play=play, min_replace_ratio=0.9)
    rows = ScriptedRun(tmp_path / "rejecting", rejecting).go().reports.rows.values()
    assert sum(row["rollout/discarded_tokens"] for row in rows) == 4.0, "groups 0 and 1 are rejected together"
    replacing = Script(max_staleness=max_staleness, play=play, min_replace_ratio=0.3)
    rows = ScriptedRun(tmp_path / "replacing", replacing).go().reports.rows.values()
    assert sum(row["rollout/discarded_tokens"] for row in rows) == 2.0, "group 1 is replaced by a copy of group 0"


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


def test_a_background_checkpoint_completes_at_a_step_boundary_or_the_end(tmp_path: Path):
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
        assert not {"pause", "send", "serve", "published", "take"} & set(part.split()), (
            "one version must be served during the evaluation"
        )
    assert ["finish" in part for part in during] == [True, True, False, False], "all groups are finished by step 3"


def test_a_callbacks_requests_are_fulfilled_at_the_end_of_the_step(tmp_path: Path):
    answers = {1: Control(save=True), 2: Control(evaluate=True), 3: Control(stop=True)}
    run = ScriptedRun(tmp_path, Script(steps=5, eval_rows=1, answers=answers)).go()
    assert run.events_of("evaluate", "evaluated", "row", "save", "checkpoint", "end") == [
        "row 1", "save 1", "checkpoint 1",
        "evaluate", "evaluated 2", "row 2",
        "row 3", "save 3", "checkpoint 3", "end 3",
    ]  # fmt: skip
    assert run.loop.was_stopped


def test_callbacks_get_the_directory_of_the_run_wherever_checkpoints_are(tmp_path: Path):
    run = ScriptedRun(tmp_path, Script(steps=1, settings={"checkpoint_root": tmp_path / "other" / "checkpoints"}))
    calls: list[tuple[object, ...]] = []
    run.reports.on_run_start = lambda *arguments: calls.append(arguments)
    run.go()
    assert calls == [(tmp_path, 1, 1)]


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


def test_a_run_whose_episodes_have_no_room_for_another_turn_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    ScriptedRun(tmp_path, Script(steps=3, play=lambda group: Play(end="done" if group < 2 else "context"))).go()
    said = [record.getMessage() for record in caplog.records if "max_input_length" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("step 2: 4 of 4 episodes of this step ended before their environment ended them")
