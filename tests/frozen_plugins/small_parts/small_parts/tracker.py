"""One line of text per step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_core.config import Config


class TextTracker:
    """Tracker and PhaseAware: `metrics.txt` in the run directory."""

    def __init__(self, config: Config, run_dir: Path, *, total_steps: int, first_step: int) -> None:
        self._file = (run_dir / "metrics.txt").open("w" if first_step == 0 else "a", encoding="utf-8")
        self._file.write(f"{config.trainer.run_name}: {total_steps} steps\n")
        self._phases: list[str] = []

    def phase(self, name: str) -> None:
        self._phases.append(name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        reward = metrics.get("reward/mean", float("nan"))
        self._file.write(f"step {step}: reward {reward:.3f} after {', '.join(self._phases)}\n")
        self._phases.clear()

    def close(self) -> None:
        self._file.close()
