"""A row of metrics about rollouts has the share of tokens that were forced."""

from __future__ import annotations

import attrs
import pytest

from rl_core.interfaces import TrajectoryStep
from rl_core.trainer.buffer import FinishedGroup
from rl_core.trainer.collate import collate
from rl_core.trainer.step_metrics import rollout_metrics
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
