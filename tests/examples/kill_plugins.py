"""Plug-ins that kill or stop their own run at the moment that a case of `kill_cases.py` names, and that record the
groups that the run played. Apart from these plug-ins, the run is one that a user could start.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import attrs
import numpy as np
import psutil

from rl_core.interfaces import (
    Action,
    Callback,
    Generator,
    GeneratorSpec,
    GroupRequest,
    Sampler,
    StepResult,
    Tracker,
    Trajectory,
)
from rl_examples.arithmetic import ArithmeticEnvironment
from rl_rollout.generator_plugin import EnvironmentGeneratorPlugin

Victim = Literal["controller", "rank", "raylet", "gcs_server"]
SECONDS = {
    "start": 2.5,
    "generate": 0.06,
    "score": 0.04,
    "train": 0.1,
    "publish": 0.04,
    "evaluate": 0.08,
    "checkpoint": 0.15,
    "export": 0.15,
    "last_export": 0.3,
}
"""Phase of a run → its approximate duration; a strike comes at a random moment of a phase. `export` is the export of a
step (`trainer.hf_save_interval`), `last_export` the export of the finished run.
"""
_APPEARS_S = 100.0
"""The longest time until Ray and the ranks are running. Only a strike in the first phase has to wait for them."""


@attrs.frozen(kw_only=True)
class Strike:
    """One kill or stop of a process."""

    victim: Victim = "controller"
    signal: signal.Signals = signal.SIGKILL
    presses: int = 1
    """The number of signals, 1.1 s apart: the second one ends a run at once."""
    phase: str
    """A key of SECONDS."""
    visit: int = 0
    """The strike comes when the phase begins for the (`visit` + 1)-th time."""
    delay_s: float = 0.0
    """Seconds from the beginning of the phase to the signal."""


class _Armed:
    """The strike and the ledger of this process, which is forked for one attempt."""

    def __init__(self) -> None:
        self.strike: Strike | None = None
        self.visits = 0
        self.thread: threading.Thread | None = None
        self.ledger = Path(os.devnull)


_armed = _Armed()


def arm(strike: Strike | None, ledger: Path) -> None:
    """Called in the process of an attempt before its run. `ledger` is the file that lists the played groups."""
    _armed.strike, _armed.ledger = strike, ledger
    reached("start")


def reached(phase: str) -> None:
    """Called when the run begins `phase`; starts the strike if its turn has come."""
    strike = _armed.strike
    if strike is None or strike.phase != phase:
        return
    if _armed.visits == strike.visit:
        _armed.thread = threading.Thread(target=_strike, args=(strike,), daemon=True)
        _armed.thread.start()
    _armed.visits += 1


def await_strike() -> None:
    """Waits until a strike that has begun has sent its last signal."""
    if _armed.thread is not None:
        _armed.thread.join()


def _strike(strike: Strike) -> None:
    pid = _pid_of(strike.victim)
    time.sleep(strike.delay_s)
    with _armed.ledger.with_name("strikes").open("a") as strikes:
        strikes.write(f"{strike}\n")
    for press in range(strike.presses):
        time.sleep(1.1 * (press > 0))
        os.kill(pid, strike.signal)


def _pid_of(victim: Victim) -> int:
    """The id of the newest process of this kind. Waits until there is one."""
    if victim == "controller":
        return os.getpid()
    wanted, deadline = "ray::RayRank" if victim == "rank" else f"/{victim}", time.monotonic() + _APPEARS_S
    while not (found := [pid for pid, name in _child_names() if wanted in name]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert found, f"there is no {victim} to strike"
    return max(found)


def _child_names() -> Iterator[tuple[int, str]]:
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            yield child.pid, " ".join(child.cmdline()[:1])


class PhaseTracker(Tracker):
    """A tracker that gets the name of each phase as it begins."""

    def phase(self, name: str) -> None:
        reached(name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class BeforeLastExport(Callback):
    """Begins the phase `last_export`: the last step is done, and the run writes its model next."""

    def on_run_end(self, step: int) -> None:
        reached("last_export")


class LowDigit(ArithmeticEnvironment):
    """Rewards an answer that begins with one of the digits 0 to 4, and raises if it begins with 9. An untrained model
    does both now and then, so some groups have a signal, some have none, and some lack samples.
    """

    async def step(self, action: Action) -> StepResult:
        if action.text[:1] == "9":
            raise ConnectionError("the judge does not like nines")
        is_low = float(action.text[:1] in tuple("01234"))
        return StepResult(reward=is_low, done=True, metrics={"accuracy": is_low})


class NotingGenerator:
    """Plays as the wrapped generator does, and appends each group's samples to the ledger."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    def __getattr__(self, name: str) -> object:
        return getattr(self._generator, name)

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        trajectories = await self._generator.generate(request)
        entry = {
            "group": request.group_id,
            "is_training": request.num_samples > 1,
            "start_version": request.start_version,
            "samples": [_noted(trajectory) for trajectory in trajectories],
        }
        # A single write per line: a kill leaves the whole line or nothing of it.
        descriptor = os.open(_armed.ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, (json.dumps(entry) + "\n").encode())
        os.close(descriptor)
        return trajectories


def _noted(trajectory: Trajectory) -> dict[str, object]:
    """One sample under the names that `samples.jsonl` uses. The log-probs are rounded to float32, as in training."""
    steps = trajectory.steps
    return {
        "sample": trajectory.sample_index,
        "response": trajectory.response_text,
        "reward": None if trajectory.failure else trajectory.reward,
        "tokens": [list(step.tokens) for step in steps],
        "rollout_logprobs": [np.asarray(step.rollout_logprobs, np.float32).tolist() for step in steps],
        "versions": [
            version
            for step in steps
            for version, sampled in zip(step.policy_version, step.sampled, strict=True)
            if sampled
        ],
    }


class NotingGeneratorPlugin(EnvironmentGeneratorPlugin):
    """The `environment` generator, which also writes the ledger."""

    name = "noting"

    def create(self, spec: GeneratorSpec, client: Sampler) -> Generator:
        return NotingGenerator(super().create(spec, client))  # pyright: ignore[reportReturnType]


noting_generator = NotingGeneratorPlugin()
