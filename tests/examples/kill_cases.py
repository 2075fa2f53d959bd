"""The cases of `test_kill_soak.py`: which process of a run is killed or stopped (a strike), and when. A case attempts
its run once per strike and once without a strike, each time in a new process. If Ray does not start, the attempt is
repeated.

The seed of a case determines its settings and its strikes.
"""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Literal

import attrs
import psutil

from rl_core.config import Config
from rl_core.errors import RLError
from rl_core.trainer.run import run_training
from rl_core.trainer.state.checkpoint import RunState, complete_checkpoints, load_state
from tests.examples.child_output import print_into
from tests.examples.kept_groups import Sizes
from tests.examples.kill_plugins import SECONDS, Strike, Victim, arm, await_strike
from tests.examples.test_resume import BuildConfig

NUM_CASES = 100
STEPS, GROUPS, SAMPLES = 6, 8, 4
VISITS = {
    "start": 1,
    "generate": 6,
    "score": 6,
    "train": 6,
    "publish": 7,
    "evaluate": 3,
    "checkpoint": 3,
    "export": 3,
    "last_export": 1,
}
"""How often an uninterrupted run begins each phase. The number for `checkpoint` holds if the run saves every second
step. The number for `export` leaves out the export of the finished run, which also begins a phase of this name."""
STOPPED, ENDED_WITH_ERROR = 130, 3
MOST_LOGGED = 30 << 20
RAY_STARTS = 3
PLUGINS = "tests.examples.kill_plugins"
OF_RAY: tuple[Victim, ...] = ("rank", "raylet", "gcs_server")
DynamicSampling = Literal["filter", "replace"] | None
BOUNDS_AND_DEPTHS = ((0, 0), (2, 1), (4, 2), (2, 2))
"""Pairs of `max_staleness` and `pipeline_depth`: one synchronous, three that generate ahead."""


@attrs.frozen(kw_only=True)
class Case:
    """A run's settings, and the strikes that hit it."""

    max_staleness: int
    pipeline_depth: int
    dynamic_sampling: DynamicSampling
    num_ranks: int
    overrides: dict[str, object]
    """Settings that do not change the results of a synchronous run, except for rounding in the engine."""
    strikes: tuple[Strike, ...]

    @property
    def runs_ahead(self) -> bool:
        return self.pipeline_depth > 0


def case_of(seed: int) -> Case:
    """The case of a seed. The first strikes of all cases together cover fixed combinations. Without Ray, the controller
    is struck twice in each phase for every pair of staleness bound and pipeline depth. On Ray, each process of `OF_RAY`
    is struck once in each phase, and the controller once in total. Everything else is drawn at random.
    """
    dice = random.Random(seed)
    (max_staleness, pipeline_depth), victim, first, num_ranks = _enumerated()[seed]
    ckpt_interval = dice.choice((1, 2, 2, 4))
    visits = VISITS | {"checkpoint": {1: 6, 2: 3, 4: 2}[ckpt_interval]}
    strikes = [_strike(dice, victim, first, visits[first])]
    for _ in range(dice.choice((0, 1, 2) if num_ranks == 1 else (0, 0, 1))):
        phase = dice.choice(list(SECONDS))
        strikes.append(_strike(dice, "controller", phase, min(2, visits[phase])))
    return Case(
        max_staleness=max_staleness,
        pipeline_depth=pipeline_depth,
        dynamic_sampling=dice.choice((None, "filter", "replace")),
        num_ranks=num_ranks,
        overrides={
            "trainer__ckpt_interval": ckpt_interval,
            "trainer__async_save": dice.random() < 0.4,
            "generator__inference_engine__weight_sync_backend": dice.choice(("files", "shared_memory")),
            # None: the environment's own placement, `in_process`. `process` is rare: starting it takes seconds.
            "environment__placement": dice.choices((None, "thread", "process"), (0.7, 0.2, 0.1))[0],
        },
        strikes=tuple(strikes),
    )


