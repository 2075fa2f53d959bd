"""Runs that are killed or stopped at a random moment of a named phase, and resumed until they finish: they lose no
group, train on none twice, and leave nothing behind.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import psutil
import pytest

from rl_core.config import Config
from rl_core.interfaces import TrajectoryStep
from rl_core.trainer import run
from rl_core.trainer.loop.rollouts import Rollouts
from rl_core.trainer.state.checkpoint import RunState
from rl_core.trainer.state.resumed_groups import ResumedGroups, resumed_groups
from rl_core.trainer.state.stored_groups import StoredGroup
from tests.examples.kept_groups import Sizes, require_every_group_once, require_listed_groups_once
from tests.examples.kill_cases import (
    BOUNDS_AND_DEPTHS,
    NUM_CASES,
    OF_RAY,
    STEPS,
    Case,
    Place,
    PlayedOut,
    attempt,
    build,
    case_of,
    newest_state,
    play_out,
    require_nothing_left,
    run_attempt,
    sizes_of,
)
from tests.examples.kill_plugins import SECONDS, Strike
from tests.examples.test_resume import BuildConfig, require_same_run

QUICK_SEEDS = (1, 2, 4)
PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[object, Path]:
    return {}


@pytest.fixture
def uninterrupted(
    references: dict[object, Path], small_run: BuildConfig, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Case], Path]:
    """Plays a case without its strikes (the kills and stops of processes); plays once for all cases with the same
    pipeline depth, dynamic sampling and number of ranks. Returns the run's directory."""

    def find(case: Case) -> Path:
        key = (case.pipeline_depth, case.dynamic_sampling, case.num_ranks)
        if key not in references:
            place = Place(root=tmp_path_factory.mktemp("uninterrupted"))
            calm = attrs.evolve(case, overrides={}, strikes=())
            assert not play_out(small_run, calm, place).strikes
            references[key] = place.run_dir
            shutil.rmtree(place.of_ray, ignore_errors=True)
        return references[key]

    return find


@pytest.fixture
def adopted() -> Iterator[None]:
    """Makes this process adopt orphans, so that the search for living children finds processes that have lost their
    parent.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield
    prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def require_nothing_lost(
    small_run: BuildConfig, case: Case, place: Place, played: PlayedOut, find: Callable[[Case], Path]
) -> None:
    if not case.runs_ahead:
        is_in_process = case.overrides.get("environment__placement") is None
        require_same_run(place.run_dir, find(case), engine_tolerance=0.0 if is_in_process else 1e-5)
    exports = [path.name for path in sorted((place.run_dir / "model").glob("step_*"))]
    assert exports == [f"step_{step:06d}" for step in range(2, STEPS + 1, 2)]
    sizes = sizes_of(build(small_run, case, place.run_dir))
    require_listed_groups_once(place.run_dir, played.resumed_from, sizes)
    require_every_group_once(place.run_dir, place.ledger, sizes)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=() if seed in QUICK_SEEDS else pytest.mark.soak) for seed in range(NUM_CASES)],
)
def test_a_run_killed_at_a_random_moment_loses_nothing(
    seed: int,
    record_property: Callable[[str, object], None],
    small_run: BuildConfig,
    uninterrupted: Callable[[Case], Path],
    adopted: None,
    tmp_path: Path,
):
    case, place = case_of(seed), Place(root=tmp_path)
    print(case)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    played = play_out(small_run, case, place)
    assert played.strikes, "no strike took place"
    require_nothing_left(place, before)
    require_nothing_lost(small_run, case, place, played, uninterrupted)
    # `--junitxml` writes these properties to its report.
    record_property("ahead", case.runs_ahead)
    record_property("strikes", len(played.strikes))
    record_property("kills", sum("SIGKILL" in strike for strike in played.strikes))
    record_property("resumes", len(played.resumed_from))
    record_property("waiting", played.num_waiting)


def test_the_cases_cover_every_setting_victim_and_phase():
    cases = [case_of(seed) for seed in range(NUM_CASES)]
    kinds = {(case.max_staleness, case.pipeline_depth, case.dynamic_sampling) for case in cases}
    assert kinds == {(*bound, kind) for bound in BOUNDS_AND_DEPTHS for kind in (None, "filter", "replace")}
    alone = Counter(
        ((case.max_staleness, case.pipeline_depth), case.strikes[0].phase) for case in cases if case.num_ranks == 1
    )
    assert alone == dict.fromkeys(itertools.product(BOUNDS_AND_DEPTHS, SECONDS), 2)
    struck = {(strike.victim, strike.phase) for case in cases for strike in case.strikes}
    assert struck == set(itertools.product(("controller", *OF_RAY), SECONDS))
    ahead = {(case.runs_ahead, strike.victim) for case in cases for strike in case.strikes}
    assert ahead == set(itertools.product((False, True), ("controller", *OF_RAY)))


class LosingRollouts(Rollouts):
    """Forgets the first group that is to be played again, or the next new group if no group is to be played again."""

    def __init__(self, *parts: Any, next_group: int, restart_groups: tuple[int, ...], **named: Any):
        first = next_group if restart_groups else next_group + 1
        super().__init__(*parts, next_group=first, restart_groups=restart_groups[1:], **named)


def losing_attempt(config: Config, strike: Strike | None, place: Place, output: Path) -> None:
    run.Rollouts = LosingRollouts  # pyright: ignore[reportPrivateImportUsage]
    attempt(config, strike, place, output)


IN_STEP = Case(
    max_staleness=0,
    pipeline_depth=0,
    dynamic_sampling=None,
    num_ranks=1,
    overrides={},
    strikes=(Strike(phase="generate", visit=3),),
)
AHEAD = attrs.evolve(
    IN_STEP,
    max_staleness=2,
    pipeline_depth=2,
    overrides={"trainer__ckpt_interval": 1},
    strikes=(Strike(phase="train", visit=2),),
)
"""Saves after every step, generates up to two batches ahead, and is killed in step 3."""


@pytest.mark.parametrize(
    ("pipeline_depth", "message"),
    [
        pytest.param(0, "At index 3 diff: {'step': 3", marks=pytest.mark.soak),
        (2, "never played|groups with a signal are in no row|are missing"),
    ],
)
def test_the_comparison_notices_a_resume_that_skips_a_group(
    pipeline_depth: int, message: str, small_run: BuildConfig, uninterrupted: Callable[[Case], Path], tmp_path: Path
):
    """Negative control: the resumed run forgets a group."""
    case = attrs.evolve(IN_STEP, max_staleness=pipeline_depth, pipeline_depth=pipeline_depth)
    place = Place(root=tmp_path)
    played = play_out(small_run, case, place, losing_attempt)
    assert len(played.strikes) == 1
    with pytest.raises(AssertionError, match=message):
        require_nothing_lost(small_run, case, place, played, uninterrupted)


def test_a_group_that_was_never_played_is_named(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    (tmp_path / "samples.jsonl").touch()
    (tmp_path / "ledger.jsonl").touch()
    checkpoint = tmp_path / "checkpoints" / "step_000000"
    checkpoint.mkdir(parents=True)
    state = {"step": 0, "restart_groups": [], "finished_groups": [], "next_group": 1}
    (checkpoint / "run.json").write_text(json.dumps(state))
    sizes = Sizes(
        steps=0,
        groups=8,
        samples=4,
        max_staleness=0,
        dynamic_sampling=None,
        min_replace_ratio=0.3,
        with_tokens=False,
    )
    with pytest.raises(AssertionError, match=r"started, but never played: \[0\]"):
        require_every_group_once(tmp_path, tmp_path / "ledger.jsonl", sizes)


@pytest.fixture(scope="module")
def killed_while_groups_wait(small_run: BuildConfig, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The directories after the first attempt of the case AHEAD. It was killed while finished groups waited."""
    place = Place(root=tmp_path_factory.mktemp("killed"))
    (strike,) = AHEAD.strikes
    assert run_attempt(build(small_run, AHEAD, place.run_dir), strike, place, place.root / "first") < 0
    state = newest_state(place)
    assert state is not None
    assert len(state.finished_groups) > 1, "too few groups wait for these tests to show anything"
    return place


