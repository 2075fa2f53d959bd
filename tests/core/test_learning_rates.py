"""Learning-rate schedules compared with numbers worked by hand."""

from __future__ import annotations

import math

import pytest

from rl_core.interfaces import OptimizerConfig
from rl_core.rank_kit.learning_rates import learning_rate


def rates(scheduler: str, *, warmup: int, total: int | None, steps: int) -> list[float]:
    config = OptimizerConfig(lr=8.0, num_warmup_steps=warmup, scheduler=scheduler)
    return [learning_rate(step, config, total) for step in range(steps)]


def test_constant_with_warmup_rises_during_the_warm_up_and_then_stays():
    assert rates("constant_with_warmup", warmup=4, total=None, steps=6) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_without_warm_up_the_first_step_has_the_full_rate():
    assert rates("constant_with_warmup", warmup=0, total=None, steps=2) == [8.0, 8.0]


def test_the_linear_rate_falls_to_zero_after_the_last_step_and_stays_there():
    assert rates("linear", warmup=2, total=6, steps=8) == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0, 0.0, 0.0]


def test_the_cosine_rate_is_half_way_down_in_the_middle():
    values = rates("cosine", warmup=0, total=4, steps=5)
    assert values == pytest.approx([8.0, 4 * (1 + math.sqrt(0.5)), 4.0, 4 * (1 - math.sqrt(0.5)), 0.0], abs=1e-12)


def test_a_run_no_longer_than_its_warm_up_ends_during_the_warm_up():
    assert rates("linear", warmup=4, total=3, steps=3) == [2.0, 4.0, 6.0]
