"""Checkpoints: complete or not there.

A checkpoint is written into `step_N.partial`, then its files' sizes are listed in `complete.json`, then the directory
is renamed. A kill at any moment leaves either a `.partial` directory, which is ignored, or a whole checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import attrs

from rl_core.errors import CheckpointError

_NAME = re.compile(r"step_(\d+)")


@attrs.frozen(kw_only=True)
class RunState:
    """What the controller needs, besides the workers' state, to continue exactly."""

    step: int
    """Optimizer batches done; also the policy's version."""
    next_group: int
    """First group number that was never started."""
    restart_groups: tuple[int, ...]
    """Groups that were started and not trained on; a resumed run plays them again."""
    kl_coef: float
    """Current KL coefficient (adaptive control moves it)."""
    nonfinite_steps: int
    """Skipped optimizer steps of the policy in a row."""
    critic_nonfinite_steps: int = 0
    """The same of the critic."""


async def save_checkpoint(root: Path, state: RunState, save_workers: Callable[[Path], Awaitable[None]]) -> Path:
    """Writes `root/step_N`, whole or not at all; returns its path."""
    final = root / f"step_{state.step:06d}"
    partial = final.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    await save_workers(partial)
    (partial / "run.json").write_text(json.dumps(attrs.asdict(state), indent=1))
    sizes = {
        str(path.relative_to(partial)): path.stat().st_size for path in sorted(partial.rglob("*")) if path.is_file()
    }
    (partial / "complete.json").write_text(json.dumps(sizes, indent=1))
    _flush_to_disk(partial)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    _flush_to_disk(root)
    return final


def load_state(checkpoint: Path) -> RunState:
    """The controller's state. Raises CheckpointError when the checkpoint is missing, cut off or damaged."""
    listing = checkpoint / "complete.json"
    if not listing.is_file():
        raise CheckpointError(
            f"{checkpoint}: not a complete checkpoint (no complete.json). Give another one as trainer.resume_path"
        )
    sizes: dict[str, int] = json.loads(listing.read_text())
    for name, size in sizes.items():
        path = checkpoint / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            has = "is missing" if found is None else f"has {found} bytes"
            raise CheckpointError(
                f"{path} {has}, {size} were written: this checkpoint is damaged. "
                "Resume from an earlier one: trainer.resume_mode=from_path trainer.resume_path=…"
            )
    raw = json.loads((checkpoint / "run.json").read_text())
    return RunState(**{**raw, "restart_groups": tuple(raw["restart_groups"])})


def list_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [path for path in root.glob("step_*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def delete_old_checkpoints(root: Path, keep: int) -> None:
    """Deletes all but the newest `keep`; nothing for a negative number."""
    if keep >= 0:
        for path in list_checkpoints(root)[: -keep or None]:
            shutil.rmtree(path)


def _flush_to_disk(directory: Path) -> None:
    for path in [directory, *directory.rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
