"""Runs that are killed or stopped at a random moment of a named phase, until they are through: nothing is lost, nothing
is doubled, nothing is left behind.

A case follows from its seed: staleness, dynamic sampling, where the ranks run, what is struck, how, when, how often.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import attrs
import psutil
import pytest

from rl_core.config import Config
from rl_core.errors import RLError
from rl_core.trainer import run
from rl_core.trainer.checkpoint import RunState, complete_checkpoints, load_state
from rl_core.trainer.rollouts import Rollouts
from rl_core.trainer.run import run_training
from tests.examples.child_output import print_into
from tests.examples.kept_groups import Sizes, require_every_group_once
from tests.examples.kill_plugins import SECONDS, Strike, Victim, arm, await_strike
from tests.examples.test_resume import BuildConfig, require_same_run

NUM_CASES = 100
IN_EVERY_RUN_OF_THE_TESTS = (1, 2, 5)
STEPS, GROUPS, SAMPLES = 6, 8, 4
VISITS = {"start": 1, "generate": 6, "score": 6, "train": 6, "publish": 7, "evaluate": 3, "checkpoint": 3, "export": 1}
"""How often an uninterrupted run comes by each phase."""
STOPPED, ENDED_WITH_ERROR = 130, 3
RAY_STARTS = 3
PLUGINS = "tests.examples.kill_plugins"
PR_SET_CHILD_SUBREAPER = 36
ON_RAY: tuple[Victim, ...] = ("rank", "controller", "raylet", "rank", "gcs_server")
DynamicSampling = Literal["filter", "replace"] | None


@attrs.frozen(kw_only=True)
class Case:
    """What a seed stands for."""

    max_staleness: int
    dynamic_sampling: DynamicSampling
    num_ranks: int
    overrides: dict[str, object]
    """Of keys that change no number of a run in step."""
    strikes: tuple[Strike, ...]


def case_of(seed: int) -> Case:
    """Kinds of cases take turns, so that all of them are there among the first few; moments are random."""
    dice = random.Random(seed)
    num_ranks = 2 if seed % 6 == 4 else 1
    victim = ON_RAY[seed // 6 % len(ON_RAY)] if num_ranks == 2 else "controller"
    phases = list(SECONDS)
    first = phases[seed % len(phases)]
    strikes = [_strike(dice, victim, first, VISITS[first])]
    for _ in range(dice.choice((0, 1, 2)) if num_ranks == 1 else 0):
        strikes.append(_strike(dice, "controller", dice.choice(phases), 2))
    max_staleness = (0, 2)[seed // 2 % 2]
    return Case(
        max_staleness=max_staleness,
        dynamic_sampling=dice.choice((None, "filter", "replace")),
        num_ranks=num_ranks,
        overrides={
            "trainer__ckpt_interval": dice.choice((1, 2, 2, 4)),
            "trainer__async_save": dice.random() < 0.4,
            "generator__inference_engine__weight_sync_backend": dice.choice(("files", "shared_memory")),
            # Its own is in process; processes of environments take seconds to start.
            "environment__placement": dice.choices((None, "thread", "process"), (0.7, 0.2, 0.1))[0],
            "trainer__pipeline_depth": min(1 + seed // 4 % 2, max_staleness),
        },
        strikes=tuple(strikes),
    )


def _strike(dice: random.Random, victim: Victim, phase: str, visits: int) -> Strike:
    if victim != "controller" and phase in ("start", "export"):
        phase = "train"  # before and after, there are no ranks
    number, presses = signal.SIGKILL, 1
    if victim == "controller":
        number = dice.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
        presses = 2 if number != signal.SIGKILL and dice.random() < 0.25 else 1
    visit = dice.randrange(min(visits, VISITS[phase]))
    delay_s = dice.random() * SECONDS[phase]
    return Strike(victim=victim, signal=number, presses=presses, phase=phase, visit=visit, delay_s=delay_s)


@attrs.frozen(kw_only=True)
class Place:
    """Where the attempts of a case leave things."""

    root: Path

    @property
    def run_dir(self) -> Path:
        # Its name is in those of folders under /dev/shm, where other runs have theirs.
        return self.root / f"struck_{os.getpid()}_{self.root.name}"[-40:]

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.jsonl"

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"


def attempt(config: Config, strike: Strike | None, place: Place, output: Path) -> None:
    """In a process of its own: exit codes as of the command line, everything printed in a file."""
    print_into(output)
    # Ray keeps its logs, and the paths of its sockets must be short.
    os.environ["RAY_TMPDIR"] = tempfile.gettempdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(place.temporary)
    try:
        arm(strike, place.ledger)
        code = STOPPED if run_training(config).interrupted else 0
        await_strike()
    except KeyboardInterrupt:
        code = STOPPED
    except RLError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = ENDED_WITH_ERROR
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


def run_attempt(config: Config, strike: Strike | None, place: Place, output: Path, target: Any = attempt) -> int:
    """Its exit code; negative: the signal that ended it."""
    place.temporary.mkdir(exist_ok=True)
    process = multiprocessing.get_context("fork").Process(target=target, args=(config, strike, place, output))
    process.start()
    process.join(400)
    if process.exitcode is None:
        said = output.read_text()[-3000:]
        process.kill()
        process.join()
        raise AssertionError(f"an attempt did not end within 400 s after {strike}: {said}")
    return process.exitcode


def require_expected_end(code: int, strike: Strike, output: Path) -> None:
    said = output.read_text()
    if strike.victim in ("raylet", "gcs_server"):
        return  # Ray ends its processes itself, and not always by an error that can be caught
    if strike.victim == "rank":
        assert code in (0, ENDED_WITH_ERROR), (code, said)
        assert "Traceback (most recent call last)" not in said or code == ENDED_WITH_ERROR, said
        return
    if strike.signal == signal.SIGKILL:
        assert code == -signal.SIGKILL, (code, said)
        return
    # A run that was through before the signal has no handler any more.
    assert code in (0, STOPPED, -strike.signal), (code, said)
    assert not any(word in said for word in ("Traceback", "never", "destroyed")), said


def build(small_run: BuildConfig, case: Case, run_dir: Path) -> Config:
    values = {
        "trainer__max_staleness": case.max_staleness,
        "trainer__algorithm__dynamic_sampling__type": case.dynamic_sampling,
        "trainer__placement__policy_num_gpus_per_node": case.num_ranks,
        "trainer__max_training_steps": STEPS,
        # Slow enough that groups have a signal until the end.
        "trainer__policy__optimizer_config__lr": 1e-4,
        "trainer__train_batch_size": GROUPS,
        "trainer__hf_save_interval": 2,
        "trainer__num_logged_samples": GROUPS * SAMPLES,
        "trainer__max_failure_rate": 1.0,
        "trainer__worker_timeout_s": 120,
        "trainer__callbacks": [f"{PLUGINS}:BeforeExport"],
        "trainer__logger": ["console", f"{PLUGINS}:phase_tracker"],
        "generator__n_samples_per_prompt": SAMPLES,
        "generator__type": f"{PLUGINS}:noting_generator",
        "environment__env_class": f"{PLUGINS}:LowDigit",
    }
    return small_run(run_dir, **values, **case.overrides)


def sizes_of(config: Config) -> Sizes:
    dynamic = config.trainer.algorithm.dynamic_sampling
    return Sizes(
        steps=STEPS,
        groups=GROUPS,
        samples=SAMPLES,
        max_staleness=config.trainer.max_staleness,
        dynamic_sampling=dynamic.type,
        min_replace_ratio=dynamic.min_replace_ratio,
    )


def waiting_groups(place: Place) -> set[int]:
    """Finished groups that the newest checkpoint holds for the steps to come."""
    checkpoints = complete_checkpoints(place.run_dir / "checkpoints")
    return set(load_state(checkpoints[-1]).finished_groups) if checkpoints else set()


def played_groups(place: Place) -> list[int]:
    """By all attempts so far, in training."""
    lines = place.ledger.read_text().splitlines() if place.ledger.exists() else []
    return [entry["group"] for entry in map(json.loads, lines) if entry["is_training"]]


def play_out(small_run: BuildConfig, case: Case, place: Place, target: Any = attempt, *, first: Any = attempt) -> int:
    """One attempt for each strike, and one more, until the run is through; how many strikes came. The first one is by
    `first`, the others by `target`. None plays a group again that the checkpoint it goes on from holds."""
    config = build(small_run, case, place.run_dir)
    for number, strike in enumerate((*case.strikes, None)):
        output = place.root / f"output_{number}"
        waiting, num_played = waiting_groups(place), len(played_groups(place))
        code = run_attempt(config, strike, place, output, target if number else first)
        for _ in range(RAY_STARTS - 1):
            # Of a machine that is too busy, not of the run: nothing was written.
            if code == ENDED_WITH_ERROR and "Ray did not start on this machine" in output.read_text():
                code = run_attempt(config, strike, place, output, target if number else first)
        if strike is None:
            assert code == 0, output.read_text()[-5000:]
        elif code != 0:
            require_expected_end(code, strike, output)
        again = waiting.intersection(played_groups(place)[num_played:])
        assert not again, f"groups that the checkpoint held were played again: {sorted(again)}"
    strikes = place.root / "strikes"
    return len(strikes.read_text().splitlines()) if strikes.exists() else 0


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[object, Path]:
    return {}


@pytest.fixture
def uninterrupted(
    references: dict[object, Path], small_run: BuildConfig, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Case], Path]:
    """The run of a case's numbers that nothing disturbs, made once."""

    def find(case: Case) -> Path:
        key = (case.max_staleness, case.dynamic_sampling, case.num_ranks)
        if key not in references:
            place = Place(root=tmp_path_factory.mktemp("uninterrupted"))
            calm = attrs.evolve(case, overrides={}, strikes=())
            assert play_out(small_run, calm, place) == 0
            references[key] = place.run_dir
        return references[key]

    return find


