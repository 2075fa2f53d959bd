"""Prepares the directory of a new or resumed run, and writes the run's summary."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import attrs

from rl_core.config import Config, dump_yaml
from rl_core.errors import CheckpointError, ConfigError, DataError
from rl_core.reports.jsonl import StepLog, read_rows
from rl_core.reports.samples import FILE_NAME as SAMPLES_FILE_NAME
from rl_core.reports.trackers import METRICS_FILE_NAME
from rl_core.stored_files import is_found, make_directory, write_whole
from rl_core.trainer.state.checkpoint import (
    RunState,
    complete_checkpoints,
    is_step_name,
    list_unfinished,
    load_state,
    remove_unfinished,
    step_of,
)

logger = logging.getLogger(__name__)

_RESUMED = re.compile(r"config\.resumed-(\d+)\.yaml")
_OWN_ENTRIES = re.compile(
    r"(metrics|samples)\.jsonl(\.rewriting)?|config(\.resumed-\d+)?\.yaml(\.writing)?|summary\.json(\.writing)?|"
    r"report\.html(\.writing)?|checkpoints|model|tensorboard|wandb|wandb_run_id\.txt|replaced_\d+|logs|"
    r"\.rl-lock|\.rl-run"
)
"""Names of files and directories that a run, its trackers and its engines create in the run's directory."""
MARK = ".rl-run"
"""A run writes this file into its directory first; only a lock file and a fetched checkpoint may be older. When a later
run moves the files away, it moves this file last. This file shows that a run wrote the others. Their names alone
are no proof, because other programs use names such as `metrics.jsonl` too."""
_MARK_TEXT = "A run of rl writes here, and may move files that have the names of its output; see config.yaml.\n"


@attrs.frozen(kw_only=True)
class RunSummary:
    """Results of a run. `summary.json` contains all fields except `run_dir`."""

    run_dir: Path
    steps: int
    """Number of steps done, including those before the run was resumed."""
    interrupted: bool
    accuracy_before: float | None
    """Held-out accuracy before training (mean reward if the environment reports no accuracy). None without
    an evaluation before training."""
    accuracy_after: float | None
    """The same measure in the last evaluation; None without evaluation."""
    measure: str = "accuracy"
    """What `accuracy_before` and `accuracy_after` are: `accuracy`, or `reward` if the environment reports no
    accuracy."""
    rl_seconds: float
    """Seconds that all steps and evaluations took, including those before the run was resumed."""
    total_seconds: float
    """Seconds since this process began its work, including preparation, loading and saving."""
    seed: int


@attrs.frozen(kw_only=True)
class RunStart:
    """The directory of a run, and the checkpoint and state with which it begins."""

    run_dir: Path
    checkpoint: Path | None
    """The checkpoint to continue from; None: the run starts from the model."""
    state: RunState


def open_run_directory(config: Config) -> RunStart:
    """Prepares the run's directory and finds the checkpoint to continue from.

    If the checkpoint is in the run's checkpoint directory, the earlier run continues (`set_aside_later_steps` moves
    the output of later steps away). Without a checkpoint, or with one from elsewhere, a new run begins. An earlier run
    in the directory is then moved to `<run_dir>.1`, `.2`, …; if the directory contains other files too, only the
    earlier run's files are moved. If the checkpoint directory is outside the run's directory, a new run moves the
    checkpoints in it to its subdirectory `replaced_1`, `_2`, …. The only file that may be overwritten is the
    configuration of a run that ended before it had metrics or a checkpoint. `config.yaml` is the configuration that the
    run began with; a resumed run with another configuration writes `config.resumed-1.yaml`, `-2`, …. Partial
    directories of unfinished saves are removed.

    Raises:
        CheckpointError: `resume_path` is not a checkpoint, or the checkpoint to continue from is damaged. Nothing was
            changed.
        ConfigError: the directory cannot be created or written; it contains files that have the names of a run's
            files but were not written by a run; or the run would overwrite the model that it starts from.
    """
    require_own_files(config)
    run_dir, checkpoint = config.run_dir, checkpoint_to_resume(config)
    state = _start_state() if checkpoint is None else load_state(checkpoint)
    _remove_unfinished(config, checkpoint)
    _warn_of_lost_rows(config, checkpoint, state)
    is_continued = checkpoint is not None and checkpoint.resolve().parent == config.ckpt_dir.resolve()
    try:
        if not is_continued:
            checkpoint = _move_aside(config, checkpoint)
        make_directory(run_dir)
        if not (run_dir / MARK).exists():
            write_whole(run_dir / MARK, _MARK_TEXT)
        _write_config(config, is_continued=is_continued)
    except OSError as error:
        raise ConfigError(
            f"{run_dir} cannot be created or written ({error}); choose another directory", key="trainer.run_dir"
        ) from error
    return RunStart(run_dir=run_dir, checkpoint=checkpoint, state=state)


