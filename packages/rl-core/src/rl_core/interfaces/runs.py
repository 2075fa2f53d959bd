"""Contracts of runs: a named configuration (`Recipe`), a receiver of metrics (`Tracker`), and user code that the loop
calls (`Callback`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from rl_core.interfaces.rollouts import Trajectory

if TYPE_CHECKING:
    from pathlib import Path


class Tracker(Protocol):
    """Receives metrics. An entry point of `rl_core.trackers` is such a class. Authors inherit this class; methods with
    a body are optional."""

    def __init__(self, config: Any, run_dir: Path, *, total_steps: int, first_step: int) -> None:
        """Creates the tracker of a run.

        Args:
            config: the run's `rl_core.config.Config`.
            run_dir: the run directory.
            total_steps: number of steps of the whole run.
            first_step: the first step that will be logged: 0 for a new run. For a resumed run, it is the checkpoint's
                step + 1 if that step was completely logged, else the checkpoint's step. The tracker must drop what an
                earlier process logged for `first_step` and later steps.
        """

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of a step. Called once per step, in order. Step 0 has the metrics of the evaluation
        before training."""
        ...

    def phase(self, name: str) -> None:
        """Called when a phase begins: generate, score, train, publish, evaluate, checkpoint or export."""

    def close(self) -> None:
        """Writes what is not written yet, and closes files and connections. Called once, even if the run fails."""


@attrs.frozen(kw_only=True)
class Control:
    """Actions that a callback requests at the end of a step."""

    save: bool = False
    evaluate: bool = False
    stop: bool = False


class Callback:
    """User code that the loop calls at certain events. Derive a class, override the methods that you need, and list the
    class in `trainer.callbacks` (an entry point of `rl_core.callbacks`, or `package.module:Class`)."""

    def __init__(self) -> None:
        """Called without arguments, before the first step."""

    def on_run_start(self, run_dir: Path, first_step: int, last_step: int) -> None:
        """Called before the first step."""

    def on_groups(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Called after a step was trained, with the trajectories on which it trained."""

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> Control | None:
        """Called after the weights of this step were published."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after an evaluation."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Called when a checkpoint is complete."""

    def on_run_end(self, step: int) -> None:
        """Called after the last step, also if the run was stopped early; not called if the run fails with an error."""


@attrs.frozen(kw_only=True)
class Recipe:
    """A named configuration of a run. An entry point of `rl_core.recipes` is a Recipe or a function that returns
    one."""

    summary: str
    """One line for `rl plugins`."""
    config: Mapping[str, Any]
    """`key.path` → value, not nested. The values replace the defaults."""
    tiny: Mapping[str, Any] | None = None
    """Values that `--tiny` adds on top of `config`, for a run that takes a minute on two CPU cores."""
    prepare: str | None = None
    """`package.module:function`, called as `function(config)` before a run. The function creates the paths of `makes`
    that the configuration uses and that are missing or incomplete."""
    needs: str | None = None
    """Explains how to get the data files of `config` that `prepare` does not create. The error about a missing file
    ends with this text."""
    makes: tuple[str, ...] = ()
    """Data files and model directories that `prepare` can create. Like values of `config`, they may refer to other
    keys: `${trainer.seed}`. All other paths that the configuration reads must exist."""
