"""A run's directory: new, continued, or finished; and what is written at its end."""

from __future__ import annotations

import json
from pathlib import Path

import attrs

from rl_core.config import Config, dump_yaml
from rl_core.errors import CheckpointError
from rl_core.trainer.checkpoint import RunState, list_checkpoints, load_state
from rl_core.trainer.jsonl import read_rows
from rl_core.trainer.trackers import METRICS_FILE_NAME


@attrs.frozen(kw_only=True)
class RunSummary:
    """How a run ended."""

    run_dir: Path
    steps: int
    """Steps done, over all its processes."""
    interrupted: bool
    accuracy_before: float | None
    """Held-out accuracy (mean reward where the environment names no accuracy) before training; None without
    evaluation."""
    accuracy_after: float | None
    """The same, of the last evaluation."""
    rl_seconds: float
    """Time of the loop: all steps and evaluations."""
    total_seconds: float
    """Time of this process from its start: preparation, loading and saving too."""
    seed: int


def open_run_directory(config: Config) -> tuple[Path, Path | None]:
    """The run's directory and the checkpoint to continue from, None for a new run.

    A new run into a directory that holds an earlier one moves that aside, to `<run_dir>.1`, `.2`, …: nothing is
    overwritten.

    Raises:
        CheckpointError: `resume_path` is not a checkpoint.
    """
    run_dir = Path(config.trainer.run_dir or "")
    checkpoint = _checkpoint_to_resume(config)
    if checkpoint is None and (run_dir / METRICS_FILE_NAME).exists():
        _move_aside(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
    return run_dir, checkpoint


def read_state(checkpoint: Path | None) -> RunState:
    """The state to start from."""
    if checkpoint is None:
        return RunState(step=0, next_group=0, restart_groups=(), kl_coef=float("nan"), nonfinite_steps=0)
    return load_state(checkpoint)


def write_summary(run_dir: Path, *, interrupted: bool, total_seconds: float, seed: int) -> RunSummary:
    """Reads the run's metrics and writes `summary.json`."""
    rows = list(read_rows(run_dir / METRICS_FILE_NAME))
    accuracies = [row.get("eval/accuracy", row.get("eval/reward")) for row in rows]
    evaluated = [
        (row["step"], accuracy) for row, accuracy in zip(rows, accuracies, strict=True) if accuracy is not None
    ]
    summary = RunSummary(
        run_dir=run_dir,
        steps=rows[-1]["step"] if rows else 0,
        interrupted=interrupted,
        accuracy_before=evaluated[0][1] if evaluated and evaluated[0][0] == 0 else None,
        accuracy_after=evaluated[-1][1] if evaluated else None,
        rl_seconds=round(sum(row.get("time/step", 0.0) for row in rows), 3),
        total_seconds=round(total_seconds, 3),
        seed=seed,
    )
    fields = {name: value for name, value in attrs.asdict(summary).items() if name != "run_dir"}
    (run_dir / "summary.json").write_text(json.dumps(fields, indent=1) + "\n")
    return summary


def _checkpoint_to_resume(config: Config) -> Path | None:
    trainer = config.trainer
    if trainer.resume_mode == "none":
        return None
    if trainer.resume_mode == "from_path":
        path = Path(trainer.resume_path or "")
        if not path.is_dir():
            raise CheckpointError(
                f"trainer.resume_path: {path} is not a directory; give a checkpoint such as …/checkpoints/step_000010"
            )
        return path
    found = list_checkpoints(Path(trainer.ckpt_path or ""))
    return found[-1] if found else None


def _move_aside(run_dir: Path) -> None:
    number = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
        number += 1
    run_dir.rename(aside)