def set_aside_later_steps(config: Config, step: int) -> None:
    """Moves the output of steps after `step`, which will be repeated, to `<run_dir>/replaced_1`, `_2`, …: checkpoints,
    rows of metrics and samples, exported models, summary and report.

    Does nothing if no later step left checkpoints or rows. Models are not moved if `trainer.export_path` is outside the
    run directory. If the process is killed midway, some files may already be moved, but no row is lost.
    """
    run_dir = config.run_dir
    checkpoints = [path for path in complete_checkpoints(config.ckpt_dir) if step_of(path) > step]
    logs = {name: _rows_after(run_dir / name, step) for name in (METRICS_FILE_NAME, SAMPLES_FILE_NAME)}
    if not checkpoints and not any(logs.values()):
        return
    aside = _free(run_dir / "replaced_")
    aside.mkdir()
    for name, rows in logs.items():
        log = StepLog(aside / name, first_step=0)
        log.write(rows)
        log.close()
    for path in _ends(config, step):
        _move(path, aside / path.relative_to(run_dir))
    for path in reversed(checkpoints):
        _move(path, aside / "checkpoints" / path.name)
    # Opening a log removes the later rows. The logs are opened last, so that a process killed earlier leaves these rows
    # in the files.
    for name, rows in logs.items():
        if rows:
            StepLog(run_dir / name, first_step=step + 1).close()
    logger.warning("the steps after %d are repeated; their earlier output is kept in %s", step, aside)


def newest_config(run_dir: Path) -> Path:
    """The file that contains the configuration with which the run was last started or resumed."""
    resumed = [path for path in run_dir.glob("config.resumed-*.yaml") if _resumed_number(path)]
    return max(resumed, key=_resumed_number, default=run_dir / "config.yaml")


def write_summary(run_dir: Path, *, interrupted: bool, total_seconds: float, seed: int) -> RunSummary:
    """Summarizes the run from its metrics file, writes `summary.json`, and returns the summary."""
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
        measure="accuracy" if any("eval/accuracy" in row for row in rows) or not evaluated else "reward",
        rl_seconds=round(sum(row.get("time/step", 0.0) for row in rows), 3),
        total_seconds=round(total_seconds, 3),
        seed=seed,
    )
    fields = {name: value for name, value in attrs.asdict(summary).items() if name != "run_dir"}
    write_whole(run_dir / "summary.json", json.dumps(fields, indent=1) + "\n")
    return summary


def _start_state() -> RunState:
    return RunState(step=0, next_group=0, restart_groups=(), kl_coef=float("nan"), nonfinite_steps=0)


def checkpoint_to_resume(config: Config) -> Path | None:
    """The checkpoint that a run would continue from: `resume_path`, or the newest complete one in the run's checkpoint
    directory, even if metrics rows are missing. None: the run starts from the model.

    Raises CheckpointError if `resume_path` is not a directory."""
    trainer = config.trainer
    if trainer.resume_mode == "none":
        return None
    if trainer.resume_mode == "from_path":
        path = Path(trainer.resume_path or "")
        if not path.is_dir():
            raise CheckpointError(
                f"{path} is not a directory; set it to a checkpoint such as …/checkpoints/step_000010",
                key="trainer.resume_path",
            )
        return path
    found = complete_checkpoints(config.ckpt_dir)
    return found[-1] if found else None


