"""The interface through which the loop reports phases, metrics and samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from rl_core.batch import Batch
from rl_core.interfaces import Trajectory


class Reporter(Protocol):
    """Receives the loop's reports; `rl_core.reports.run_reporter` writes them into the run directory."""

    def phase(self, name: str) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def train_samples(self, step: int, trajectories: Sequence[Trajectory], batch: Batch) -> None: ...

    def failed_samples(
        self, step: int, trajectories: Sequence[Trajectory], *, purpose: Literal["train", "eval"] = "train"
    ) -> None: ...

    def eval_samples(self, step: int, trajectories: Sequence[Trajectory]) -> None: ...
