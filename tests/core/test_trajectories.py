"""Step-wise trajectories: values do not depend on the order of rows, and incomplete trajectories are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.algorithms.advantages import grpo_advantages
from rl_core.algorithms.trajectories import (
    require_complete_trajectories,
    spread_to_steps,
    step_returns,
    trajectory_lengths,
    trajectory_scores,
)
from rl_core.errors import ShapeError

# Trajectory 7 has its steps in rows 0, 3 and 1, trajectory 2 in rows 4 and 2.
TRAJECTORY = torch.tensor([7, 7, 2, 7, 2])
STEP = torch.tensor([0, 2, 1, 1, 0])
IS_LAST = torch.tensor([False, True, True, False, False])


def test_a_trajectory_has_the_score_of_its_last_step():
    scores_N = torch.tensor([9.0, 1.0, 0.5, 9.0, 9.0])
    assert trajectory_scores(scores_N, TRAJECTORY, IS_LAST).tolist() == [0.5, 1.0]


def test_lengths_add_up_over_steps():
    assert trajectory_lengths(torch.tensor([1, 2, 3, 4, 5]), TRAJECTORY).tolist() == [8, 7]


def test_every_step_gets_its_trajectorys_value():
    assert spread_to_steps(torch.tensor([0.5, 1.0]), TRAJECTORY).tolist() == [1.0, 1.0, 0.5, 1.0, 0.5]
    with pytest.raises(ShapeError, match=r"the rows form 2 trajectories, got shape \(3,\)"):
        spread_to_steps(torch.ones(3), TRAJECTORY)


def test_step_rewards_are_discounted_by_steps():
    rewards_N = torch.tensor([1.0, 8.0, 4.0, 0.0, 1.0])
    assert step_returns(rewards_N, TRAJECTORY, STEP, gamma=0.5).tolist() == [3.0, 8.0, 4.0, 4.0, 3.0]


def test_complete_trajectories_pass():
    require_complete_trajectories(TRAJECTORY, IS_LAST, STEP)


@pytest.mark.parametrize(
    ("is_last", "message"),
    [
        ([False, True, False, False, False], r"trajectory 2 \(first row 2, 2 rows\): no row is its last step"),
        ([True, True, True, False, False], r"trajectory 7 .*: rows 0 and 1 are both its last step"),
    ],
)
def test_a_trajectory_with_no_or_two_last_steps_is_refused_with_the_row_named(is_last: list[bool], message: str):
    with pytest.raises(ShapeError, match=message):
        trajectory_scores(torch.zeros(5), TRAJECTORY, torch.tensor(is_last))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([0, 3, 1, 1, 0], r"row 1 \(trajectory 7, step 3\): expected step 2, because indices run from 0 without a gap"),
        ([0, 1, 1, 2, 0], r"row 1 \(trajectory 7, step 1\) is marked as the last step, but a later"),
        ([0, 2, 1, 2, 0], "trajectory 7: rows 1 and 3 both have step index 2"),
    ],
    ids=["gap", "last-not-largest", "repeated"],
)
def test_inconsistent_step_indices_are_refused_with_the_row_named(steps: list[int], message: str):
    with pytest.raises(ShapeError, match=message):
        require_complete_trajectories(TRAJECTORY, IS_LAST, torch.tensor(steps))


def test_misaligned_lengths_are_refused_with_the_row_named():
    with pytest.raises(ShapeError, match="row 4 is missing from scores_N"):
        trajectory_scores(torch.zeros(4), TRAJECTORY, IS_LAST)


@given(step_counts=st.lists(st.integers(1, 5), min_size=1, max_size=8), seed=st.integers(0, 2**20))
def test_rows_in_any_order_give_the_values_of_the_ordered_rows(step_counts: list[int], seed: int):
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(step_counts)
    trajectory_N = torch.repeat_interleave(torch.randperm(len(counts), generator=generator) * 3, counts)
    step_N = torch.cat([torch.arange(n) for n in step_counts])
    is_last_N = step_N == torch.repeat_interleave(counts, counts) - 1
    group_N, rewards_N = trajectory_N // 9, torch.randn(len(step_N), generator=generator)

    def by_steps(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, last = trajectory_N[rows], is_last_N[rows]
        require_complete_trajectories(ids, last, step_N[rows])
        scores_M, group_M = (trajectory_scores(v[rows], ids, last) for v in (rewards_N, group_N))
        advantages = spread_to_steps(grpo_advantages(scores_M, group_M), ids)
        return advantages, step_returns(rewards_N[rows], ids, step_N[rows], gamma=0.9)

    order = torch.randperm(len(step_N), generator=generator)
    for ordered, shuffled in zip(by_steps(torch.arange(len(step_N))), by_steps(order), strict=True):
        assert torch.equal(ordered[order], shuffled)
