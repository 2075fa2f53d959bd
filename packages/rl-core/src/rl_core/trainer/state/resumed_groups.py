"""Decides which of a checkpoint's groups a resumed run can train on or continue. The run plays all others again."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from rl_core.config import Config
from rl_core.trainer.state.checkpoint import RunState
from rl_core.trainer.state.fingerprint import plays_alike
from rl_core.trainer.state.stored_groups import StartedGroup, StoredGroup, read_groups, read_started_groups

logger = logging.getLogger(__name__)


@attrs.frozen(kw_only=True, eq=False)
class ResumedGroups:
    """The groups of a checkpoint, sorted by what the resumed run does with them."""

    state: RunState
    """The checkpoint's state, but its `restart_groups` are all groups that are neither in `finished` nor in `started`.
    The run plays these groups again."""
    finished: tuple[StoredGroup, ...] = ()
    """Finished groups that the run trains on without playing them again."""
    started: tuple[StartedGroup, ...] = ()
    """Groups in progress that the run continues."""


def resumed_groups(
    config: Config, checkpoint: Path | None, state: RunState, now: Mapping[str, Any], *, total_steps: int
) -> ResumedGroups:
    """Reads the groups that a checkpoint stores, and decides which of them the run uses.

    Args:
        checkpoint: the checkpoint that the run resumes from; None: the run is new, so no groups are stored.
        state: the checkpoint's state.
        now: the fingerprint of this run (`trainer.fingerprint`). If this run would play prompts differently than
            the checkpoint's run, all groups are played again.
        total_steps: number of steps of the run.

    Raises:
        CheckpointError: the groups or the checkpoint's fingerprint cannot be read.
    """
    if checkpoint is None:
        return ResumedGroups(state=state)
    finished, started = read_groups(checkpoint), read_started_groups(checkpoint)
    versions = {one.group.group_id: one.group.start_version for one in finished}
    if config.pipeline_depth > 0:  # with depth 0, every group must start at the version of its step
        versions |= {one.group_id: one.start_version for one in started}
    kept = within_the_bound(
        versions if plays_alike(checkpoint, now) else {},
        version=state.step,
        last_version=total_steps - 1,
        groups_per_step=config.trainer.train_batch_size,
        max_staleness=config.trainer.max_staleness,
    )
    if len(kept) < len(finished) + len(started):
        logger.warning(
            "%d of the %d groups stored in %s are played again. Settings that determine how groups are played, or "
            "when they can be trained on, have changed, or the checkpoint does not record them",
            len(finished) + len(started) - len(kept),
            len(finished) + len(started),
            checkpoint.name,
        )
    again = {*state.restart_groups, *state.finished_groups} - kept
    return ResumedGroups(
        state=attrs.evolve(state, restart_groups=tuple(sorted(again))),
        finished=tuple(one for one in finished if one.group.group_id in kept),
        started=tuple(one for one in started if one.group_id in kept),
    )


def within_the_bound(
    start_versions: Mapping[int, int], *, version: int, last_version: int, groups_per_step: int, max_staleness: int
) -> set[int]:
    """The groups that a run resumed at `version` can train on within the staleness bound, if it trains on the oldest
    first. A group is left out only if the batch, the bound or the number of steps became smaller since the checkpoint.

    Args:
        start_versions: group → the version with which it started.
        last_version: the version at which the last step is trained.
    """
    kept: set[int] = set()
    for group_id, start_version in sorted(start_versions.items(), key=lambda group: (group[1], group[0])):
        trained_at = version + len(kept) // groups_per_step
        if trained_at <= min(start_version + max_staleness, last_version):
            kept.add(group_id)
    return kept
