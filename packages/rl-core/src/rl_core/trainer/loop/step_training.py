"""Trains on a step's groups, either at once or, when streaming, as they finish.

When streaming, a part consists of the finished groups that the step can take when the trainer is free. Each part is
collated and scored, gets its advantages and loss weights from its own groups only, and adds its gradient, while the
step's other groups are still being sampled. After the last part, each model takes its optimizer step. The module
`streaming` decides for which configurations this gives the same step as training on all groups at once.

Parts grow with load, because groups accumulate while a part is trained. A trainer slower than the engines trains few
large parts; a faster one trains many small ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import attrs
import torch

from rl_core.batch import Batch
from rl_core.columns import KEPT_COLUMNS, ROUTE_COLUMNS
from rl_core.interfaces import Metrics, Trajectory
from rl_core.trainer.groups import FinishedGroup
from rl_core.trainer.loop.group_selection import Selection
from rl_core.trainer.loop.timing import PhaseTimes
from rl_core.trainer.publishing.serving import Engines
from rl_core.trainer.update.batch_update import BatchUpdate
from rl_core.trainer.update.collate import collate, merged
from rl_core.workers.group import add_metrics


@attrs.frozen(kw_only=True)
class TrainedStep:
    """The groups, batch and metrics of a trained step."""

    groups: tuple[FinishedGroup, ...]
    """The groups that were trained on."""
    batch: Batch
    """The batch that was trained on, with the trajectories in the order of `groups`. It has no routes if the step was
    streamed."""
    metrics: Metrics

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """The trajectories of all groups. The batch's column `trajectory_id` indexes this tuple."""
        return tuple(trajectory for group in self.groups for trajectory in group.trajectories)


class StepTraining:
    """Trains the models on the groups of a step, in one call or several."""

    def __init__(
        self,
        update: BatchUpdate,
        selection: Selection,
        engines: Engines,
        *,
        times: PhaseTimes,
        tell_phase: Callable[[str], None],
        merges_steps: bool,
        in_parts: bool,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """
        Args:
            tell_phase: called with the name of each phase that begins, for display.
            merges_steps: whether to merge trajectory steps that continue each other into one sequence.
            in_parts: whether the groups of a step come in parts (streaming).
        """
        self._update = update
        self._selection = selection
        self._engines = engines
        self._times = times
        self._tell_phase = tell_phase
        self._merges_steps = merges_steps
        self._in_parts = in_parts
        self._clock = clock
        self._parts: list[tuple[Sequence[FinishedGroup], Batch]] = []
        self._metrics: list[Metrics] = []
        self._overlapped_s = 0.0
        self.weights_are_whole = True
        """Whether the weights are those of the last finished step: no call of `train` is changing them, and none failed
        midway. When streaming, gradients of an unfinished step may be pending."""

    async def train(self, groups: Sequence[FinishedGroup], step: int, *, is_last: bool) -> TrainedStep | None:
        """Trains on groups of the step. Returns the trained step, or None if the step has further groups.

        Args:
            groups: all groups of the step or, when streaming, all groups of a part.
            step: the step's number.
            is_last: whether these are the step's last groups.
        """
        begun = self._clock()
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        batch, merging = self._batch(trajectories)
        self._tell_phase("score")
        with self._times.phase("score"):
            await self._engines.to_models()
            batch = await self._update.score(batch)
        batch = self._selection.masked(batch, trajectories)
        self.weights_are_whole = False
        batch, prepared = self._update.prepare(batch)
        self._tell_phase("train")
        with self._times.phase("train"):
            trained: Metrics = {}
            if self._in_parts:
                batch = await self._update.add(batch, step)
                trained = await self._update.finish(step) if is_last else {}
            else:
                batch, trained = await self._update.train(batch, step)
        self._parts.append((groups, batch))
        self._metrics += [merging, prepared]
        result = self._finished(trained) if is_last else None
        if not is_last:
            self._overlapped_s += self._clock() - begun
        self.weights_are_whole = True
        return result

    def _batch(self, trajectories: Sequence[Trajectory]) -> tuple[Batch, Metrics]:
        return merged(collate(trajectories)) if self._merges_steps else (collate(trajectories), {})

    def _finished(self, trained: Metrics) -> TrainedStep:
        parts, metrics, overlapped_s = self._parts, add_metrics(self._metrics), self._overlapped_s
        self._parts, self._metrics, self._overlapped_s = [], [], 0.0
        groups, batch = whole_step(parts) if self._in_parts else parts[0]
        observed = self._update.observed(batch, metrics)
        streamed = {"time/train_overlapped": (overlapped_s, 1.0), "rollout/parts": (float(len(parts)), 1.0)}
        return TrainedStep(
            groups=tuple(groups),
            batch=batch,
            metrics={
                **metrics,
                **observed,
                **trained,
                **self._selection.lap(),
                **(streamed if self._in_parts else {}),
            },
        )


def whole_step(
    parts: Sequence[tuple[Sequence[FinishedGroup], Batch]],
) -> tuple[list[FinishedGroup], Batch]:
    """Joins the parts of a step. Returns groups and batch in the order that they would have had without streaming,
    oldest first."""
    came = [group for groups, _ in parts for group in groups]
    counts = [sum(len(group.trajectories) for group in groups) for groups, _ in parts]
    firsts = torch.tensor(counts).cumsum(0) - torch.tensor(counts)
    batch = Batch.concat(
        [
            # Routes may have different dtypes in the parts; they and the kept tokens are no longer needed.
            one.without_columns(*ROUTE_COLUMNS, *KEPT_COLUMNS).with_columns(trajectory_id=one["trajectory_id"] + first)
            for (_, one), first in zip(parts, firsts.tolist(), strict=True)
        ]
    )
    order = sorted(range(len(came)), key=lambda index: (came[index].start_version, came[index].group_id))
    sizes = torch.tensor([len(group.trajectories) for group in came])
    starts = sizes.cumsum(0) - sizes
    trajectories = torch.cat([starts[index] + torch.arange(int(sizes[index])) for index in order])
    place = torch.empty_like(trajectories)
    place[trajectories] = torch.arange(len(trajectories))
    batch = batch.with_columns(trajectory_id=place[batch["trajectory_id"]])
    rows = torch.argsort(batch["trajectory_id"], stable=True)
    return [came[index] for index in order], batch.select(rows)
