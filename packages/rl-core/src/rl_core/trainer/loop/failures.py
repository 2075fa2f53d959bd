"""Records failed samples: warns of them, counts them by kind, keeps them for `samples.jsonl`, and limits their rate."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Sequence

from rl_core.errors import GenerationError
from rl_core.interfaces import Trajectory

logger = logging.getLogger(__name__)


class FailureAccount:
    """Records the failed samples of a step or of an evaluation.

    `add` warns of the first failure of each kind. It raises an error if the number of failures exceeds `max_rate` times
    the number of samples that have ended since the last `lap`. If fewer than `num_expected` samples have ended,
    `num_expected` is used instead.
    """

    def __init__(self, name: str, *, max_rate: float, num_expected: int):
        """
        Args:
            name: prefix of the metrics, `rollout` or `eval`.
            max_rate: largest fraction of samples that may fail; 1: all may fail.
            num_expected: number of samples that a step or the evaluation needs.
        """
        self._name = name
        self._max_rate = max_rate
        self._num_expected = num_expected
        self._warned: set[str] = set()
        self._num_ended: Counter[int] = Counter()
        """Number of ended samples, by group."""
        self._failed: list[Trajectory] = []

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Records samples that ended. Raises GenerationError if too many have failed."""
        failed = self._record(trajectories)
        for trajectory in failed:
            if trajectory.failure_kind not in self._warned:
                self._warned.add(trajectory.failure_kind)
                logger.warning(
                    "a sample failed: %s (the first failure of kind %s; a training run lists all in samples.jsonl and "
                    "counts them as %s/failed)",
                    trajectory.failure,
                    trajectory.failure_kind,
                    self._name,
                )
        num_ended = self._num_ended.total()
        if failed and len(self._failed) > self._max_rate * max(num_ended, self._num_expected):
            raise GenerationError(
                f"{self._name}: {len(self._failed)} of {num_ended} finished samples failed ({self._kinds()}), "
                f"more than trainer.max_failure_rate={self._max_rate:g} allows for a step or evaluation of "
                f"{self._num_expected} samples; the last failure: {failed[-1].failure}"
            )

    def restore(self, trajectories: Sequence[Trajectory]) -> None:
        """Records samples of an earlier run. Raises no error for failed samples, because the earlier run accepted their
        rate, which this account cannot compute without that run's other samples."""
        self._record(trajectories)

    def _record(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Records samples that ended, and returns those that failed."""
        failed = [trajectory for trajectory in trajectories if trajectory.failure is not None]
        self._num_ended.update(trajectory.group_id for trajectory in trajectories)
        self._failed += failed
        return failed

    @property
    def pending(self) -> tuple[Trajectory, ...]:
        """Failed samples that no `lap` has returned yet, ordered by group and sample."""
        return tuple(sorted(self._failed, key=_place))

    def lap(self, *, later: Container[int] = ()) -> tuple[dict[str, float], tuple[Trajectory, ...]]:
        """Returns the metrics `<name>/failed` and `<name>/failed/<kind>`, and the failed samples ordered by group and
        sample. Forgets the returned samples. Groups in `later` are left out and kept for a later call."""
        failed = sorted((one for one in self._failed if one.group_id not in later), key=_place)
        self._failed = [one for one in self._failed if one.group_id in later]
        self._num_ended = Counter({group: count for group, count in self._num_ended.items() if group in later})
        metrics = {f"{self._name}/failed": float(len(failed))}
        metrics |= {f"{self._name}/failed/{kind}": float(count) for kind, count in _counts(failed).items()}
        return metrics, tuple(failed)

    def _kinds(self) -> str:
        return ", ".join(f"{count} {kind}" for kind, count in _counts(self._failed).most_common())


def _place(trajectory: Trajectory) -> tuple[int, int]:
    return trajectory.group_id, trajectory.sample_index


def _counts(failed: Sequence[Trajectory]) -> Counter[str]:
    return Counter(trajectory.failure_kind for trajectory in failed)
