"""A step's metrics have the share of its tokens that were forced; a warning says if most of its episodes were cut."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from rl_core.interfaces import TrajectoryStep
from rl_core.trainer.groups import FinishedGroup
from rl_core.trainer.loop.step_metrics import cut_episodes_warning, rollout_metrics
from rl_core.trainer.update.collate import collate
from tests.core.test_collate import step, trajectory

FREE = step([1, 2, 3], 1)
FORCED = attrs.evolve(FREE, loss_mask=[False, False, False])
ONE_FORCED = attrs.evolve(FREE, loss_mask=[False, True, False])


@pytest.mark.parametrize(
    ("steps", "share"),
    [([FREE, FREE], None), ([FREE, FORCED], 0.5), ([FREE, ONE_FORCED], 0.25), ([FORCED, FORCED], 1.0)],
)
def test_the_row_has_the_share_of_forced_tokens(steps: list[TrajectoryStep], share: float | None):
    trajectories = tuple(trajectory(1, one) for one in steps)
    group = FinishedGroup(group_id=1, start_version=3, trajectories=trajectories)
    row = rollout_metrics([group], collate(trajectories), version=3, bound=0)
    assert row.get("rollout/forced_tokens") == share


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (["done", "done"], None),
        (["context", "done"], None),
        (["context", "context", "done"], "2 of 3 episodes"),
        (["max_turns", "max_turns"], None),
    ],
)
def test_a_step_is_warned_of_if_most_of_its_episodes_had_no_room_for_another_turn(ends: list[Any], said: str | None):
    trajectories = tuple(attrs.evolve(trajectory(1, FREE), end=end) for end in ends)
    warning = cut_episodes_warning([FinishedGroup(group_id=1, start_version=3, trajectories=trajectories)])
    assert warning is None if said is None else (said in str(warning) and "generator.max_input_length" in str(warning))
