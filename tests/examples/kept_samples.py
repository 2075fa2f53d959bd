"""A callback that keeps the samples that a run of this process was trained on."""

from __future__ import annotations

from collections.abc import Sequence

from rl_core.interfaces import Trajectory
from rl_core.trainer.callbacks import Callback

SAMPLES: list[Trajectory] = []


class KeptSamples(Callback):
    """Adds them to SAMPLES."""

    def on_groups(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        SAMPLES.extend(trajectories)
