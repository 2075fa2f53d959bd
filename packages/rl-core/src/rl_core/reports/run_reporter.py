"""Writes what the loop reports into the run directory and to the trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rl_core import plugins
from rl_core.batch import Batch
from rl_core.config import Config
from rl_core.interfaces import PhaseAware, Tracker, Trajectory
from rl_core.reports.samples import FILE_NAME, SamplesWriter, sample_of, with_logprobs
from rl_core.reports.trackers import JsonlTracker


class RunReporter:
    """Metrics to `metrics.jsonl` and the configured trackers, a few samples of each step to `samples.jsonl`."""

    def __init__(self, config: Config, run_dir: Path, *, total_steps: int, first_step: int):
        self._num_samples = config.trainer.num_logged_samples
        self._with_logprobs = config.trainer.log_sample_logprobs
        factories = [plugins.load("rl_core.trackers", name, key="trainer.logger") for name in config.trainer.logger]
        if JsonlTracker not in factories:
            factories.insert(0, JsonlTracker)
        self._trackers: list[Tracker] = [
            factory(config, run_dir, total_steps=total_steps, first_step=first_step) for factory in factories
        ]
        self._samples = SamplesWriter(run_dir / FILE_NAME, first_step=first_step)

    def phase(self, name: str) -> None:
        """Shows what the run is doing."""
        for tracker in self._trackers:
            if isinstance(tracker, PhaseAware):
                tracker.phase(name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row of metrics; step 0 is the evaluation before training."""
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def train_samples(self, step: int, trajectories: Sequence[Trajectory], batch: Batch) -> None:
        """A few of a step's samples, evenly spread; `batch` holds their sequences, with `old_logprobs`, and
        `trajectory_id` is the index in `trajectories`."""
        chosen = _evenly_spread(len(trajectories), self._num_samples)
        samples = [sample_of(trajectories[index], step=step, purpose="train") for index in chosen]
        if self._with_logprobs:
            for position, index in enumerate(chosen):
                rows = (batch["trajectory_id"] == index).nonzero().flatten()
                samples[position] = with_logprobs(samples[position], batch.select(rows))
        self._samples.write(samples)

    def eval_samples(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """A few of an evaluation's samples, evenly spread."""
        chosen = _evenly_spread(len(trajectories), self._num_samples)
        self._samples.write([sample_of(trajectories[index], step=step, purpose="eval") for index in chosen])

    def close(self) -> None:
        """Closes the files; a second call does nothing."""
        for tracker in self._trackers:
            tracker.close()
        self._samples.close()


def _evenly_spread(total: int, count: int) -> list[int]:
    count = min(total, count)
    return [index * total // count for index in range(count)]
