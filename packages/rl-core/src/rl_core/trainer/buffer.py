"""Between generation and training: which groups may be started, and which are trained on next.

Two numbers govern synchronous, one-step-off and asynchronous training. `pipeline_depth` d says how many steps
generation runs ahead; with `max_staleness` k, at least d, a group that was started at policy version v is trained on at
version v + k at the latest. The bound is hard and nothing is wasted, by two rules:

- a group is started at version v only if the steps up to v + d have room for every group that is outstanding;
- a step takes finished groups, oldest first, as far as all others can still be trained on before they expire.

A step takes its groups at once, when all of them are there; streamed, it takes those that are there, again and again,
until it is full. A place that a group under way will need is left free by the same rule.

So d = 0 is synchronous training (a step's groups are all started at its own version). With more, most groups are at
most d versions old, those that take long are overtaken until they are k versions old, and a group that selection drops
gives its room back at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import attrs

from rl_core.errors import DeadlineError
from rl_core.interfaces import Trajectory


@attrs.frozen(kw_only=True, eq=False)
class FinishedGroup:
    """The trajectories of one prompt, ready to be trained on."""

    group_id: int
    start_version: int
    trajectories: tuple[Trajectory, ...]


class GroupBuffer:
    """Permissions to start groups, and the groups that are finished.

    consumes     groups from the generating task (`finish`, `drop`)
    produces     `groups_per_step` groups for every step (`take`), at once or in parts
    waits for    `permission`: a step being taken or a version being published; `take`: enough finished groups
    unblocked by `take`, `trained`, `rejected`, `published`, `drop`, `finish`, `fail`
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        pipeline_depth: int,
        version: int,
        last_version: int,
        finished: Sequence[FinishedGroup] = (),
        in_parts: bool = False,
    ):
        """
        Args:
            pipeline_depth: from 0 to `max_staleness`.
            version: the policy's version now; one optimizer batch makes one version.
            last_version: the version at which the last step is trained; no group is started that no step needs.
            finished: groups of an earlier run that none of its steps was trained on, and that can be trained within
                the bound.
            in_parts: `take` gives what a step can have at the moment, at least one group, until the step is full.
        """
        assert 0 <= pipeline_depth <= max_staleness
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._pipeline_depth = pipeline_depth
        self._version = version
        self._next_step = version
        self._last_version = last_version
        self._outstanding = {group.group_id: group.start_version for group in finished}
        self._finished = {group.group_id: group for group in finished}
        self._in_parts = in_parts
        self._taken: dict[int, FinishedGroup] = {}
        """Those of the step that is trained, or, while it is not full, of `next_step`."""
        self._places = groups_per_step
        """That `next_step` has left."""
        self._given_up: set[int] = set()
        self._failure: BaseException | None = None
        self._changed = asyncio.Condition()

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Groups that no finished step accounts for: what a resumed run starts again. Those that a step took are among
        them until it has trained on them, and so are those that were dropped or rejected since the step before."""
        return tuple(sorted((*self._outstanding, *self._taken, *self._given_up)))

    @property
    def version(self) -> int:
        """The policy version that groups are started with."""
        return self._version

    @property
    def runs_ahead(self) -> bool:
        """Groups are played while earlier ones are trained on."""
        return self._pipeline_depth > 0

    @property
    def max_staleness(self) -> int:
        """Versions that a group may lag behind when it is trained on."""
        return self._max_staleness

    @property
    def finished(self) -> tuple[FinishedGroup, ...]:
        """Those that no step took."""
        return tuple(self._finished.values())

    @property
    def untrained(self) -> tuple[FinishedGroup, ...]:
        """Finished groups that no finished step accounts for: those that a step took, and those that none took."""
        return (*self._taken.values(), *self._finished.values())

    @property
    def is_within_step(self) -> bool:
        """A step took some of its groups, and others are still to come."""
        return self._places < self._groups_per_step

    @property
    def num_under_way(self) -> int:
        """Groups that were started and are not finished."""
        return len(self._outstanding) - len(self._finished)

    async def permission(self, group_id: int) -> int | None:
        """Waits until this group may be started and counts it as outstanding; its start version, or None when no step
        needs it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._has_room() or self._is_over())
            if not self._has_room():
                return None
            self._outstanding[group_id] = self._version
            return self._version

    async def finish(self, group_id: int, trajectories: tuple[Trajectory, ...]) -> None:
        """Makes a started group available for training."""
        async with self._changed:
            start_version = self._outstanding[group_id]
            self._finished[group_id] = FinishedGroup(
                group_id=group_id, start_version=start_version, trajectories=trajectories
            )
            self._changed.notify_all()

    async def drop(self, group_id: int) -> None:
        """Gives a started group up; its room goes to another group."""
        async with self._changed:
            del self._outstanding[group_id]
            self._given_up.add(group_id)
            self._changed.notify_all()

    async def fail(self, error: BaseException) -> None:
        """The generating task ended with an error: `take` raises it."""
        async with self._changed:
            self._failure = error
            self._changed.notify_all()

    async def published(self, version: int) -> None:
        """The engines serve `version` from now on."""
        async with self._changed:
            self._version = version
            self._changed.notify_all()

    async def take(self, timeout_s: float) -> list[FinishedGroup]:
        """The groups of the next step, or of its next part, oldest first; waits for them. Raises DeadlineError, or
        what generation failed with."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._failure or self._choice()), timeout_s)
            except TimeoutError:
                there = self._groups_per_step - self._places + len(self._finished)
                raise DeadlineError(
                    f"step {self._next_step}: {there} of {self._groups_per_step} groups were finished in "
                    f"{timeout_s:g} s (trainer.generation_timeout_s); {len(self._outstanding)} are outstanding"
                ) from None
            if self._failure:
                raise self._failure
            taken = self._choice()
            for group in taken:
                del self._outstanding[group.group_id], self._finished[group.group_id]
                self._taken[group.group_id] = group
            self._places -= len(taken)
            if not self._places:
                self._next_step, self._places = self._next_step + 1, self._groups_per_step
            self._changed.notify_all()
            return taken

    async def trained(self) -> None:
        """The groups that the step took were trained on; those dropped before this call count in the same step."""
        self._taken = {}
        self._given_up.clear()
        async with self._changed:
            self._changed.notify_all()

    async def rejected(self) -> None:
        """The groups of the last `take` are given up: the step is to be taken again."""
        async with self._changed:
            self._given_up.update(self._taken)
            self._taken = {}
            self._next_step -= 1
            self._changed.notify_all()

    def _has_room(self) -> bool:
        last_planned = min(self._version + self._pipeline_depth, self._last_version)
        return len(self._outstanding) < self._room_until(last_planned)

    def _is_over(self) -> bool:
        # The last step's groups may be rejected as long as they are not trained on.
        return self._failure is not None or (self._next_step > self._last_version and not self._taken)

    def _room_until(self, step: int) -> int:
        """Places that the steps until this one have left, itself included."""
        return (step - self._next_step) * self._groups_per_step + self._places

    def _choice(self) -> list[FinishedGroup]:
        """The oldest finished groups, as many as the step can take so that no other one expires; an empty list where
        that is none, or where a step that is not taken in parts would not be full."""
        if not self._in_parts and len(self._finished) < self._places:
            return []
        chosen, spare = [], self._spare_places()
        for group in sorted(self._finished.values(), key=lambda group: (group.start_version, group.group_id)):
            # It takes a place from older ones; to itself and younger ones it leaves as many as they need.
            older = [version for version in spare if version < group.start_version]
            if len(chosen) == self._places or any(spare[version] <= 0 for version in older):
                break
            for version in older:
                spare[version] -= 1
            chosen.append(group)
        return chosen if self._in_parts or len(chosen) == self._places else []

    def _spare_places(self) -> dict[int, int]:
        """For each start version of outstanding groups: places until those expire, without what they and older ones
        need. Never below 0."""
        counts, needed, spare = Counter(self._outstanding.values()), 0, {}
        for version in sorted(counts):
            needed += counts[version]
            spare[version] = self._room_until(version + self._max_staleness) - needed
        return spare
