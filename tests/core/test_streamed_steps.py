"""Streamed steps, which train on groups as they finish: the order of events, no lost group, and the whole step's
batch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rl_core.errors import DeadlineError, WorkerError
from rl_core.trainer.groups import FinishedGroup
from rl_core.trainer.loop.buffer import GroupBuffer
from rl_core.trainer.loop.step_training import whole_step
from rl_core.trainer.state.checkpoint import list_checkpoints, load_state
from rl_core.trainer.update.collate import collate
from tests.core.loop_checks import random_script, require_nothing_is_lost
from tests.core.scripted_run import Play, RestartedEngine, Script, ScriptedRun
from tests.core.virtual_time import virtual_now

STREAMED = Script(
    steps=3,
    groups_per_step=3,
    streams=True,
    score_s=3.0,
    train_s=6.0,
    play=lambda group: Play(seconds=10.0 + 4.0 * (2 - group % 3)),
)
"""Scoring and training together take 3 s per group; the third group ends after 10 s, the second after 14 s, the first
after 18 s."""


def test_groups_are_trained_on_while_others_of_the_step_are_still_played(tmp_path: Path):
    run = ScriptedRun(tmp_path, attrs.evolve(STREAMED, steps=1), clock=virtual_now).go()
    assert run.timeline == [
        *("0 pause", "0 send 0", "2 serve 0", "2 start 0 at 0", "2 start 1 at 0", "2 start 2 at 0"),
        *("12 finish 2", "12 take 1: 2", "12 score", "13 add 1: 2"),
        *("16 finish 1", "16 take 1: 1", "16 score", "17 add 1: 1"),
        *("20 finish 0", "20 take 1: 0", "20 score", "21 add 1: 0", "23 train 1"),
        *("23 pause", "23 send 1", "25 serve 1", "25 published 1", "25 row 1", "25 end 1"),
    ]  # fmt: skip
    row = run.reports.rows[1]
    assert row["time/generate"] == 12.0
    assert row["time/score"] + row["time/train"] == 9.0
    assert row["time/train_overlapped"] == 6.0
    assert row["rollout/parts"] == 3.0
    at_once = ScriptedRun(tmp_path / "at_once", attrs.evolve(STREAMED, steps=1, streams=False), clock=virtual_now).go()
    assert at_once.time_of("train 1") == 23.0, "without streaming, training begins only when the streamed training ends"
    same = row.keys() - {"time/train_overlapped", "rollout/parts"}
    assert same == at_once.reports.rows[1].keys()
    assert all(row[name] == at_once.reports.rows[1][name] for name in same if not name.startswith(("time", "tokens_p")))
    samples = [[(one.group_id, one.sample_index) for one in each.reports.groups[1]] for each in (run, at_once)]
    assert samples[0] == samples[1], "both must have the samples in the same order"


def test_a_part_has_all_groups_that_finished_while_the_previous_one_was_trained(tmp_path: Path):
    script = attrs.evolve(
        STREAMED, steps=1, groups_per_step=6, train_s=57.0, play=lambda group: Play(seconds=10.0 + group)
    )
    run = ScriptedRun(tmp_path, script).go()
    assert run.taken == [(1, [0]), (1, [1, 2, 3, 4, 5])]


def test_with_depth_one_a_place_is_kept_for_the_group_that_would_expire(tmp_path: Path):
    """Group 0 takes 100 s. With a staleness bound of 1 it must be in step 2, which meanwhile trains on group 3 and
    keeps a place free."""
    script = Script(
        steps=3,
        groups_per_step=2,
        max_staleness=1,
        streams=True,
        play=lambda group: Play(seconds=100.0 if group == 0 else 5.0),
    )
    run = ScriptedRun(tmp_path, script).go()
    assert run.taken == [(1, [1, 2]), (2, [3]), (2, [0]), (3, [4, 5])]
    assert run.time_of("add 2: 3") < run.time_of("finish 0") == run.time_of("take 2: 0")


@settings(max_examples=25)
@given(
    depth_and_bound=st.sampled_from([(0, 0), (1, 1), (3, 3), (0, 2), (1, 2), (1, 4), (2, 4)]),
    seed=st.integers(0, 10_000),
)
def test_with_any_durations_each_group_is_trained_on_once_within_the_bound(
    tmp_path_factory: pytest.TempPathFactory, depth_and_bound: tuple[int, int], seed: int
):
    depth, bound = depth_and_bound
    script = attrs.evolve(random_script(bound, seed, pipeline_depth=depth), streams=True)
    run = ScriptedRun(tmp_path_factory.mktemp("run"), script).go()
    started_at = {int(event.split()[1]): int(event.split()[3]) for event in run.events_of("start")}
    assert list(run.trained) == list(run.reports.rows) == list(range(1, script.steps + 1))
    assert all(len(groups) == script.groups_per_step for groups in run.trained.values())
    assert all(step - 1 - started_at[group] <= bound for step, groups in run.trained.items() for group in groups)
    assert Counter(group for groups in run.trained.values() for group in groups) == Counter([*started_at])
    assert len(run.events_of("train")) == script.steps, "there must be one optimizer step per batch"


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_stop_at_any_moment_loses_no_group(tmp_path_factory: pytest.TempPathFactory, max_staleness: int):
    """Each run stops at a different even-numbered turn of the event loop. If the stop cuts off a step, the resumed
    run trains on all of the step's groups again."""
    script = attrs.evolve(STREAMED, max_staleness=max_staleness)
    steps_done, given_up = [], 0
    while steps_done.count(script.steps) < 2:
        turn = 2 * len(steps_done)
        run = ScriptedRun(tmp_path_factory.mktemp("run"), script)
        run.go(on_turn=lambda number, run=run, turn=turn: run.loop.stop() if number == turn else None)
        steps_done.append(run.loop.steps_done)
        begun = {step for step, _ in run.taken} - run.trained.keys()
        given_up += bool(begun)
        if run.loop.was_stopped and run.loop.steps_done > 0:
            require_nothing_is_lost(run, run.resumed())
    assert given_up > 5
    assert steps_done == sorted(steps_done)


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_groups_of_an_interrupted_step_are_stored_if_generation_runs_ahead(tmp_path: Path, max_staleness: int):

    def play(group: int) -> Play:
        return Play(seconds=500.0 if group == 3 else 10.0)

    run = ScriptedRun(tmp_path, attrs.evolve(STREAMED, steps=6, max_staleness=max_staleness, play=play))
    run.log.when("row 1", run.loop.stop, after_s=60.0)
    run.go()
    begun = {group for step, groups in run.taken for group in groups if step not in run.reports.rows}
    assert begun, "a step must be under way when the run ends"
    state = load_state(list_checkpoints(tmp_path / "checkpoints")[-1])
    assert begun <= set(state.finished_groups)
    assert 3 in state.restart_groups
    resumed = run.resumed()
    require_nothing_is_lost(run, resumed)
    assert not begun & {int(event.split()[1]) for event in resumed.events_of("start")}