@pytest.fixture
def adopted() -> Iterator[None]:
    """Whatever loses its parent becomes a child of this process, where it is found."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield
    prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def living_children(before: set[int]) -> list[str]:
    """Those that are not in `before`; the dead are buried."""
    found = []
    for child in psutil.Process().children(recursive=True):
        if child.pid in before:
            continue
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{child.pid} {' '.join(child.cmdline())[:100]}")
            elif child.ppid() == os.getpid():
                os.waitpid(child.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue
    return found


def require_nothing_left(place: Place, before: set[int]) -> None:
    deadline = time.monotonic() + 60
    while (left := living_children(before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"processes are left: {left}"
    in_memory = [path.name for path in Path("/dev/shm").iterdir() if place.run_dir.name in path.name]
    assert not in_memory, f"left in /dev/shm: {in_memory}"
    temporary = [str(path.relative_to(place.temporary)) for path in place.temporary.rglob("*")]
    assert not temporary, f"temporary files are left: {temporary}"
    unfinished = ("*.partial", "*.writing", "*.rewriting", "*.removed*", "*.unfinished")
    parts = [str(path) for pattern in unfinished for path in place.run_dir.rglob(pattern)]
    assert not parts, f"unfinished files are left: {parts}"


def require_nothing_lost(small_run: BuildConfig, case: Case, place: Place, find: Callable[[Case], Path]) -> None:
    if case.max_staleness == 0:
        is_in_process = case.overrides.get("environment__placement") is None
        require_same_run(place.run_dir, find(case), engine_tolerance=0.0 if is_in_process else 1e-5)
    require_every_group_once(place.run_dir, place.ledger, sizes_of(build(small_run, case, place.run_dir)))


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=() if seed in IN_EVERY_RUN_OF_THE_TESTS else pytest.mark.soak)
        for seed in range(NUM_CASES)
    ],
)
def test_a_run_that_is_struck_at_a_random_moment_loses_nothing(
    seed: int,
    small_run: BuildConfig,
    uninterrupted: Callable[[Case], Path],
    adopted: None,
    tmp_path: Path,
):
    case, place = case_of(seed), Place(root=tmp_path)
    print(case)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    assert play_out(small_run, case, place) > 0, "nothing was struck"
    require_nothing_left(place, before)
    require_nothing_lost(small_run, case, place, uninterrupted)


def test_the_cases_cover_every_kind():
    cases = [case_of(seed) for seed in range(NUM_CASES)]
    kinds = {(case.max_staleness, case.dynamic_sampling) for case in cases}
    assert len(kinds) == 6
    assert {(case.max_staleness, strike.phase) for case in cases for strike in case.strikes} == {
        (staleness, phase) for staleness in (0, 2) for phase in SECONDS
    }
    struck = {(case.max_staleness, strike.victim) for case in cases for strike in case.strikes}
    assert struck == {
        (staleness, victim) for staleness in (0, 2) for victim in ("controller", "rank", "raylet", "gcs_server")
    }


class LosingRollouts(Rollouts):
    """Forgets the first group that is to be started again; where there is none, the next new one."""

    def __init__(self, *parts: Any, next_group: int, restart_groups: tuple[int, ...], **named: Any):
        first = next_group if restart_groups else next_group + 1
        super().__init__(*parts, next_group=first, restart_groups=restart_groups[1:], **named)


def losing_attempt(config: Config, strike: Strike | None, place: Place, output: Path) -> None:
    run.Rollouts = LosingRollouts  # pyright: ignore[reportPrivateImportUsage]
    attempt(config, strike, place, output)


@pytest.mark.parametrize("max_staleness", [pytest.param(0, marks=pytest.mark.soak), 2])
def test_the_comparison_notices_a_resume_that_skips_a_group(
    max_staleness: int, small_run: BuildConfig, uninterrupted: Callable[[Case], Path], tmp_path: Path
):
    """Negative control."""
    strike = Strike(phase="generate", visit=3)
    case = Case(max_staleness=max_staleness, dynamic_sampling=None, num_ranks=1, overrides={}, strikes=(strike,))
    place = Place(root=tmp_path)
    assert play_out(small_run, case, place, losing_attempt) == 1
    with pytest.raises((AssertionError, KeyError)):
        require_nothing_lost(small_run, case, place, uninterrupted)


def forgetting_attempt(config: Config, strike: Strike | None, place: Place, output: Path) -> None:
    def nothing(config: Config, checkpoint: Path | None, state: RunState, now: Any, *, total_steps: int) -> Any:
        again = tuple(sorted({*state.restart_groups, *state.finished_groups}))
        return (), attrs.evolve(state, restart_groups=again)

    run.resumed_groups = nothing  # pyright: ignore[reportPrivateImportUsage]
    attempt(config, strike, place, output)


@pytest.mark.parametrize("target", [attempt, forgetting_attempt])
def test_groups_that_wait_in_the_last_checkpoint_are_trained_on_once_and_not_played_again(
    target: Any, small_run: BuildConfig, uninterrupted: Callable[[Case], Path], tmp_path: Path
):
    """Killed in its fourth step, every step being saved and two batches ahead; the second attempt is by `target`, of
    which the one that plays them again is a negative control."""
    strike = Strike(phase="train", visit=3)
    ahead = {"trainer__pipeline_depth": 2, "trainer__ckpt_interval": 1}
    case = Case(max_staleness=2, dynamic_sampling=None, num_ranks=1, overrides=ahead, strikes=(strike,))
    place = Place(root=tmp_path)
    assert run_attempt(build(small_run, case, place.run_dir), strike, place, tmp_path / "first") < 0
    assert waiting_groups(place), "no group waits: the test shows nothing"
    rest = attrs.evolve(case, strikes=())
    if target is forgetting_attempt:
        with pytest.raises(AssertionError, match="were played again"):
            play_out(small_run, rest, place, target, first=target)
    else:
        play_out(small_run, rest, place)
        require_nothing_lost(small_run, case, place, uninterrupted)
