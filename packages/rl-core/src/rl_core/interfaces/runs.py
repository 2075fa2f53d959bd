"""Runs: a named configuration (`Recipe`), where a run's metrics go (`Tracker`), a user's own code (`Callback`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs

from rl_core.interfaces.rollouts import Trajectory

if TYPE_CHECKING:
    from pathlib import Path


@runtime_checkable
class Tracker(Protocol):
    """Where metrics go (entry-point group `rl_core.trackers`, each a `TrackerFactory`)."""

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
            total_steps: of the whole run.
            first_step: the first step that will be logged: 0 for a new run, the checkpoint's step + 1 for a resumed
                one, or the checkpoint's step itself where the run ended before its row was complete. What an earlier
                process logged for that step and those after it is dropped.
        """
        ...


@runtime_checkable
class PhaseAware(Protocol):
    """A tracker that is told what the run is doing."""

    def phase(self, name: str) -> None:
        """`name` begins now: generate, score, train, publish, evaluate, checkpoint."""
        ...


@attrs.frozen(kw_only=True)
class Control:
    """What a callback asks the loop to do at the end of a step."""

    save: bool = False
    evaluate: bool = False
    stop: bool = False


class Callback:
    """A user's own code at the loop's events: derive and override what you need; name it in `trainer.callbacks`
    (entry-point group `rl_core.callbacks`, or `package.module:Class`). Built without arguments."""

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
        """After the last step, also of an interrupted run."""


@attrs.frozen(kw_only=True)
class Recipe:
    """A named run (entry-point group `rl_core.recipes`)."""

    summary: str
    """One line for `rl plugins`."""
    config: Mapping[str, Any]
    """Flat `key.path` → value, on top of the defaults."""
    tiny: Mapping[str, Any] | None = None
    """On top of `config` with `--tiny`: a run of a minute on two CPU cores."""
    prepare: str | None = None
    """`package.module:function`, called as `function(config)` before a run. Makes those of the paths in `makes` that
    the configuration names and that are missing."""
    makes: tuple[str, ...] = ()
    """What `prepare` can make: data files and model directories, written as in `config` (`${trainer.seed}`). Any other
    path is the user's and must be there."""