Resumed = tuple[list[StoredGroup], RunState]


def whole(stored: list[StoredGroup], state: RunState) -> Resumed:
    return stored, state


def played_again(stored: list[StoredGroup], state: RunState) -> Resumed:
    return [], attrs.evolve(state, restart_groups=tuple(sorted({*state.restart_groups, *state.finished_groups})))


def one_lost(stored: list[StoredGroup], state: RunState) -> Resumed:
    return stored[1:], state


def one_twice(stored: list[StoredGroup], state: RunState) -> Resumed:
    return stored, attrs.evolve(state, restart_groups=(0, *state.restart_groups))


def other_logprobs(stored: list[StoredGroup], state: RunState) -> Resumed:
    def change(step: TrajectoryStep) -> dict[str, Any]:
        return {"rollout_logprobs": [value / 2 for value in step.rollout_logprobs]}

    return _with_steps(stored, change), state


def other_versions(stored: list[StoredGroup], state: RunState) -> Resumed:
    def change(step: TrajectoryStep) -> dict[str, Any]:
        return {"policy_version": [state.step - (version == state.step) for version in step.policy_version]}

    return _with_steps(stored, change), state


def _with_steps(stored: list[StoredGroup], change: Callable[[TrajectoryStep], dict[str, Any]]) -> list[StoredGroup]:
    """Changes every step of the first group."""
    group = stored[0].group
    trajectories = tuple(
        attrs.evolve(one, steps=tuple(attrs.evolve(step, **change(step)) for step in one.steps))
        for one in group.trajectories
    )
    return [attrs.evolve(stored[0], group=attrs.evolve(group, trajectories=trajectories)), *stored[1:]]


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        (whole, None),
        (played_again, "were played again"),
        (one_lost, "never trained on"),
        (one_twice, "group 0 is in steps 1 and"),
        (other_logprobs, "is not what was played last"),
        (other_versions, "versions of tokens of step"),
    ],
)
def test_groups_waiting_in_the_last_checkpoint_are_trained_on_once_unchanged(
    resume: Callable[[list[StoredGroup], RunState], Resumed],
    message: str | None,
    killed_while_groups_wait: Place,
    small_run: BuildConfig,
    uninterrupted: Callable[[Case], Path],
    tmp_path: Path,
):
    """All but `whole` are negative controls."""
    # The folder keeps its name, because the run directory's name contains it.
    place = Place(root=tmp_path / killed_while_groups_wait.root.name)
    shutil.copytree(killed_while_groups_wait.root, place.root)

    def resuming_attempt(config: Config, strike: Strike | None, place: Place, output: Path) -> None:
        def changed(*parts: Any, **named: Any) -> ResumedGroups:
            found = resumed_groups(*parts, **named)
            finished, state = resume(list(found.finished), found.state)
            return attrs.evolve(found, finished=tuple(finished), state=state)

        run.resumed_groups = changed  # pyright: ignore[reportPrivateImportUsage]
        attempt(config, strike, place, output)

    def play_on() -> None:
        played = play_out(small_run, attrs.evolve(AHEAD, strikes=()), place, first=resuming_attempt)
        require_nothing_lost(small_run, AHEAD, place, played, uninterrupted)

    if message is None:
        play_on()
    else:
        with pytest.raises(AssertionError, match=message):
            play_on()