@functools.cache
def _enumerated() -> list[tuple[tuple[int, int], Victim, str, int]]:
    """For each case, in shuffled order: staleness bound and pipeline depth, victim and phase of the first strike, and
    number of ranks. Two of every seven cases run on Ray.
    """
    dice, phases = random.Random(15), list(SECONDS)
    products = itertools.product(BOUNDS_AND_DEPTHS, phases)
    alone = [(bound, "controller", phase, 1) for bound, phase in products for _ in range(2)]
    struck = [*itertools.product(OF_RAY, phases), ("controller", "train")]
    bounds = [bound for bound in BOUNDS_AND_DEPTHS for _ in range(len(struck) // len(BOUNDS_AND_DEPTHS))]
    for drawn in (alone, struck, bounds):
        dice.shuffle(drawn)
    on_ray = [(bound, victim, phase, 2) for bound, (victim, phase) in zip(bounds, struck, strict=True)]
    return [(on_ray if seed % 7 in (3, 6) else alone).pop() for seed in range(NUM_CASES)]


def _strike(dice: random.Random, victim: Victim, phase: str, visits: int) -> Strike:
    number, presses = signal.SIGKILL, 1
    if victim == "controller":
        number = dice.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
        presses = 2 if number != signal.SIGKILL and dice.random() < 0.25 else 1
    visit, delay_s = dice.randrange(visits), dice.random() * SECONDS[phase]
    return Strike(victim=victim, signal=number, presses=presses, phase=phase, visit=visit, delay_s=delay_s)


@attrs.frozen(kw_only=True)
class Place:
    """The directories of one case."""

    root: Path
    pid: int = attrs.field(factory=os.getpid)
    """The test's process, which starts the attempts."""

    @property
    def run_dir(self) -> Path:
        # Names of folders in /dev/shm contain this name, which distinguishes these folders from other runs' folders.
        return self.root / f"struck_{self.pid}_{self.root.name}"[-40:]

    @property
    def ledger(self) -> Path:
        """The file in which the run's generator lists the groups that it has played."""
        return self.root / "ledger.jsonl"

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"

    @property
    def of_ray(self) -> Path:
        """Ray's temporary directory, which holds its logs. Its path is short, so that Ray's socket paths are too."""
        return Path(tempfile.gettempdir(), f"struck_{self.pid}")


def attempt(config: Config, strike: Strike | None, place: Place, output: Path) -> None:
    """Trains and prints into `output`. Ends this process with code 0, STOPPED, ENDED_WITH_ERROR (for an RLError) or 1
    (for any other error).
    """
    print_into(output)
    os.environ["RAY_TMPDIR"] = str(place.of_ray)
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
    """The exit code of one attempt: minus the signal's number if a signal ended it."""
    place.temporary.mkdir(exist_ok=True)
    process = multiprocessing.get_context("fork").Process(target=target, args=(config, strike, place, output))
    process.start()
    process.join(400)
    if process.exitcode is None:
        said = output.read_text()[-3000:]
        process.kill()
        process.join()
        raise AssertionError(f"an attempt with {strike} did not end within 400 s: {said}")
    return process.exitcode


def require_expected_end(code: int, strike: Strike, output: Path) -> None:
    said = output.read_text()
    if strike.victim in ("raylet", "gcs_server"):
        return  # Ray ends the run's processes itself, sometimes without an error that the run can catch
    if strike.victim == "rank":
        assert code in (0, ENDED_WITH_ERROR), (code, said)
        assert "Traceback (most recent call last)" not in said or code == ENDED_WITH_ERROR, said
        return
    if strike.signal == signal.SIGKILL:
        assert code == -signal.SIGKILL, (code, said)
        return
    # A run that had finished before the signal came has removed its signal handler.
    assert code in (0, STOPPED, -strike.signal), (code, said)
    assert not any(word in said for word in ("Traceback", "never", "destroyed")), said


def build(small_run: BuildConfig, case: Case, run_dir: Path) -> Config:
    values = {
        "trainer__max_staleness": case.max_staleness,
        "trainer__pipeline_depth": case.pipeline_depth,
        # This also writes the tokens of samples, to compare them with the ledger. A synchronous run is compared with an
        # uninterrupted run instead.
        "trainer__log_sample_logprobs": case.runs_ahead,
        "trainer__algorithm__dynamic_sampling__type": case.dynamic_sampling,
        "trainer__placement__policy_num_gpus_per_node": case.num_ranks,
        "trainer__max_training_steps": STEPS,
        # A low learning rate, so that rewards still differ within groups in the last step.
        "trainer__policy__optimizer_config__lr": 1e-4,
        "trainer__train_batch_size": GROUPS,
        "trainer__hf_save_interval": 2,
        "trainer__num_logged_samples": GROUPS * SAMPLES,
        "trainer__max_failure_rate": 1.0,
        "trainer__worker_timeout_s": 120,
        "trainer__callbacks": [f"{PLUGINS}:BeforeLastExport"],
        "trainer__logger": ["console", f"{PLUGINS}:PhaseTracker"],
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
        with_tokens=config.trainer.log_sample_logprobs,
    )


def newest_state(place: Place) -> RunState | None:
    """The state of the checkpoint that the next attempt resumes from; None if there is none."""
    checkpoints = complete_checkpoints(place.run_dir / "checkpoints")
    return load_state(checkpoints[-1]) if checkpoints else None


def played_groups(place: Place) -> list[int]:
    """The ids of the training groups played so far, in order. A group that was played twice is listed twice."""
    lines = place.ledger.read_text().splitlines() if place.ledger.exists() else []
    return [entry["group"] for entry in map(json.loads, lines) if entry["is_training"]]


@attrs.frozen(kw_only=True)
class PlayedOut:
    """The outcome of a case."""

    strikes: tuple[str, ...]
    """The strikes that took place."""
    resumed_from: tuple[RunState, ...]
    """The checkpoints that attempts resumed from."""

    @property
    def num_waiting(self) -> int:
        """The number of finished groups in the checkpoints of `resumed_from`."""
        return sum(len(state.finished_groups) for state in self.resumed_from)


def play_out(
    small_run: BuildConfig, case: Case, place: Place, target: Any = attempt, *, first: Any = attempt
) -> PlayedOut:
    """Runs one attempt per strike, then one without a strike, which must finish. `first` runs the first attempt,
    `target` the others. No attempt may play a group that is finished in the checkpoint it resumes from.
    """
    config = build(small_run, case, place.run_dir)
    resumed_from: list[RunState] = []
    for number, strike in enumerate((*case.strikes, None)):
        output = place.root / f"output_{number}"
        state, num_played = newest_state(place), len(played_groups(place))
        resumed_from += [state] if state else []
        code = run_attempt(config, strike, place, output, target if number else first)
        for _ in range(RAY_STARTS - 1):
            # The machine was too busy to start Ray; the run has written nothing.
            if code == ENDED_WITH_ERROR and "Ray did not start on this machine" in output.read_text():
                code = run_attempt(config, strike, place, output, target if number else first)
        if strike is None:
            assert code == 0, output.read_text()[-5000:]
        elif code != 0:
            require_expected_end(code, strike, output)
        again = set(state.finished_groups if state else ()).intersection(played_groups(place)[num_played:])
        assert not again, f"groups finished in the checkpoint were played again: {sorted(again)}"
    strikes = place.root / "strikes"
    came = tuple(strikes.read_text().splitlines()) if strikes.exists() else ()
    return PlayedOut(strikes=came, resumed_from=tuple(resumed_from))


def living_children(before: set[int]) -> list[str]:
    """The living descendants of this process that are not in `before`, each as id and command. Reaps children that have
    ended."""
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
    locks = [path.name for path in place.root.rglob("*.rl-lock")]
    assert not locks, f"lock files are left: {locks}"
    _require_logs_alone(place.of_ray)
    unfinished = ("*.partial", "*.writing", "*.rewriting", "*.removed*", "*.unfinished")
    parts = [str(path) for pattern in unfinished for path in place.run_dir.rglob(pattern)]
    assert not parts, f"unfinished files are left: {parts}"


def _require_logs_alone(of_ray: Path) -> None:
    """Requires that Ray left no socket that accepts connections and nothing large. Removes the logs that it left."""
    files = [path for path in of_ray.rglob("*") if not path.is_symlink() and not path.is_dir()]
    listening = [str(path) for path in files if path.is_socket() and _is_answered(path)]
    assert not listening, f"Ray still listens at {listening}"
    num_bytes = sum(path.stat().st_size for path in files)
    assert num_bytes < MOST_LOGGED, f"Ray's sessions left {num_bytes} bytes in {of_ray}"
    shutil.rmtree(of_ray, ignore_errors=True)


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0
