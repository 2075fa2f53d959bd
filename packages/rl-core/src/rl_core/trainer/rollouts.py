"""The generating task: starts groups as fast as the buffer allows and hands over those that can be trained on."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence

import attrs

from rl_core.errors import GenerationError, first_error
from rl_core.interfaces import Generator, GroupRequest, SamplingParams, Trajectory
from rl_core.trainer.buffer import GroupBuffer
from rl_core.trainer.data import DataRow, PromptSource
from rl_core.trainer.group_selection import has_zero_variance


@attrs.frozen(kw_only=True)
class RolloutSettings:
    """How a prompt is played, and which groups are worth training on."""

    num_samples: int
    params: SamplingParams
    seed: int
    drop_zero_variance: bool
    """Dynamic sampling: a group whose samples all have the same reward is dropped, and another one is played."""
    max_dropped_groups: int
    """More groups than that dropped between two that are kept stop the run."""
    limit_rule: str = "one batch"
    """Where `max_dropped_groups` comes from, for the message."""


class Rollouts:
    """Plays prompts into the buffer.

    consumes     rows of `source`, in the order of group numbers
    produces     finished groups in `buffer`
    waits for    the buffer's permission to start a group, then the generator
    unblocked by the training task taking groups and publishing versions
    """

    def __init__(
        self,
        generator: Generator,
        source: PromptSource,
        buffer: GroupBuffer,
        settings: RolloutSettings,
        *,
        next_group: int,
        restart_groups: Sequence[int],
    ):
        self._generator = generator
        self._source = source
        self._buffer = buffer
        self._settings = settings
        self._restart = deque(restart_groups)
        self.next_group = next_group
        self._dropped_in_a_row = 0
        self._counts: Counter[str] = Counter()

    async def run(self) -> None:
        """Until no step needs another group. An error ends the buffer's consumer too."""
        try:
            async with asyncio.TaskGroup() as playing:
                while True:
                    group_id = self._restart[0] if self._restart else self.next_group
                    start_version = await self._buffer.permission(group_id)
                    if start_version is None:
                        return
                    if self._restart:
                        self._restart.popleft()
                    else:
                        self.next_group += 1
                    playing.create_task(self._play(group_id, start_version))
        except ExceptionGroup as errors:
            await self._buffer.fail(first_error(errors))

    def pending_restarts(self) -> tuple[int, ...]:
        """Groups of an earlier run that were not started again yet."""
        return tuple(self._restart)

    def lap(self) -> dict[str, float]:
        """Counts since the last call: groups dropped and why, failed samples."""
        counts = {
            f"rollout/{name}": float(self._counts[name])
            for name in ("failed", "dropped_failed", "dropped_zero_variance")
        }
        self._counts.clear()
        return counts

    async def _play(self, group_id: int, start_version: int) -> None:
        row = self._source.row(group_id)
        request = group_request(row, group_id, start_version, self._settings)
        trajectories = await generate_group(self._generator, request)
        usable = tuple(trajectory for trajectory in trajectories if trajectory.failure is None)
        self._counts["failed"] += len(trajectories) - len(usable)
        if not usable:
            await self._drop(group_id, "dropped_failed", trajectories[0].failure or "")
        elif self._settings.drop_zero_variance and has_zero_variance(usable):
            await self._drop(group_id, "dropped_zero_variance", "all its samples had the same reward")
        else:
            self._dropped_in_a_row = 0
            await self._buffer.finish(group_id, usable)

    async def _drop(self, group_id: int, reason: str, text: str) -> None:
        self._counts[reason] += 1
        self._dropped_in_a_row += 1
        if self._dropped_in_a_row > self._settings.max_dropped_groups:
            raise GenerationError(
                f"{self._dropped_in_a_row} groups in a row gave nothing to train on, and the limit is "
                f"{self._settings.max_dropped_groups} ({self._settings.limit_rule}); the last one (group "
                f"{group_id}): {text}"
            )
        await self._buffer.drop(group_id)


async def generate_group(generator: Generator, request: GroupRequest) -> tuple[Trajectory, ...]:
    """The group's trajectories. Raises GenerationError for a generator that does not answer what it was asked."""
    trajectories = await generator.generate(request)
    asked = [(request.group_id, index) for index in range(request.num_samples)]
    answered = [(trajectory.group_id, trajectory.sample_index) for trajectory in trajectories]
    if answered != asked:
        raise GenerationError(
            f"{request.row_place}: the generator {type(generator).__name__} was asked for {request.num_samples} "
            f"samples of group {request.group_id} and answered with (group, sample) {answered}"
        )
    for trajectory in trajectories:
        if bool(trajectory.steps) == (trajectory.failure is not None):
            raise GenerationError(
                f"{request.row_place}: the generator {type(generator).__name__} answered sample "
                f"{trajectory.sample_index} with {len(trajectory.steps)} steps and failure {trajectory.failure!r}; a "
                "trajectory has steps or says why it failed"
            )
    return trajectories


def group_request(row: DataRow, group_id: int, start_version: int, settings: RolloutSettings) -> GroupRequest:
    """The request that plays one row."""
    return GroupRequest(
        group_id=group_id,
        row=row.row,
        row_place=row.place,
        num_samples=settings.num_samples,
        params=settings.params,
        seed=settings.seed,
        start_version=start_version,
    )
