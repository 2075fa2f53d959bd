"""Runs: a named configuration (`Recipe`), the receiver of metrics (`Tracker`), user code at events (`Callback`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs

from rl_core.interfaces.rollouts import Trajectory

if TYPE_CHECKING:
    from pathlib import Path


@runtime_checkable
class Tracker(Protocol):
    """Receives metrics (entry-point group `rl_core.trackers`, each a `TrackerFactory`)."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Once per step, in order. Step 0 holds the evaluation before training."""
        ...

    def close(self) -> None:
        """Called once, also when the run fails."""
        ...


class TrackerFactory(Protocol):
    def __call__(self, config: Any, run_dir: Path, *, total_steps: int, first_step: int) -> Tracker:
        """The tracker of a run.

        Args:
            config: the run's `rl_core.config.Config`.
            run_dir: the run directory.
            total_steps: number of steps of the whole run.
            first_step: the first step that will be logged: 0 for a new run; for a resumed run the checkpoint's step +
                1, or the checkpoint's step if the run ended before that step was completely logged. Drop what an
                earlier process logged for this step and later ones.
        """
        ...


@runtime_checkable
class PhaseAware(Protocol):
    """A tracker that is told the run's current phase."""

    def phase(self, name: str) -> None:
        """The phase `name` begins: generate, score, train, publish, evaluate, checkpoint or export."""
        ...


@attrs.frozen(kw_only=True)
class Control:
    """What a callback asks the loop to do at the end of a step."""

    save: bool = False
    evaluate: bool = False
    stop: bool = False


class Callback:
    """User code at the loop's events. Derive from it, override what you need, and list the class in `trainer.callbacks`
    (entry-point group `rl_core.callbacks`, or `package.module:Class`). It is created without arguments."""

    def on_run_start(self, run_dir: Path, first_step: int, last_step: int) -> None:
        """Before the first step."""

    def on_groups(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """The trajectories that this step trains on."""

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> Control | None:
        """After the weights of this step are published."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """After an evaluation."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """After a checkpoint is complete."""

    def on_run_end(self, step: int) -> None:
        """After the last step, also if the run was interrupted."""


@attrs.frozen(kw_only=True)
class Recipe:
    """A named run (entry-point group `rl_core.recipes`)."""

    summary: str
    """One line for `rl plugins`."""
    config: Mapping[str, Any]
    """Flat `key.path` → value, on top of the defaults."""
    tiny: Mapping[str, Any] | None = None
    """Added to `config` by `--tiny`: a run that takes a minute on two CPU cores."""
    prepare: str | None = None
    """`package.module:function`, called as `function(config)` before a run. It creates the paths of `makes` that the
    configuration uses and that do not exist."""
    needs: str | None = None
    """How to get the data files of `config` that `prepare` does not make. This text ends the error about a missing
    file."""
    makes: tuple[str, ...] = ()
    """Data files and model directories that `prepare` can create, written as in `config` (`${trainer.seed}`). All other
    paths must exist."""
