"""Writes checkpoints atomically, and checks them before they are read.

A checkpoint is written into `step_N.partial`; its last file is `complete.json`, which lists the others with sizes and
checksums. Then all files are flushed to disk, and the directory is renamed. A kill at any moment leaves either a
`.partial` directory, which is ignored, or a complete checkpoint. This module checks sizes and checksums. Files that a
worker lists itself (`rank_kit.state_files`) are an exception: this module checks only their sizes, because the worker's
ranks check the contents when they read them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rl_core.errors import CheckpointError
from rl_core.rank_kit.state_files import listed_files
from rl_core.stored_files import FileRecord, changed, make_directory, missized, recorded, sync, sync_all
from rl_core.trainer.state.stored_groups import StartedGroup, StoredGroup, write_groups, write_started_groups

COMPLETE = "complete.json"
"""Name of the file that lists a checkpoint's files. This file is written last."""
_RUN, _FINGERPRINT = "run.json", "fingerprint.json"
_NAME = re.compile(r"step_(\d+)")
PARTIAL = ".partial"
"""Suffix of the name of a directory that is being written or removed."""
_EARLIER = "Resume from an earlier one: trainer.resume_mode=from_path trainer.resume_path=…"


@attrs.frozen(kw_only=True)
class RunState:
    """State of the controller that a resumed run needs, besides the workers' state, to continue the run."""

    step: int
    """Number of training steps done; also the policy's version."""
    next_group: int
    """Smallest group number that was never started."""
    restart_groups: tuple[int, ...]
    """Groups that were started, are not accounted for by a finished step, and are not in `finished_groups`. A resumed
    run plays them again, or continues them if the checkpoint stores the engines' answers so far
    (`trainer.stored_groups`)."""
    kl_coef: float
    """KL coefficient of the next step; adaptive control changes it after every step."""
    nonfinite_steps: int
    """Number of optimizer steps of the policy that were skipped in a row; 0 if the last one was not skipped."""
    critic_nonfinite_steps: int = 0
    """The same number for the critic; 0 without a critic."""
    finished_groups: tuple[int, ...] = ()
    """Groups that are stored with the checkpoint (`trainer.stored_groups`): finished but not yet trained on."""
    unfinished_row: Mapping[str, float] | None = None
    """Metrics of `step`, if a stop or an error came before the step's evaluation and callbacks were done. A resumed run
    begins with the evaluation and the callbacks, and writes the row again. None: the row is complete."""


def partial_path(root: Path, step: int) -> Path:
    """The directory in which the checkpoint of a step is written until it is complete."""
    return root / f"step_{step:06d}{PARTIAL}"


def begin_checkpoint(
    root: Path,
    state: RunState,
    *,
    finished: Sequence[StoredGroup] = (),
    started: Sequence[StartedGroup] = (),
    fingerprint: Mapping[str, Any] | None = None,
) -> Path:
    """Creates `root/step_N.partial`, and writes the controller's state into it. First removes a directory that an
    earlier attempt left.

    Args:
        root: the directory of the run's checkpoints.
        state: the controller's state; its `step` is N.
        finished: the groups of `state.finished_groups`.
        started: those groups of `state.restart_groups` for which tokens have been sampled.
        fingerprint: identifies the run (`trainer.fingerprint`); None: not stored.
    """
    partial = partial_path(root, state.step)
    shutil.rmtree(partial, ignore_errors=True)
    make_directory(partial)
    (partial / _RUN).write_text(json.dumps(attrs.asdict(state), indent=1))
    write_groups(partial, finished)
    write_started_groups(partial, started)
    if fingerprint is not None:
        (partial / _FINGERPRINT).write_text(json.dumps(fingerprint, indent=1))
    return partial


def complete_checkpoint(partial: Path) -> Path:
    """Turns a partial directory that contains all files into a checkpoint. Returns its new path, `root/step_N`."""
    root, final = partial.parent, partial.with_suffix("")
    names = {str(path.relative_to(partial)) for path in partial.rglob("*") if path.is_file()}
    # For the files that a worker lists, its ranks have recorded sizes and checksums.
    files = {name: record for name, record in listed_files(partial).items() if name in names}
    files |= recorded(partial, names - files.keys())
    listing = {name: files[name].as_json() for name in sorted(files)}
    (partial / COMPLETE).write_text(json.dumps(listing, indent=1))
    sync_all(partial)
    remove_complete(final)
    partial.rename(final)
    sync(root)
    return final


