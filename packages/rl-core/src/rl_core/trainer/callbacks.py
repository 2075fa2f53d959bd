"""A user's own code at the loop's events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from rl_core.interfaces import Trajectory


@attrs.frozen(kw_only=True)
class Control:
    """What a callback asks the loop to do at the end of a step."""

    save: bool = False
    evaluate: bool = False
    stop: bool = False


class Callback:
    """Derive and override what you need; name it in `trainer.callbacks` as `package.module:Class`. Built without
    arguments."""

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
