"""Writes down what happened, and asks for a checkpoint after the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rl_core.interfaces import Trajectory
from rl_core.trainer.callbacks import Callback, Control


class NotesEvents(Callback):
    """`events.txt` in the run directory."""

    def on_run_start(self, run_dir: Path, first_step: int, last_step: int) -> None:
        self._file = run_dir / "events.txt"
        self._note(f"start {first_step} to {last_step}")

    def on_groups(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        self._note(f"groups {step}: {len(trajectories)} trajectories")

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> Control | None:
        self._note(f"step {step}: {'reward/mean' in metrics}")
        return Control(save=True) if step == 1 else None

    def on_checkpoint(self, step: int, path: Path) -> None:
        self._note(f"checkpoint {step}: {path.name}")

    def on_run_end(self, step: int) -> None:
        self._note(f"end {step}")

    def _note(self, line: str) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
