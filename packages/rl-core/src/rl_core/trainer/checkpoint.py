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
from typing import Any

import attrs

from rl_core.errors import CheckpointError

_NAME = re.compile(r"step_(\d+)")
_PARTIAL = ".partial"
_EARLIER = "Resume from an earlier one: trainer.resume_mode=from_path trainer.resume_path=…"


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
    partial = begin_checkpoint(root, state)
    await save_workers(partial)
    return complete_checkpoint(partial)


def begin_checkpoint(root: Path, state: RunState) -> Path:
    """Makes `root/step_N.partial` with the controller's state in it; what an earlier attempt left there goes."""
    partial = root / f"step_{state.step:06d}{_PARTIAL}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "run.json").write_text(json.dumps(attrs.asdict(state), indent=1))
    return partial


def complete_checkpoint(partial: Path) -> Path:
    """Makes a checkpoint of a directory to which nothing more is written; its path, `root/step_N`."""
    root, final = partial.parent, partial.with_suffix("")
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
    sizes = _read_json(listing)
    for name, size in sizes.items():
        path = checkpoint / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            has = "is missing" if found is None else f"has {found} bytes"
            raise CheckpointError(f"{path} {has}, {size} were written: this checkpoint is damaged. {_EARLIER}")
    raw = _read_json(checkpoint / "run.json")
    try:
        return RunState(**{**raw, "restart_groups": tuple(raw["restart_groups"])})
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{checkpoint / 'run.json'}: not a run's state of this version ({error})") from error


def list_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted((path for path in root.glob("step_*") if is_step_name(path.name) and path.is_dir()), key=step_of)


def list_unfinished(root: Path) -> list[Path]:
    """What runs left that ended while they saved, oldest first."""
    return sorted(root.glob(f"step_*{_PARTIAL}"))


def is_step_name(name: str) -> bool:
    """`step_N`: a complete checkpoint, or an exported model."""
    return _NAME.fullmatch(name) is not None


def step_of(path: Path) -> int:
    """N of `step_N`."""
    return int(path.name.removeprefix("step_"))


def delete_old_checkpoints(root: Path, keep: int) -> None:
    """Deletes all but the newest `keep`; nothing for a negative number."""
    if keep >= 0:
        for path in list_checkpoints(root)[: -keep or None]:
            shutil.rmtree(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"expected an object, found {type(content).__name__}")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): this checkpoint is damaged. {_EARLIER}") from error
    return content


def _flush_to_disk(directory: Path) -> None:
    for path in [directory, *directory.rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