def _remove_unfinished(config: Config, checkpoint: Path | None) -> None:
    source = f"from {checkpoint.name}" if checkpoint else "without a checkpoint"
    for path in list_unfinished(config.ckpt_dir):
        logger.warning("%s was left by a run that ended while saving and is removed; continuing %s", path, source)
        remove_unfinished(path)
    for path in list_unfinished(config.export_dir):
        remove_unfinished(path)


def _warn_of_lost_rows(config: Config, checkpoint: Path | None, state: RunState) -> None:
    """Warns if the metrics file lacks rows of steps up to the checkpoint. A killed process loses no such row, because
    each row is on disk before the checkpoint of its step; a full disk may lose rows."""
    metrics = config.run_dir / METRICS_FILE_NAME
    if checkpoint is None or not metrics.exists() or checkpoint.resolve().parent != config.ckpt_dir.resolve():
        return
    there = {row["step"] for row in read_rows(metrics)}
    # If the evaluation of the last step was interrupted, the resumed run writes the step's row again.
    last = state.step - (state.unfinished_row is not None)
    lost = [step for step in range(1, last + 1) if step not in there]
    if lost:
        steps = f"step {lost[0]}" if len(lost) == 1 else f"{len(lost)} steps, {lost[0]} to {lost[-1]}"
        logger.warning("%s lacks the rows of %s; %s is complete, continuing from it", metrics, steps, checkpoint.name)


def require_own_files(config: Config) -> None:
    """Checks that every file that this run would append to, move or overwrite in its directory was written by a run.

    If the directory has a run's mark or a complete checkpoint, all files in it that have names of a run's files count
    as written by a run.

    Raises:
        ConfigError: the directory contains foreign files with such names; its metrics or samples cannot be read; or the
            run would overwrite the model that it starts from.
    """
    run_dir, model = config.run_dir, config.trainer.policy.model.path
    for name in (METRICS_FILE_NAME, SAMPLES_FILE_NAME):
        try:
            for _ in read_rows(run_dir / name) if (run_dir / name).exists() else ():
                pass
        except (DataError, OSError) as error:
            raise ConfigError(
                f"{run_dir} is not a run directory: {error}. Choose another directory, or move that file",
                key="trainer.run_dir",
            ) from error
    if found := _foreign_entries(config):
        names = ", ".join(path.name for path in found)
        raise ConfigError(
            f"{run_dir} is not a run directory: it holds {names}, which a run would overwrite or move, but nothing "
            f"shows that a run wrote them. Choose another directory, or move {names} elsewhere; if a run did write "
            f"them: touch {run_dir / MARK}",
            key="trainer.run_dir",
        )
    if model is not None and is_found(model) and os.path.realpath(model) == os.path.realpath(config.export_dir):
        raise ConfigError(
            f"{config.export_dir} is the model that the run starts from; the run would overwrite it. Choose another "
            "directory",
            key="trainer.export_path",
        )


def _foreign_entries(config: Config) -> list[Path]:
    """The entries of the run's directory that have names of a run's files; empty if a run wrote the directory. Lock
    files, unfinished saves and entries that this run will read are left out."""
    run_dir = config.run_dir.absolute()
    ckpt_dir = config.ckpt_dir.absolute()
    has_checkpoint = run_dir in ckpt_dir.parents and bool(complete_checkpoints(ckpt_dir))
    if not run_dir.is_dir() or has_checkpoint or _is_run(run_dir):
        return []
    return [path for path in _own_entries(config) if path.name != ".rl-lock" and not _is_unfinished(path)]


def _is_run(run_dir: Path) -> bool:
    return (run_dir / MARK).exists() or bool(complete_checkpoints(run_dir / "checkpoints"))


def _is_unfinished(path: Path) -> bool:
    """Whether the directory is empty, or has only a checkpoint that was being fetched or saved."""
    return path.is_dir() and set(path.iterdir()) <= set(list_unfinished(path))


def _rows_after(path: Path, step: int) -> list[dict[str, Any]]:
    return [row for row in read_rows(path) if row["step"] > step] if path.exists() else []


