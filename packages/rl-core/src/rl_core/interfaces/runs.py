"""Runs: a named configuration (`Recipe`), and where a run's metrics go (`Tracker`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import attrs


@runtime_checkable
class Tracker(Protocol):
    """Where metrics go.

    Entry-point group `rl_core.trackers`: a callable `(config, run_dir, *, total_steps, first_step) → Tracker`, where
    `first_step` is the first step that will be logged: 0 for a new run, the checkpoint's step + 1 for a resumed one.
    What
    an earlier process logged for that step and those after it is dropped.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Once per step, in order. Step 0 holds the evaluation before training."""
        ...

    def close(self) -> None:
        """Called once, also when the run fails."""
        ...


@runtime_checkable
class PhaseAware(Protocol):
    """A tracker that is told what the run is doing."""

    def phase(self, name: str) -> None:
        """`name` begins now: generate, score, train, publish, evaluate, checkpoint."""
        ...


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
