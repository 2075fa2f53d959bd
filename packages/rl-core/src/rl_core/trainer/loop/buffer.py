"""The buffer between generation and training decides which groups may start and which are trained on next.

Two settings define synchronous, one-step-off and asynchronous training. `pipeline_depth` d is the number of steps by
which generation runs ahead. With `max_staleness` k ≥ d, a group that started at policy version v is trained on at
version v + k at the latest. Two rules guarantee this bound, and no group is ever discarded for its age:

- a group starts at version v only if the steps trained at versions up to v + d have room for it besides all
  outstanding groups;
- a step takes finished groups, oldest first, as long as all other groups can still be trained on before they expire.

A step normally takes all its groups at once, when they are finished. When streaming, it repeatedly takes the finished
groups until it is full. The second rule also keeps places free for groups that are still being played.

So d = 0 is synchronous training: all groups of a step start at its own version. With d > 0, most groups are at most d
versions old. Younger groups may overtake slow ones until the slow ones are k versions old. A dropped group frees its
place at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

from rl_core.errors import DeadlineError
from rl_core.interfaces import Trajectory
from rl_core.trainer.groups import FinishedGroup


class GroupBuffer:
    """Grants permissions to start groups, and holds the finished groups.

    consumes     groups from the generating task (`finish`, `drop`)
    produces     `groups_per_step` groups for every step (`take`), at once or in parts
    waits for    `permission`: room for a group, after groups are taken or dropped or a version is published;
                 `take`: enough finished groups
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
        started: Mapping[int, int] | None = None,
        in_parts: bool = False,
    ):
        """
        Args:
            pipeline_depth: from 0 to `max_staleness`.
            version: the policy's current version. Each training batch produces one version.
            last_version: the version at which the last step is trained. Groups that no step needs do not start.
            finished: groups that an earlier run finished but did not train on, all still within the staleness bound.
            started: group → start version, for groups in progress that an earlier run started and this run continues.
                They are within the staleness bound too.
            in_parts: whether `take` returns a step's groups in parts: each part has at least one group, and all groups
                that the step can take now. False: `take` returns all groups of a step at once.
        """
        assert 0 <= pipeline_depth <= max_staleness
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._pipeline_depth = pipeline_depth
        self._version = version
        self._next_step = version
        self._last_version = last_version
        self._outstanding = {group.group_id: group.start_version for group in finished} | dict(started or {})
        self._finished = {group.group_id: group for group in finished}
        self._in_parts = in_parts
        self._taken: dict[int, FinishedGroup] = {}
        """Groups taken by the step in training, or by `_next_step` while it is not full."""
        self._places = groups_per_step
        """Number of free places in `_next_step`."""
        self._given_up: set[int] = set()
        self._failure: BaseException | None = None
        self._changed = asyncio.Condition()

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Groups that no finished step accounts for, including groups that a step took but has not finished training
        on, and groups dropped or rejected since the last finished step. A resumed run starts these groups again if its
        checkpoint does not store them."""
        return tuple(sorted((*self._outstanding, *self._taken, *self._given_up)))

    @property
    def version(self) -> int:
        """The policy version with which groups start."""
        return self._version

    @property
    def runs_ahead(self) -> bool:
        """Whether groups are played while earlier ones are trained on."""
        return self._pipeline_depth > 0

    @property
    def max_staleness(self) -> int:
        """Largest number of versions between a group's start and its training."""
        return self._max_staleness

    @property
    def finished(self) -> tuple[FinishedGroup, ...]:
        """Finished groups that no step has taken."""
        return tuple(self._finished.values())

    @property
    def untrained(self) -> tuple[FinishedGroup, ...]:
        """Finished groups that no finished step has trained on, whether or not a step has taken them."""
        return (*self._taken.values(), *self._finished.values())

    @property
    def is_within_step(self) -> bool:
        """Whether a step has taken some of its groups and still needs others."""
        return self._places < self._groups_per_step

    @property
    def num_under_way(self) -> int:
        """Number of groups that have started but not finished."""
        return len(self._outstanding) - len(self._finished)

    async def permission(self, group_id: int) -> int | None:
        """Waits until this group may start, then counts it as outstanding. Returns its start version; None if
        there will never be room for it, because no step needs the group or `fail` was called."""
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
        """Discards a started group; its place becomes free for another."""
        async with self._changed:
            del self._outstanding[group_id]
            self._given_up.add(group_id)
            self._changed.notify_all()

    async def fail(self, error: BaseException) -> None:
        """Called when no more groups can be generated. From then on, `take` raises `error`."""
        async with self._changed:
            self._failure = error
            self._changed.notify_all()

    async def published(self, version: int) -> None:
        """Called when the engines serve `version`. From then on, groups start with this version."""
        async with self._changed:
            self._version = version
            self._changed.notify_all()

    async def take(self, timeout_s: float) -> list[FinishedGroup]:
        """Waits for the groups of the next step, or of its next part, and returns them, oldest first. Raises
        the error passed to `fail`, or DeadlineError if the groups are not finished within `timeout_s`."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._failure or self._choice()), timeout_s)
            except TimeoutError:
                raise DeadlineError(
                    f"step {self._next_step + 1}: still needs {self._places} of its {self._groups_per_step} groups "
                    f"after {timeout_s:g} s (trainer.generation_timeout_s); {len(self._finished)} finished, "
                    f"{self.num_under_way} in progress"
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
        """Called when the step has trained on its groups. Groups dropped before this call count in the same step."""
        self._taken = {}
        self._given_up.clear()
        async with self._changed:
            self._changed.notify_all()

    async def rejected(self) -> None:
        """Discards the groups of the last `take`; the step then takes others."""
        async with self._changed:
            self._given_up.update(self._taken)
            self._taken = {}
            self._next_step -= 1
            self._changed.notify_all()

    def _has_room(self) -> bool:
        last_planned = min(self._version + self._pipeline_depth, self._last_version)
        return len(self._outstanding) < self._room_until(last_planned)

    def _is_over(self) -> bool:
        # Until the last step's groups are trained on, they may be rejected, and then other groups are needed.
        return self._failure is not None or (self._next_step > self._last_version and not self._taken)

    def _room_until(self, step: int) -> int:
        """Number of free places in all steps up to and including `step`."""
        return (step - self._next_step) * self._groups_per_step + self._places

    def _choice(self) -> list[FinishedGroup]:
        """The oldest finished groups, as many as the step can take without letting another group expire. Empty if there
        are none, or if they do not fill a step that is taken at once."""
        if not self._in_parts and len(self._finished) < self._places:
            return []
        chosen, spare = [], self._spare_places()
        for group in sorted(self._finished.values(), key=lambda group: (group.start_version, group.group_id)):
            # The spare places of this group's start version and of younger versions already exclude a place for this
            # group. So choosing this group can take a place only from older groups.
            older = [version for version in spare if version < group.start_version]
            if len(chosen) == self._places or any(spare[version] <= 0 for version in older):
                break
            for version in older:
                spare[version] -= 1
            chosen.append(group)
        return chosen if self._in_parts or len(chosen) == self._places else []

    def _spare_places(self) -> dict[int, int]:
        """Start version of outstanding groups → free places in the steps until groups of this version expire, minus
        the places that these groups and older ones need. Never below 0."""
        counts, needed, spare = Counter(self._outstanding.values()), 0, {}
        for version in sorted(counts):
            needed += counts[version]
            spare[version] = self._room_until(version + self._max_staleness) - needed
        return spare
