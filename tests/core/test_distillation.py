"""Distillation advantages: how much likelier the teacher finds each sampled token than the student does."""

from __future__ import annotations

import math

import pytest
import torch

from rl_core.algorithms import distillation_advantages
from rl_core.errors import ConfigError, ShapeError

NAN, INF = math.nan, math.inf
# Observed tokens (the first, and one in the middle) are not trained on, so their values do not matter.
STUDENT = torch.tensor([NAN, -1.0, -0.5, -INF, -0.125, -2.0])
TEACHER = torch.tensor([NAN, -0.25, -3.5, 0.0, -12.125, -2.0])
SAMPLED = torch.tensor([False, True, True, False, True, True])


@pytest.mark.parametrize(
    ("clip", "expected"),
    [
        # Likelier to the teacher: positive. Less likely: negative. Equally likely: zero.
        (INF, [0.0, 0.75, -3.0, 0.0, -12.0, 0.0]),
        (3.0, [0.0, 0.75, -3.0, 0.0, -3.0, 0.0]),
        (0.5, [0.0, 0.5, -0.5, 0.0, -0.5, 0.0]),
    ],
)
def test_distillation_advantages_equal_values_worked_by_hand(clip: float, expected: list[float]):
    found = distillation_advantages(STUDENT, TEACHER, SAMPLED, distillation_clip=clip)
    assert found.advantages_T.tolist() == expected
    assert found.returns_T.tolist() == expected


def test_advantages_are_not_clipped_by_default():
    assert distillation_advantages(STUDENT, TEACHER, SAMPLED).advantages_T.tolist() == [
        0.0,
        0.75,
        -3.0,
        0.0,
        -12.0,
        0.0,
    ]


def test_the_mean_over_the_students_samples_is_minus_the_reverse_kl():
    student_V, teacher_V = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    everything_V = torch.ones(3, dtype=torch.bool)
    advantages_V = distillation_advantages(student_V.log(), teacher_V.log(), everything_V).advantages_T
    # KL = 1/2 ln 2 + 1/4 ln 1/2 = 1/4 ln 2
    assert float((student_V * advantages_V).sum()) == pytest.approx(-math.log(2) / 4, rel=1e-6)


def test_swapping_teacher_and_student_flips_the_signs():
    found = distillation_advantages(TEACHER, STUDENT, SAMPLED).advantages_T
    assert found.tolist() == [0.0, -0.75, 3.0, 0.0, 12.0, 0.0]


@pytest.mark.parametrize("clip", [0.0, -1.0, NAN])
def test_a_bound_that_is_not_above_zero_is_refused(clip: float):
    with pytest.raises(ConfigError, match=r"distillation_clip: got .*; expected above 0"):
        distillation_advantages(STUDENT, TEACHER, SAMPLED, distillation_clip=clip)


def test_log_probs_of_another_length_or_dtype_are_refused():
    with pytest.raises(ShapeError, match="row 5 is missing from old_logprobs_T"):
        distillation_advantages(STUDENT[:-1], TEACHER, SAMPLED)
    with pytest.raises(ShapeError, match="old_logprobs_T: expected floating-point"):
        distillation_advantages(STUDENT.long(), TEACHER, SAMPLED)
