"""Groups that are not trained on: failed samples, groups without a signal, rejected batches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rl_core.errors import GenerationError
from tests.core.loop_checks import (
    STALENESS,
    one_after_another,
    require_nothing_is_lost,
    require_the_bound,
    runs_stopped_at_any_moment,
)
from tests.core.scripted_run import Play, Script, ScriptedRun


@STALENESS
def test_a_group_whose_samples_all_fail_is_dropped_and_another_one_is_played_at_once(
    tmp_path: Path, max_staleness: int
):
    rewards = {1: (None, None), 2: (1.0, None)}

    def play(group: int) -> Play:
        return Play(seconds=10.0 + group, rewards=rewards.get(group, (0.0, 1.0)))

    run = ScriptedRun(tmp_path, Script(steps=4, max_staleness=max_staleness, play=play)).go()
    after = run.events.index("drop 1") + 1
    assert run.events[after].startswith("start"), "another group must start in the place of the dropped one"
    assert run.time_of("drop 1") == run.log.entries[after][0]
    assert 1 not in [group for _, groups in run.taken for group in groups]
    assert len(run.events_of("start")) == 4 * 2 + 1
    assert sum(row["rollout/failed"] for row in run.reports.rows.values()) == 3.0
    assert sum(row["rollout/dropped_failed"] for row in run.reports.rows.values()) == 1.0


@STALENESS
def test_a_greedy_answer_is_part_of_its_group_and_is_not_trained_on(tmp_path: Path, max_staleness: int):
    """Greedy answers start at the same versions and in the same order as the samples of their groups. A group finishes
    when its slowest answer does."""

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
        assert run.reports.rows[step]["rollout/sampled_tokens"] == 4.0, "two groups with two samples of one token each"
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
def test_failed_samples_are_written_and_counted_by_kind_and_the_first_causes_a_warning_at_once(
    tmp_path: Path, max_staleness: int, caplog: Any
):
    warned_at: list[int] = []

    def play(group: int) -> Play:
        warning = "a sample failed: OSError: gone (the first failure of kind OSError;"
        warned_at.append(caplog.text.count(warning))
        return Play(seconds=10.0 + group, rewards={1: (None, None), 4: (1.0, None)}.get(group, (0.0, 1.0)))

    run = ScriptedRun(tmp_path, Script(steps=4, max_staleness=max_staleness, play=play)).go()
    assert sorted((group, sample) for _, group, sample in run.reports.failed) == [(1, 0), (1, 1), (4, 1)]
    for step, row in run.reports.rows.items():
        failed = sum(step == of_step for of_step, _, _ in run.reports.failed)
        assert row["rollout/failed"] == row.get("rollout/failed/OSError", 0.0) == failed
    assert warned_at[-1] == 1, "the warning must appear once, while the run goes on"


@STALENESS
def test_too_many_failures_stop_the_run_with_a_checkpoint_and_are_all_written(tmp_path: Path, max_staleness: int):
    """Up to four of each step's eight samples may fail."""
    rewards = {0: (0.0, 1.0, None, None)}

    def play(group: int) -> Play:
        return Play(rewards=rewards.get(group % 2, (0.0, 1.0, None, None) if group < 4 else (1.0, None, None, None)))

    script = Script(
        steps=6, max_staleness=max_staleness, play=play, max_failure_rate=0.5, eval_play=Play(rewards=(0.0,) * 4)
    )
    run = ScriptedRun(tmp_path, script)
    message = (
        r"rollout: \d+ of \d+ finished samples failed \(\d+ OSError\), more than trainer\.max_failure_rate=0\.5 "
        r"allows for a step or evaluation of 8 samples; the last failure: OSError: gone"
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


def test_failures_that_a_run_accepted_do_not_stop_the_run_that_resumes_it(tmp_path: Path):
    """Three of four samples of group 1 fail, which is within the limit if the samples of group 0 count too. Step 1
    trains on group 0, so its checkpoint does not hold group 0. The resumed run counts group 1 first, and the failures
    of group 1 alone exceed the limit."""

    def play(group: int) -> Play:
        return Play(seconds=10.0 + group, rewards=(1.0, None, None, None) if group == 1 else (0.0, 1.0, 0.0, 1.0))

    script = Script(
        groups_per_step=1,
        max_staleness=2,
        play=play,
        max_failure_rate=0.5,
        eval_play=Play(rewards=(0.0,) * 4),
        errors={"send 1": RuntimeError("no network")},
    )
    run = ScriptedRun(tmp_path, script)
    with pytest.raises(RuntimeError, match="no network"):
        run.go()
    assert list(run.reports.rows) == [1]
    resumed = run.resumed(errors={}).go()
    assert resumed.trained == {2: [1], 3: [2]}
    assert resumed.reports.rows[2]["rollout/failed"] == 3.0


def test_too_many_failures_in_an_evaluation_stop_the_run_with_a_checkpoint(tmp_path: Path):
    script = Script(
        play=lambda group: Play(rewards=(0.0, 1.0, 0.0)),
        eval_rows=2,
        eval_play=Play(rewards=(None, 1.0, None)),
        settings={"eval_interval": 1},
        max_failure_rate=0.5,
    )
    run = ScriptedRun(tmp_path, script)
    with pytest.raises(GenerationError, match=r"eval: 4 of 6 finished samples failed \(4 OSError\), .* of 6 samples"):
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


def test_a_discarded_batch_is_replaced_by_new_groups_of_the_same_version(tmp_path: Path):
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
def test_useless_groups_of_the_last_step_are_replaced_too(
    tmp_path: Path, max_staleness: int, useless: tuple[int, ...], rule: str
):
    def play(group: int) -> Play:
        return Play(rewards=(1.0, 1.0) if group in useless else (0.0, 1.0))

    run = ScriptedRun(tmp_path, Script(play=play, max_staleness=max_staleness, **REJECTING[rule])).go()
    assert list(run.reports.rows) == [1, 2, 3]
    assert run.events[-1] == "end 3"


@pytest.mark.parametrize("rule", REJECTING)
@STALENESS
def test_a_stop_at_any_moment_loses_no_group_if_groups_or_batches_are_discarded(
    tmp_path_factory: pytest.TempPathFactory, max_staleness: int, rule: str
):
    """Each group is trained on once, rejected with its batch, dropped, or still outstanding at the end."""

    def play(group: int) -> Play:
        return Play(seconds=one_after_another(group).seconds, rewards=(1.0, 1.0) if group in (2, 3, 6) else (0.0, 1.0))

    script = Script(steps=3, max_staleness=max_staleness, play=play, **REJECTING[rule])
    for runs in runs_stopped_at_any_moment(tmp_path_factory, script):
        assert [step for run in runs for step in run.trained] == [1, 2, 3]
        require_every_group_was_trained_on_or_given_up(*runs)


def require_every_group_was_trained_on_or_given_up(*runs: ScriptedRun) -> None:
    known = Counter(group for run in runs for groups in run.trained.values() for group in groups)
    assert max(known.values()) == 1
    rejected = [groups for run in runs for _, groups in run.taken if groups not in run.trained.values()]
    known.update(group for groups in rejected for group in groups)
    known.update(int(event.split()[1]) for run in runs for event in run.events_of("drop"))
    started = {int(event.split()[1]) for run in runs for event in run.events_of("start")}
    assert started <= known.keys() | set(runs[-1].buffer.outstanding)
