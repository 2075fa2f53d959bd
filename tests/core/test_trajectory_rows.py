"""The check for complete trajectories and its two callers, compared with a slow version that checks one trajectory at a
time.
"""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.algorithms import require_complete_trajectories as require_in_algorithms
from rl_core.errors import DataError, ShapeError
from rl_core.layout import require_complete_trajectories as require_in_layout
from rl_core.trajectory_rows import why_incomplete

ROWS = st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 3)), max_size=8)


def is_complete(rows: list[tuple[int, bool, int]]) -> bool:
    for trajectory in {row[0] for row in rows}:
        steps = sorted((step, is_last) for other, is_last, step in rows if other == trajectory)
        if steps != [(index, index == len(steps) - 1) for index in range(len(steps))]:
            return False
    return True


@st.composite
def rows_of_whole_trajectories(draw: st.DrawFn) -> list[tuple[int, bool, int]]:
    counts = draw(st.lists(st.integers(1, 4), max_size=4))
    rows = [(7 * i, step == count - 1, step) for i, count in enumerate(counts) for step in range(count)]
    return draw(st.permutations(rows))


@given(st.one_of(ROWS, rows_of_whole_trajectories()))
def test_algorithms_and_layout_refuse_the_same_rows_as_the_slow_version(rows: list[tuple[int, bool, int]]):
    trajectory, is_last, step = ([row[i] for row in rows] for i in range(3))
    reason = why_incomplete(trajectory, is_last, step)
    assert (reason is None) == is_complete(rows)
    tensors = (
        torch.tensor(trajectory, dtype=torch.int64),
        torch.tensor(is_last, dtype=torch.bool),
        torch.tensor(step, dtype=torch.int64),
    )
    if reason is None:
        order = require_in_layout(trajectory, step, is_last).tolist()
        assert [(trajectory[row], step[row]) for row in order] == sorted(zip(trajectory, step, strict=True))
        require_in_algorithms(*tensors)
        return
    with pytest.raises(DataError) as from_layout:
        require_in_layout(trajectory, step, is_last)
    with pytest.raises(ShapeError) as from_algorithms:
        require_in_algorithms(*tensors)
    assert str(from_layout.value) == str(from_algorithms.value) == reason


@given(st.one_of(ROWS, rows_of_whole_trajectories()))
def test_without_step_indices_each_trajectory_needs_one_last_step(rows: list[tuple[int, bool, int]]):
    trajectory, is_last = [row[0] for row in rows], [row[1] for row in rows]
    counts = [sum(last for other, last, _ in rows if other == one) for one in set(trajectory)]
    assert (why_incomplete(trajectory, is_last) is None) == all(count == 1 for count in counts)


def test_checking_a_hundred_thousand_rows_is_not_quadratic():
    num_rows = 100_000
    step = [row % 4 for row in range(num_rows)][::-1]
    trajectory = [row // 4 for row in range(num_rows)][::-1]
    is_last = [index == 3 for index in step]
    start = time.process_time()
    assert why_incomplete(trajectory, is_last, step) is None
    assert why_incomplete(trajectory, is_last) is None
    # Processor seconds: 0.2 s on a slow core, but in a virtual machine they include the time for which the host
    # pauses it. A check that is quadratic in the rows takes minutes.
    assert time.process_time() - start < 30.0