def _ends(config: Config, step: int) -> list[Path]:
    """Paths of the models that later steps exported, of the final model, and of summary and report, as far as they are
    inside `run_dir`."""
    run_dir, export_dir = config.run_dir, config.export_dir
    models = list(export_dir.iterdir()) if run_dir in export_dir.parents and export_dir.is_dir() else []
    later = [path for path in models if not (is_step_name(path.name) and step_of(path) <= step)]
    return [*later, *(run_dir / name for name in ("summary.json", "report.html") if (run_dir / name).exists())]


def _move_aside(config: Config, checkpoint: Path | None) -> Path | None:
    """Moves an earlier run away. Returns `checkpoint`, or its new path if it was moved too."""
    run_dir, ckpt_dir = config.run_dir.absolute(), config.ckpt_dir.absolute()
    checkpoints = complete_checkpoints(ckpt_dir)
    is_inside = run_dir in ckpt_dir.parents
    if (run_dir / METRICS_FILE_NAME).exists() or (is_inside and checkpoints):
        aside = _free(run_dir.with_name(f"{run_dir.name}."))
        own = _own_entries(config)
        if checkpoint is not None and any(checkpoint.resolve().is_relative_to(path.resolve()) for path in own):
            checkpoint = aside / checkpoint.resolve().relative_to(run_dir.resolve())
        _move_run(run_dir, own, aside)
        _say_moved(config, aside)
    if checkpoints and not is_inside:
        aside = _free(ckpt_dir / "replaced_")
        for path in checkpoints:
            _move(path, aside / path.name)
        _say_moved(config, aside)
    return checkpoint


def _own_entries(config: Config) -> list[Path]:
    """The entries of the run directory that have names of a run's files, except those that this run will read. Metrics
    and mark come last, so that they are moved last."""
    run_dir = config.run_dir.absolute()
    models = (config.trainer.policy.model.path, config.trainer.ref.model.path, config.trainer.critic.model.path)
    reads = [Path(os.path.realpath(path)) for path in (*models, *config.data.train_data, *config.data.val_data) if path]
    found = [
        path
        for path in sorted(run_dir.iterdir())
        if _OWN_ENTRIES.fullmatch(path.name) and not any(read.is_relative_to(path.resolve()) for read in reads)
    ]
    return sorted(found, key=lambda path: (path.name == MARK, path.name == METRICS_FILE_NAME))


def _move_run(run_dir: Path, own: list[Path], aside: Path) -> None:
    """Moves the whole directory if it contains only the entries `own` and the current directory is not inside it;
    otherwise moves only these entries."""
    if len(own) == len(list(run_dir.iterdir())) and not Path.cwd().is_relative_to(run_dir.resolve()):
        run_dir.rename(aside)
        return
    for path in own:
        _move(path, aside / path.name)
    logger.warning("%s stays in place; only the files of the earlier run were moved out of it", run_dir)


def _say_moved(config: Config, aside: Path) -> None:
    if config.trainer.resume_mode == "latest":
        logger.warning(
            "trainer.resume_mode=latest: no checkpoint to resume from in %s, so this run starts from the beginning; "
            "the earlier run was moved to %s",
            config.ckpt_dir,
            aside,
        )
    else:
        logger.info("this is a new run; files of the earlier one were moved to %s", aside)


def _write_config(config: Config, *, is_continued: bool) -> None:
    text, newest = dump_yaml(config), newest_config(config.run_dir)
    if is_continued and newest.exists():
        if newest.read_text(encoding="utf-8") == text:
            return
        newest = config.run_dir / f"config.resumed-{_resumed_number(newest) + 1}.yaml"
    write_whole(newest, text)


def _resumed_number(path: Path) -> int:
    """N of `config.resumed-N.yaml`; 0 for `config.yaml`."""
    found = _RESUMED.fullmatch(path.name)
    return int(found[1]) if found else 0


def _free(stem: Path) -> Path:
    """The first of `<stem>1`, `<stem>2`, … that does not exist."""
    number = 1
    while (path := stem.with_name(f"{stem.name}{number}")).exists():
        number += 1
    return path


def _move(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(path, target)
