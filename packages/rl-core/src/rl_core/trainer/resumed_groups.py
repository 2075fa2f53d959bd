"""Decides which of a checkpoint's finished groups a resumed run can train on. The run plays the others again."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rl_core.config import Config
from rl_core.trainer.checkpoint import RunState
from rl_core.trainer.fingerprint import plays_alike
from rl_core.trainer.stored_groups import StoredGroup, read_groups

logger = logging.getLogger(__name__)


def resumed_groups(
    config: Config, checkpoint: Path | None, state: RunState, now: Mapping[str, Any], *, total_steps: int
) -> tuple[Sequence[StoredGroup], RunState]:
    """The groups that the run trains on without playing them again, and the run state, with the others added to its
    `restart_groups`.

    Args:
        now: the fingerprint of this run (`trainer.fingerprint`). If this run would play prompts differently than
            the checkpoint's run, all groups are played again.

    Raises:
        CheckpointError: the groups or the checkpoint's fingerprint cannot be read.
    """
    if checkpoint is None or not state.finished_groups:
        return (), state
    stored = within_the_bound(
        read_groups(checkpoint) if plays_alike(checkpoint, now) else (),
        version=state.step,
        last_version=total_steps - 1,
        groups_per_step=config.trainer.train_batch_size,
        max_staleness=config.trainer.max_staleness,
    )
    again = set(state.finished_groups) - {one.group.group_id for one in stored}
    if again:
        logger.warning(
            "%d of the %d finished groups in %s are played again, because settings changed that determine how they are "
            "played or how old they may be",
            len(again),
            len(state.finished_groups),
            checkpoint.name,
        )
    return stored, attrs.evolve(state, restart_groups=tuple(sorted({*state.restart_groups, *again})))


def within_the_bound(
    groups: Iterable[StoredGroup], *, version: int, last_version: int, groups_per_step: int, max_staleness: int
) -> tuple[StoredGroup, ...]:
    """The groups that a run resumed at `version` can train on within the staleness bound, oldest first. These
    are all `groups`, unless the batch or the bound became smaller, or fewer steps are left."""
    kept: list[StoredGroup] = []
    for stored in sorted(groups, key=lambda one: (one.group.start_version, one.group.group_id)):
        trained_at = version + len(kept) // groups_per_step
        if trained_at <= min(stored.group.start_version + max_staleness, last_version):
            kept.append(stored)
    return tuple(kept)
