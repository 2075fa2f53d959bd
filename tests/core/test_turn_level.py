"""Turn-level advantages: worked by hand, against a slow definition, and over the steps of step-wise trajectories."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.algorithms import grpo_advantages, turn_level_advantages
from rl_core.batch import Batch
from rl_core.trainer.update.batch_advantages import load_estimator, with_advantages


def conversation(turns: list[tuple[int, float]], group: int, trajectory: int, *, step_wise: bool) -> list[dict]:
    """The sequences of an episode with these turns (sampled tokens, reward); each turn follows two prompt tokens."""
    steps = [
        {"sampled": [False, False] + [True] * length, "rewards": [0.0] * (length + 1) + [reward]}
        for length, reward in turns
    ]
    if not step_wise:
        steps = [{name: [x for step in steps for x in step[name]] for name in ("sampled", "rewards")}]
    return [
        {
            **step,
            "tokens": [1] * len(step["sampled"]),
            "group_id": group,
            "trajectory_id": trajectory,
            "step_index": index,
            "is_last_step": index == len(steps) - 1,
        }
        for index, step in enumerate(steps)
    ]


def batch_of(episodes: list[list[tuple[int, float]]], groups: list[int], *, step_wise: bool) -> Batch:
    return Batch.from_sequences(
        [
            sequence
            for i, (turns, group) in enumerate(zip(episodes, groups, strict=True))
            for sequence in conversation(turns, group, 10 * i, step_wise=step_wise)
        ]
    )


def slow_advantages(episodes, groups, *, gamma: float, norm: bool) -> list[float]:
    """The advantages of all sampled tokens, with Python floats."""
    returns = [
        [sum(gamma ** (v - u) * turns[v][1] for v in range(u, len(turns))) for u in range(len(turns))]
        for turns in episodes
    ]
    found: list[float] = []
    for i, turns in enumerate(episodes):
        for u, (length, _) in enumerate(turns):
            compared = [returns[j][u] for j in range(len(episodes)) if groups[j] == groups[i] and len(episodes[j]) > u]
            spread = statistics.stdev(compared) + 1e-6 if norm and len(compared) > 1 else 1.0
            found += [(returns[i][u] - statistics.fmean(compared)) / spread] * length
    return found


def test_turn_level_advantages_equal_values_worked_by_hand():
    # With a discount of ½ per turn, the returns are 1 + ½ · 4 = 3 and 4 for the first sample, and 1 for the second.
    episodes = [[(2, 1.0), (1, 4.0)], [(3, 1.0)]]
    batch = batch_of(episodes, [7, 7], step_wise=False)
    made = with_advantages(batch, turn_level_advantages, {"gamma": 0.5, "grpo_norm_by_std": False})
    assert made["advantages"].tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 0, -1, -1, -1]
    assert made["returns"].tolist() == [0, 0, 3, 3, 0, 0, 4, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("step_wise", [False, True])
@given(
    episodes=st.lists(
        st.lists(st.tuples(st.integers(1, 4), st.integers(-3, 3).map(float)), min_size=1, max_size=4),
        min_size=1,
        max_size=7,
    ),
    gamma=st.sampled_from([0.0, 0.5, 1.0]),
    norm=st.booleans(),
)
def test_turn_level_advantages_equal_the_slow_definition(step_wise, episodes, gamma, norm):
    groups = [i % 3 for i in range(len(episodes))]
    batch = batch_of(episodes, groups, step_wise=step_wise)
    made = with_advantages(batch, turn_level_advantages, {"gamma": gamma, "grpo_norm_by_std": norm})
    actual = made["advantages"][batch["sampled"]].tolist()
    # The tolerance covers float32 rounding. Whole-number rewards make returns exact. If they were rounded, a group of
    # equal returns could get advantages of 0.1: an error of 1e-7 divided by the 1e-6 added to the deviation.
    assert actual == pytest.approx(slow_advantages(episodes, groups, gamma=gamma, norm=norm), rel=1e-4, abs=1e-4)


def test_with_one_turn_per_trajectory_turn_level_is_grpo():
    batch = batch_of([[(2, 1.0)], [(1, 0.0)], [(3, 0.5)], [(2, 0.5)]], [0, 0, 0, 1], step_wise=False)
    estimator = load_estimator("turn_level", {})
    made, grpo = with_advantages(batch, estimator, {}), with_advantages(batch, grpo_advantages, {})
    torch.testing.assert_close(made["advantages"], grpo["advantages"])


def test_steps_may_be_in_any_order():
    batch = batch_of([[(1, 1.0), (1, 2.0)], [(2, 0.0)], [(1, 1.0), (3, 0.0)]], [0, 0, 0], step_wise=True)
    rows = torch.tensor([4, 1, 2, 0, 3])
    made, expected = (with_advantages(one, turn_level_advantages, {}) for one in (batch.select(rows), batch))
    torch.testing.assert_close(made["advantages"], expected.select(rows)["advantages"])
