"""Scripts, and checks of whole runs, that several tests of the scripted loop share."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.core.scripted_run import Play, Script, ScriptedRun

STALENESS = pytest.mark.parametrize("max_staleness", [0, 1, 3])


def one_after_another(group: int) -> Play:
    """Group 4n takes 7 seconds; each of the next three takes 1.5 seconds longer than the one before."""
    return Play(seconds=7.0 + 1.5 * (group % 4))


EVERYTHING = Script(
    steps=3,
    play=one_after_another,
    eval_rows=2,
    settings={"eval_interval": 2, "ckpt_interval": 2, "eval_before_train": True},
)


def random_script(max_staleness: int, seed: int, *, pipeline_depth: int | None = None) -> Script:
    """A random script: durations vary, with occasional evaluations and checkpoints."""
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
    """Fails unless each started group is trained on exactly once, at most `max_staleness` versions after its start."""
    started_at = {int(event.split()[1]): int(event.split()[3]) for event in run.events_of("start")}
    for step, groups in run.taken:
        assert len(groups) == run.script.groups_per_step
        for group in groups:
            assert step - 1 - started_at[group] <= run.script.max_staleness, f"group {group} is too old for step {step}"
    taken = [group for _, groups in run.taken for group in groups]
    assert sorted(taken) == sorted(started_at), "each started group must be trained on exactly once"


def require_nothing_is_lost(*runs: ScriptedRun) -> None:
    """Plays the last run to its end. Fails unless the runs, each resumed from the one before, together train every step
    and every group exactly once."""
    runs[-1].go()
    assert [step for run in runs for step in run.trained] == list(range(1, runs[0].script.steps + 1))
    groups = Counter(group for run in runs for groups in run.trained.values() for group in groups)
    assert groups == Counter(range(runs[0].script.steps * runs[0].script.groups_per_step))


def runs_stopped_at_any_moment(directories: pytest.TempPathFactory, script: Script) -> Iterator[list[ScriptedRun]]:
    """Starts one run after another, and stops each run four turns of the event loop later than the run before, until a
    run ends before it is stopped. Yields each stopped run that had finished a step, together with the run that resumed
    it; finally yields the run that ended. Fails unless several runs were stopped between each step's end and the next
    step's end."""
    stopped_after: list[int] = []
    for turn in itertools.count(script.max_staleness, 4):
        run = ScriptedRun(directories.mktemp("run"), script)
        run.go(on_turn=lambda number, run=run, turn=turn: run.loop.stop() if number == turn else None)
        if not run.loop.was_stopped:
            yield [run]
            break
        stopped_after.append(run.loop.steps_done)
        if run.loop.steps_done > 0:
            yield [run, run.resumed().go()]
    assert min(stopped_after.count(step) for step in range(1, script.steps)) > 3, stopped_after
