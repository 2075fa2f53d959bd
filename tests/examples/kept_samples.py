"""A callback that keeps the samples that runs in this process train on."""

from __future__ import annotations

from collections.abc import Sequence

from rl_core.interfaces import Callback, Trajectory

SAMPLES: list[Trajectory] = []


class KeptSamples(Callback):
    """Appends the samples of every step to SAMPLES."""

    def on_groups(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        SAMPLES.extend(trajectories)