def load_state(checkpoint: Path) -> RunState:
    """Checks a checkpoint, and returns the controller's state. Raises CheckpointError if the checkpoint is missing,
    truncated or damaged. Of files that a worker lists, checks only the sizes."""
    listing = checkpoint / COMPLETE
    if not listing.is_file():
        raise CheckpointError(
            f"{checkpoint}: not a complete checkpoint (no complete.json). Set trainer.resume_path to another one"
        )
    try:
        files = {name: FileRecord.from_json(entry) for name, entry in _read_json(listing).items()}
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{listing}: not a list of files ({error}): this checkpoint is damaged. {_EARLIER}"
        ) from error
    damage = missized(checkpoint, files)
    state = _read_state(checkpoint / _RUN) if damage is None else None
    if damage is None:
        of_workers = listed_files(checkpoint)
        damage = changed(checkpoint, {name: record for name, record in files.items() if name not in of_workers})
    if damage is not None:
        raise CheckpointError(f"{damage}: this checkpoint is damaged. {_EARLIER}")
    assert state is not None
    return state


def load_fingerprint(checkpoint: Path) -> dict[str, Any] | None:
    """The fingerprint of the checkpoint's run; None if none is stored. Raises CheckpointError if it cannot be read."""
    path = checkpoint / _FINGERPRINT
    return _read_json(path) if path.exists() else None


def list_checkpoints(root: Path) -> list[Path]:
    """Directories in `root` whose names have the form `step_N`, in the order of N."""
    return sorted((path for path in root.glob("step_*") if is_step_name(path.name) and path.is_dir()), key=step_of)


def complete_checkpoints(root: Path) -> list[Path]:
    """Checkpoints in `root`, oldest first. A directory `step_N` without a list of its files is left out."""
    return [path for path in list_checkpoints(root) if (path / COMPLETE).is_file()]


def after_making_room(root: Path) -> str:
    """Advice to a user whose run ended because the disk was full."""
    complete = complete_checkpoints(root)
    if not complete:
        return f"there is no complete checkpoint in {root}. Make room, and start the run again"
    return f"the last complete checkpoint is {complete[-1]}. Make room, and resume the run"


def list_unfinished(root: Path) -> list[Path]:
    """Directories that an interrupted save or removal left, oldest first."""
    return sorted(root.glob(f"step_*{PARTIAL}"))


def is_step_name(name: str) -> bool:
    """Whether the name has the form `step_N` of complete checkpoints and exported models."""
    return _NAME.fullmatch(name) is not None


def step_of(path: Path) -> int:
    """The step number N of a path named `step_N`."""
    return int(path.name.removeprefix("step_"))


def delete_old_checkpoints(root: Path, keep: int) -> None:
    """Deletes all but the newest `keep` checkpoints. Never deletes the newest one. A negative number keeps all."""
    if keep >= 0:
        for path in complete_checkpoints(root)[: -max(keep, 1)]:
            remove_complete(path)


def remove_unfinished(partial: Path) -> None:
    """Removes the partial directory of an unfinished save."""
    shutil.rmtree(partial, ignore_errors=True)


def remove_complete(directory: Path) -> None:
    """Renames a checkpoint or an exported model, then removes it. So a kill midway leaves no directory with the name of
    a complete one."""
    if directory.exists():
        doomed = directory.with_name(f"{directory.name}.removed{PARTIAL}")
        remove_unfinished(doomed)
        directory.rename(doomed)
        remove_unfinished(doomed)


def _read_state(path: Path) -> RunState:
    raw = _read_json(path)
    try:
        groups = {name: tuple(raw.get(name, ())) for name in ("restart_groups", "finished_groups")}
        return RunState(**{**raw, **groups})
    except (TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path}: this version cannot read the run state ({error}); resume from an earlier checkpoint"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"expected an object, got {type(content).__name__}")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): this checkpoint is damaged. {_EARLIER}") from error
    return content
