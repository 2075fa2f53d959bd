"""The stage between buffer and batch: replacement, masks, and their counts."""

from __future__ import annotations

import pytest

from rl_core.errors import GenerationError
from rl_core.interfaces import StopReason, Trajectory, TrajectoryStep
from rl_core.trainer.groups import FinishedGroup
from rl_core.trainer.loop.group_selection import Selection, has_zero_variance
from rl_core.trainer.update.collate import collate


def trajectory(group: int, reward: float, stop_reason: StopReason = "stop") -> Trajectory:
    step = TrajectoryStep(
        tokens=[1, 2],
        sampled=[False, True],
        rollout_logprobs=[0.0, -1.0],
        policy_version=[-1, 0],
        reward=reward,
        stop_reason=stop_reason,
    )
    return Trajectory(
        group_id=group, sample_index=0, steps=(step,), prompt_text="", response_text="", start_version=0, metrics={}
    )


def finished(group: int, *rewards: float) -> FinishedGroup:
    return FinishedGroup(
        group_id=group, start_version=0, trajectories=tuple(trajectory(group, reward) for reward in rewards)
    )


def selection(
    *, min_replace_ratio: float | None = None, mask_zero_variance: bool = False, mask_overlong: bool = False
) -> Selection:
    return Selection(
        min_replace_ratio=min_replace_ratio,
        max_rejected_batches=2,
        mask_zero_variance=mask_zero_variance,
        mask_overlong=mask_overlong,
        seed=0,
    )


def rewards(group: FinishedGroup) -> list[float]:
    return [trajectory.reward for trajectory in group.trajectories]


def test_groups_without_a_signal_are_replaced_by_copies_of_useful_ones():
    stage = selection(min_replace_ratio=0.3)
    groups = [finished(1, 0, 1), finished(2, 1, 1), finished(3, 1, 0), finished(4, 0, 0), finished(5, 0, 0)]
    chosen = stage.chosen(groups)
    assert chosen is not None
    assert [group.group_id for group in chosen] == [1, 2, 3, 4, 5]
    assert [rewards(chosen[0]), rewards(chosen[2])] == [[0, 1], [1, 0]]
    copies = [rewards(group) for group in (chosen[1], chosen[3], chosen[4])]
    assert all(copy in ([0, 1], [1, 0]) for copy in copies)
    assert copies[0] != copies[1], "each useful group must be copied once before one of them is copied again"
    assert {trajectory.group_id for trajectory in chosen[1].trajectories} == {2}
    assert stage.lap()["selection/replaced_groups"] == (3.0, 5.0)
    assert stage.lap() == {}
    assert [rewards(group) for group in selection(min_replace_ratio=0.3).chosen(groups) or []] == [
        rewards(group) for group in chosen
    ]


def test_batches_with_too_little_signal_are_discarded_until_too_many_stop_the_run():
    stage = selection(min_replace_ratio=0.5)
    poor = [finished(1, 0, 1), finished(2, 1, 1), finished(3, 1, 1)]
    assert stage.chosen(poor) is None
    with pytest.raises(GenerationError, match="2 batches of 3 groups in a row"):
        stage.chosen(poor)


def test_masked_samples_stay_sampled_and_are_counted():
    stage = selection(mask_zero_variance=True, mask_overlong=True)
    trajectories = [trajectory(1, 1), trajectory(1, 1), trajectory(2, 0), trajectory(2, 1, "length")]
    batch = stage.masked(collate(trajectories), trajectories)
    assert batch["sampled"].tolist() == [False, True] * 4
    assert batch["loss_mask"].tolist() == [False, False, False, False, False, True, False, False]
    metrics = stage.lap()
    assert metrics["selection/overlong_sequences"] == (1.0, 4.0)
    assert metrics["selection/zero_variance_groups"] == (1.0, 2.0)


def test_without_rules_nothing_changes():
    trajectories = [trajectory(1, 1), trajectory(1, 1)]
    batch = collate(trajectories)
    assert selection().masked(batch, trajectories) is batch


def test_a_group_of_one_has_no_signal():
    assert has_zero_variance([trajectory(1, 1)])
    assert not has_zero_variance([trajectory(1, 1), trajectory(1, 0)])
