"""Writes the metrics and samples of a run to its directory and to the trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from rl_core import plugins
from rl_core.batch import Batch
from rl_core.config import Config
from rl_core.interfaces import Row, Tracker, Trajectory
from rl_core.reports.samples import FILE_NAME, SamplesWriter, WrittenSample, sample_of, with_logprobs
from rl_core.reports.trackers import JsonlTracker
from rl_core.tasks import code_of


class RunReporter:
    """Writes metrics to `metrics.jsonl` and the configured trackers, and a few samples of each step and all failed
    samples to `samples.jsonl`."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        total_steps: int,
        steps_done: int | None,
        writes_last_row_again: bool = False,
        train_row: Callable[[int], Row] | None = None,
        eval_row: Callable[[int], Row] | None = None,
    ):
        """
        Args:
            steps_done: number of steps that a resumed run has done; None for a new run.
            writes_last_row_again: whether step `steps_done` is evaluated again and its row replaced. Its training
                samples are kept.
            train_row: returns a group's row of the training data, given the group's number; None: rows are not known.
            eval_row: returns a group's row of the evaluation data, given the group's number; None: rows are not known.
        """
        first_step = 0 if steps_done is None else steps_done + 1
        self._row_of = {"train": train_row, "eval": eval_row}
        self._num_samples = config.trainer.num_logged_samples
        self._with_logprobs = config.trainer.log_sample_logprobs
        factories = [plugins.load("rl_core.trackers", name, key="trainer.logger") for name in config.trainer.logger]
        if JsonlTracker not in factories:
            factories.insert(0, JsonlTracker)
        self._trackers: list[Tracker] = []
        with ExitStack() as closing:  # closes the trackers that have started if a later one fails
            closing.callback(self._close_trackers)
            for factory in factories:
                self._trackers.append(
                    factory(config, run_dir, total_steps=total_steps, first_step=first_step - writes_last_row_again)
                )
            self._samples = SamplesWriter(
                run_dir / FILE_NAME, first_step=first_step, evaluates_again=writes_last_row_again
            )
            closing.pop_all()

    def phase(self, name: str) -> None:
        """Passes the current phase of the run to the trackers."""
        for tracker in self._trackers:
            with code_of(f"the tracker {type(tracker).__name__}"):
                tracker.phase(name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one row of metrics. Step 0 is the evaluation before training."""
        for tracker in self._trackers:
            with code_of(f"the tracker {type(tracker).__name__}"):
                tracker.log(step, metrics)

    def train_samples(self, step: int, trajectories: Sequence[Trajectory], batch: Batch) -> None:
        """Writes a few of a step's samples, evenly spread over all. `batch` has the sequences of `trajectories`, with
        `old_logprobs`; its `trajectory_id` is the index in `trajectories`."""
        chosen = _evenly_spread(len(trajectories), self._num_samples)
        samples = [self._sample(trajectories[index], step, "train") for index in chosen]
        if self._with_logprobs:
            for position, index in enumerate(chosen):
                rows = (batch["trajectory_id"] == index).nonzero().flatten()
                samples[position] = with_logprobs(samples[position], batch.select(rows))
        self._samples.write(samples)

    def failed_samples(
        self, step: int, trajectories: Sequence[Trajectory], *, purpose: Literal["train", "eval"] = "train"
    ) -> None:
        """Writes all `trajectories`: the samples that failed in a step, or in an evaluation that ended with an
        error."""
        self._samples.write([self._sample(trajectory, step, purpose) for trajectory in trajectories])

    def eval_samples(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Writes all failed samples of an evaluation, and a few of its samples, evenly spread over all."""
        failed = {index for index, trajectory in enumerate(trajectories) if trajectory.failure is not None}
        chosen = sorted(failed.union(_evenly_spread(len(trajectories), self._num_samples)))
        self._samples.write([self._sample(trajectories[index], step, "eval") for index in chosen])

    def _sample(self, trajectory: Trajectory, step: int, purpose: Literal["train", "eval"]) -> WrittenSample:
        row_of = self._row_of[purpose]
        row = None if row_of is None else row_of(trajectory.group_id)
        return sample_of(trajectory, step=step, purpose=purpose, row=row)

    def close(self) -> None:
        """Closes the samples file and the trackers; a second call does nothing."""
        with ExitStack() as closing:
            closing.callback(self._samples.close)
            closing.callback(self._close_trackers)

    def _close_trackers(self) -> None:
        with ExitStack() as closing:
            while self._trackers:
                closing.callback(self._trackers.pop().close)


def _evenly_spread(total: int, count: int) -> list[int]:
    count = min(total, count)
    return [index * total // count for index in range(count)]