@pytest.mark.parametrize(
    ("event", "is_saved"), [("add 2: 4", False), ("train 2", False), ("score", True), ("finish 3", True)]
)
def test_an_error_within_a_step_saves_the_previous_step_unless_a_rank_failed(
    tmp_path: Path, event: str, is_saved: bool
):
    run = ScriptedRun(tmp_path, STREAMED)
    errors: dict[str, Exception] = {}
    run.log.raise_too(errors)
    run.log.when("add 2: 5", lambda: errors.update({event: WorkerError("rank 0 died")}))
    with pytest.raises(WorkerError, match="rank 0 died"):
        run.go()
    assert list(run.reports.rows) == [1]
    assert run.events_of("save") == (["save 1"] if is_saved else [])
    if is_saved:
        require_nothing_is_lost(run, run.resumed())


def test_an_engine_restarted_within_a_step_gets_weights_so_that_the_step_continues(tmp_path: Path):
    run = ScriptedRun(tmp_path, STREAMED, engine_class=RestartedEngine)
    assert isinstance(run.engine, RestartedEngine)
    run.log.when("add 1: 2", run.engine.restart, after_s=2.5)
    run.go()
    assert run.events_of("send")[:3] == ["send 0", "send 0", "send 1"]
    assert run.time_of("restart") < run.time_of("add 1: 1")


def test_the_deadline_error_for_an_endless_group_counts_the_trained_groups(tmp_path: Path):
    script = attrs.evolve(STREAMED, play=lambda group: Play(seconds=1e9 if group == 4 else 10.0))
    run = ScriptedRun(tmp_path, script)
    with pytest.raises(
        DeadlineError, match=r"step 2: still needs 1 of its 3 groups after 600 s .*; 0 finished, 1 in progress"
    ):
        run.go()
    assert run.events_of("save") == ["save 1"]


