"""The built-in trackers, which receive metrics.

`first_step` is the first step that this process will log. A new run starts at 0. A resumed run starts after the
checkpoint's step, or at that step if it was not completely logged. `metrics.jsonl` and TensorBoard drop what an earlier
process logged from `first_step` on; Weights & Biases keeps it and ignores the repeated steps.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from rl_core.errors import PluginError, StorageError
from rl_core.interfaces import Tracker
from rl_core.reports.jsonl import StepLog
from rl_core.reports.progress import Progress
from rl_core.stored_files import is_disk_full

if TYPE_CHECKING:
    from rl_core.config import Config

METRICS_FILE_NAME = "metrics.jsonl"

_SHOWN = {
    "reward/mean": "reward",
    "eval/reward": "held-out reward",
    "eval/accuracy": "held-out accuracy",
    "tokens_per_second": "tokens_per_second",
}
_SHOWN_OF_DATA = {
    "policy/loss": "loss",
    "eval/loss": "held-out loss",
    "eval/pair_accuracy": "held-out pair accuracy",
    "tokens_per_second": "tokens_per_second",
}
"""Metrics shown for runs that train on stored responses, which have no sampled reward."""


class ConsoleTracker(Tracker):
    """Shows the run's progress on stderr: live on a terminal, as plain lines if the output is piped."""

    def __init__(self, config: Config, run_dir: Path, *, total_steps: int, first_step: int) -> None:
        self._progress = Progress(run_dir.resolve().name, total_steps, "steps", done=max(first_step - 1, 0))
        self._num_failed = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        is_sampled = "eval/loss" not in metrics and not ("policy/loss" in metrics and "reward/mean" not in metrics)
        labels = _SHOWN if is_sampled else _SHOWN_OF_DATA
        shown = {label: metrics[name] for name, label in labels.items() if name in metrics}
        self._num_failed += int(sum(metrics.get(name, 0.0) for name in ("rollout/failed", "eval/failed")))
        if self._num_failed:
            shown["failed samples"] = self._num_failed
        self._progress.update(step, **shown)

    def phase(self, name: str) -> None:
        self._progress.phase(name)

    def close(self) -> None:
        self._progress.close()


class JsonlTracker(Tracker):
    """Writes `metrics.jsonl`: one row per step. `log` returns when the row is on disk, unless the disk is full."""

    def __init__(self, config: Config, run_dir: Path, *, total_steps: int, first_step: int) -> None:
        self._log = StepLog(run_dir / METRICS_FILE_NAME, first_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log.write([{"step": step, **metrics}])

    def close(self) -> None:
        self._log.close()


class TensorBoardTracker(Tracker):
    """Writes event files to `tensorboard/` in the run directory. TensorBoard itself purges steps that are run again."""

    def __init__(self, config: Config, run_dir: Path, *, total_steps: int, first_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard", error) from error
        self._directory = run_dir / "tensorboard"
        with self._writing():
            self._writer = SummaryWriter(self._directory, purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._writing():
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self) -> None:
        with self._writing():
            self._writer.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if is_disk_full(error):
                raise
            raise StorageError(
                f"{self._directory} could not be written ({error}); repair the storage, or remove tensorboard from "
                "trainer.logger"
            ) from error


_UPLOAD_S = 300.0
"""Seconds for the last uploads to Weights & Biases."""


class WandbTracker(Tracker):
    """Logs to Weights & Biases, as run `trainer.run_name` of project `trainer.project_name`. With `WANDB_MODE=offline`
    set, no network is needed.

    A resumed run continues the run whose id is in `wandb_run_id.txt`. Weights & Biases does not accept a step twice: it
    ignores repeated steps with a warning. When the run ends, uploads may take five more minutes, or as many seconds as
    `WANDB_FINISH_TIMEOUT` says. `wandb sync` sends what was not uploaded in this time.
    """

    def __init__(self, config: Config, run_dir: Path, *, total_steps: int, first_step: int) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports] (an extra that the development set-up leaves out)
        except ImportError as error:
            raise _missing("wandb", error) from error
        id_file = run_dir / "wandb_run_id.txt"
        if first_step == 0 or not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:12] + "\n")
        try:
            self._run = wandb.init(
                project=config.trainer.project_name,
                name=config.trainer.run_name,
                id=id_file.read_text().strip(),
                resume="allow",
                dir=run_dir,
                tags=config.trainer.tags,
                config=attrs.asdict(config),
                settings=None if "WANDB_FINISH_TIMEOUT" in os.environ else wandb.Settings(finish_timeout=_UPLOAD_S),
            )
        except wandb.Error as error:
            raise PluginError(
                f"Weights & Biases did not start the run ({error}); repair the login or the network, set "
                "WANDB_MODE=offline, or remove wandb from trainer.logger",
                key="trainer.logger",
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _missing(package: str, error: ImportError) -> PluginError:
    return PluginError(
        f"the {package!r} tracker needs the package {package}, which cannot be imported ({error}). Install it with: "
        f"pip install {package}",
        key="trainer.logger",
    )