def test_failed_samples_and_dropped_groups_are_counted_once(tmp_path: Path):
    def play(group: int) -> Play:
        rewards = (None, None) if group == 4 else (None, 1.0) if group % 2 else (0.0, 1.0)
        return Play(seconds=10.0 + group, rewards=rewards)

    run = ScriptedRun(tmp_path, attrs.evolve(STREAMED, steps=4, play=play, max_staleness=1)).go()
    rows = list(run.reports.rows.values())
    assert sum(row["rollout/failed"] for row in rows) == len(set(run.reports.failed)) == len(run.reports.failed)
    assert sum(row["rollout/dropped_failed"] for row in rows) == 1.0


# --- the buffer -------------------------------------------------------------------------------------------------------


def could_be_trained(
    outstanding: list[int], *, next_step: int, places: int, groups_per_step: int, max_staleness: int
) -> bool:
    """Assigns groups with these start versions to steps, oldest first. True if no group expires before its step."""
    return all(
        next_step + max(0, index - places + groups_per_step) // groups_per_step <= version + max_staleness
        for index, version in enumerate(sorted(outstanding))
    )


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_part_has_as_many_groups_as_the_bound_allows(data: st.DataObject):
    """The buffer takes finished groups oldest first. It must take as many as it can while all other groups can still be
    trained on in time. The test finds this number by trying each."""
    size, bound = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3))
    step = data.draw(st.integers(bound, bound + 2))
    versions = data.draw(st.lists(st.integers(step - bound, step), max_size=3 * size))
    is_finished = data.draw(st.lists(st.booleans(), min_size=len(versions), max_size=len(versions)))
    places = data.draw(st.integers(1, size))
    case = {"next_step": step, "places": places, "groups_per_step": size, "max_staleness": bound}
    assume(could_be_trained(versions, **case))
    buffer = GroupBuffer(
        groups_per_step=size,
        max_staleness=bound,
        pipeline_depth=0,
        version=step,
        last_version=99,
        finished=[
            FinishedGroup(group_id=number, start_version=version, trajectories=())
            for number, version in enumerate(versions)
            if is_finished[number]
        ],
        in_parts=True,
    )
    state: Any = buffer
    state._outstanding = dict(enumerate(versions))
    state._places = places
    finished = sorted((version, number) for number, version in enumerate(versions) if is_finished[number])
    most = 0
    for count in range(min(places, len(finished)) + 1):
        taken = {number for _, number in finished[:count]}
        left = [version for number, version in enumerate(versions) if number not in taken]
        after = {**case, "places": places - count}
        if count == places:
            after = {**case, "places": size, "next_step": step + 1}
        most = count if could_be_trained(left, **after) else most
    assert [group.group_id for group in state._choice()] == [number for _, number in finished[:most]]
    state._in_parts = False
    assert len(state._choice()) == (most if most == places else 0)


# --- the whole step's batch -------------------------------------------------------------------------------------------


def test_parts_in_any_order_give_the_batch_of_all_groups(tmp_path: Path):
    run = ScriptedRun(tmp_path, Script())
    generator: Any = run.loop._generator
    groups = []
    for number, version in ((0, 1), (1, 0), (2, 1), (3, 0), (4, 0)):
        rewards = tuple(0.1 * number + sample for sample in range(2 + number % 2))
        request: Any = type("Request", (), {"group_id": number, "start_version": version})
        trajectories = tuple(generator._trajectory(request, index, reward) for index, reward in enumerate(rewards))
        groups.append(FinishedGroup(group_id=number, start_version=version, trajectories=trajectories))
    oldest_first = sorted(groups, key=lambda group: (group.start_version, group.group_id))
    expected = collate([one for group in oldest_first for one in group.trajectories])
    for cut in ((groups[:2], groups[2:]), (groups[3:], groups[1:3], groups[:1])):
        parts = [(part, collate([one for group in part for one in group.trajectories])) for part in cut]
        found, batch = whole_step(parts)
        assert found == oldest_first
        assert set(batch) == set(expected)
        assert all(torch.equal(batch[name], expected[name]) for name in batch)
