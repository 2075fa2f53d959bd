"""Estimators compared with numbers worked by hand and with slow definitions, and checked to ignore the order of
rows."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rl_core.algorithms.advantages import (
    gae_advantages,
    grpo_advantages,
    maxrl_advantages,
    opo_advantages,
    pass_at_k,
    pass_at_k_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rloo_advantages,
    whiten,
)
from rl_core.algorithms.best_of_k import best_minus_second_advantages
from rl_core.algorithms.groups import group_mean, group_sum
from rl_core.algorithms.selection import zero_variance_groups
from rl_core.errors import ConfigError, DataError, ShapeError
from tests.core.token_streams import Stream, reordered, streams

GROUPS = torch.tensor([0, 1, 0, 1, 2])
SCORES = torch.tensor([6.0, 9.0, 3.0, 12.0, 1.0])
LENGTHS = torch.tensor([1, 3, 2, 1, 5])
# float32 input, float64 arithmetic, float32 result: one rounding.
ONE_ROUNDING = {"rtol": 1e-6, "atol": 1e-7}


# --- by hand --------------------------------------------------------------------------------------------------------


def test_grpo_measures_distance_from_the_prompts_mean_in_standard_deviations():
    # Group 0: mean 4.5, deviation sqrt(1.5² + 1.5²) = 2.1213; group 1 likewise around 10.5; group 2 has one sample.
    expected = torch.tensor([1.5, -1.5, -1.5, 1.5, 0.0]) / (math.sqrt(4.5) + 1e-6)
    torch.testing.assert_close(grpo_advantages(SCORES, GROUPS), expected, **ONE_ROUNDING)


def test_dr_grpo_does_not_divide_by_the_standard_deviation():
    assert grpo_advantages(SCORES, GROUPS, grpo_norm_by_std=False).tolist() == [1.5, -1.5, -1.5, 1.5, 0.0]


def test_grpo_gives_equal_scores_zero_advantages_even_if_the_mean_is_rounded():
    scores_N = torch.full((7,), 0.1)
    assert grpo_advantages(scores_N, torch.zeros(7, dtype=torch.int64)).tolist() == [0.0] * 7


def test_rloo_compares_each_sample_with_the_others_of_its_prompt():
    assert rloo_advantages(SCORES, GROUPS).tolist() == [3.0, -3.0, -3.0, 3.0, 0.0]


def test_maxrl_divides_by_the_success_rate():
    scores_N = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    group_N = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    assert maxrl_advantages(scores_N, group_N).tolist() == [3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0]


def test_maxrl_refuses_a_negative_score_and_names_it():
    with pytest.raises(DataError, match=r"scores_N\[1\] is -1"):
        maxrl_advantages(torch.tensor([1.0, -1.0]), torch.tensor([0, 0]))


def test_remax_subtracts_the_greedy_answers_score():
    assert remax_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0.25, 1.0])).tolist() == [0.75, -1.0]


def test_opo_weighs_the_baseline_by_length():
    # Group 0: (6·1 + 3·2) / 3 = 4; group 1: (9·3 + 12·1) / 4 = 9.75.
    assert opo_advantages(SCORES, GROUPS, LENGTHS).tolist() == [2.0, -0.75, -1.0, 2.25, 0.0]


def test_opo_gives_a_group_without_tokens_zero_advantages():
    lengths_N = torch.zeros(2, dtype=torch.int64)
    assert opo_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), lengths_N).tolist() == [0.0, 0.0]


def test_reinforce_plus_plus_baseline_standardises_over_tokens_and_excludes_a_group_of_one():
    # Centred 1.5, −1.5, −1.5, 1.5 with 1, 3, 2, 1 tokens: mean −4.5/7, mean square 2.25. The last row, a
    # group of one, is left out.
    mean = -4.5 / 7
    deviation = math.sqrt(2.25 - mean**2 + 1e-8)
    expected = torch.tensor([(c - mean) / deviation for c in (1.5, -1.5, -1.5, 1.5)] + [0.0])
    torch.testing.assert_close(
        reinforce_plus_plus_baseline_advantages(SCORES, GROUPS, LENGTHS), expected, **ONE_ROUNDING
    )


def test_reinforce_plus_plus_discounts_then_standardises():
    rewards_T = torch.tensor([0.0, 0.0, 4.0, 0.0, 8.0])
    mask_T = torch.tensor([False, True, True, False, True])
    sequence_T = torch.tensor([0, 0, 0, 1, 1])
    advantages_T, returns_T = reinforce_plus_plus_advantages(rewards_T, mask_T, sequence_T, gamma=0.5)
    assert returns_T.tolist() == [0.0, 2.0, 4.0, 0.0, 8.0]
    # 2, 4, 8: mean 14/3, variance 56/9.
    expected = torch.tensor([0.0, -8 / 3, -2 / 3, 0.0, 10 / 3]) / math.sqrt(56 / 9)
    torch.testing.assert_close(advantages_T, expected, **ONE_ROUNDING)


def test_gae_equals_values_worked_by_hand():
    # Token 1 is an observation, so sequence 0 has the time steps 0, 2 and 3. Their TD errors: 0 + .5·2 − 1 = 0;
    # 0 + .5·4 − 2 = 0; 1 − 4 = −3.
    rewards_T = torch.tensor([0.0, 0.0, 0.0, 1.0, 5.0])
    values_T = torch.tensor([1.0, 99.0, 2.0, 4.0, 3.0])
    mask_T = torch.tensor([True, False, True, True, True])
    sequence_T = torch.tensor([0, 0, 0, 0, 1])
    advantages_T, returns_T = gae_advantages(
        rewards_T, values_T, mask_T, sequence_T, gamma=0.5, lambd=0.5, whiten_advantages=False
    )
    assert advantages_T.tolist() == [-0.1875, 0.0, -0.75, -3.0, 2.0]
    assert returns_T.tolist() == [0.8125, 0.0, 1.25, 1.0, 5.0]


def test_gae_is_return_minus_value_at_lambda_1_and_the_td_error_at_lambda_0():
    rewards_T, values_T = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 0.25, 2.0])
    mask_T, sequence_T = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    stream = (rewards_T, values_T, mask_T, sequence_T)
    assert gae_advantages(*stream, lambd=1.0, whiten_advantages=False).advantages_T.tolist() == [5.5, 4.75, 1.0]
    assert gae_advantages(*stream, lambd=0.0, whiten_advantages=False).advantages_T.tolist() == [0.75, 3.75, 1.0]


def test_gae_passes_no_gradient_to_the_critic():
    values_T = torch.zeros(2, requires_grad=True)
    ones_T = torch.ones(2, dtype=torch.bool)
    result = gae_advantages(torch.ones(2), values_T, ones_T, torch.zeros(2, dtype=torch.int64))
    assert not result.advantages_T.requires_grad
    assert not result.returns_T.requires_grad


def test_pass_at_k_advantages_equal_values_worked_by_hand():
    # 4 samples, 1 success, k = 2: q = C(3,2)/C(4,2) = 1/2, so success +1, failure −1/3.
    scores_N = torch.tensor([1.0, 0.0, 0.0, 0.0])
    advantages_N = pass_at_k_advantages(scores_N, torch.zeros(4, dtype=torch.int64), k=2)
    torch.testing.assert_close(advantages_N, torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3]), **ONE_ROUNDING)


@pytest.mark.parametrize("estimator", [maxrl_advantages, functools.partial(pass_at_k_advantages, k=2)])
def test_success_comes_from_the_environment_and_penalties_are_separate_rewards(estimator: Callable[..., Tensor]):
    """With a KL penalty, one success has a negative score and one failure a positive score. The set of successes
    stays the same."""
    outcomes_N, group_N = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 0, 1])
    penalty_N = torch.tensor([-1.5, -0.25, -0.5, 0.25, -3.0])
    advantages_N = estimator(outcomes_N + penalty_N, group_N, outcomes_N)
    mean = float(penalty_N[:4].mean())
    own = [float(p) - mean for p in penalty_N[:4]] + [0.0]
    expected = [a + p for a, p in zip(estimator(outcomes_N, group_N).tolist(), own, strict=True)]
    assert advantages_N.tolist() == pytest.approx(expected, abs=1e-6)
    assert estimator(outcomes_N, group_N, outcomes_N).tolist() == estimator(outcomes_N, group_N).tolist()


def test_pass_at_k_estimates_without_bias():
    # 2 of 5 correct: 1 − C(3,2)/C(5,2) = 0.7; 4 of 5: every pair contains a correct one, so 1; 0 of 5: 0.
    estimate_P = pass_at_k(torch.tensor([2, 4, 0]), torch.tensor([5, 5, 5]), k=2)
    torch.testing.assert_close(estimate_P, torch.tensor([0.7, 1.0, 0.0], dtype=torch.float64))


@pytest.mark.parametrize(("correct", "samples"), [(0, 3), (5, 4), (-1, 4)])
def test_pass_at_k_refuses_fewer_than_k_samples_and_impossible_counts(correct: int, samples: int):
    with pytest.raises(DataError, match=f"prompt 1 has {correct} correct of {samples}"):
        pass_at_k(torch.tensor([4, correct]), torch.tensor([4, samples]), k=4)


def test_best_minus_second_rewards_the_best_sample_alone():
    scores_N, group_N = torch.tensor([0.2, 5.0, 0.9, 3.0, 0.4, 7.0]), torch.tensor([0, 1, 0, 1, 0, 2])
    assert best_minus_second_advantages(scores_N, group_N).tolist() == pytest.approx([0.0, 2.0, 0.5, 0.0, 0.0, 0.0])
    tied = best_minus_second_advantages(torch.tensor([1.0, 1.0, 0.0]), torch.zeros(3, dtype=torch.int64))
    assert tied.tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(ConfigError, match="k: got 1; best minus second needs subsets of at least 2"):
        best_minus_second_advantages(scores_N, group_N, k=1)


@pytest.mark.parametrize(("num_samples", "k"), [(2, 2), (3, 3), (3, 2), (4, 2)])
def test_best_minus_second_is_an_unbiased_gradient_of_the_expected_best_of_k(num_samples: int, k: int):
    """Enumerates all samples of a policy with three answers and compares with autograd through the exact
    expectation."""
    rewards = [0.0, 0.3, 1.0]
    logits_V = torch.tensor([0.4, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
    logprobs_V = logits_V.log_softmax(0)
    best = sum(
        logprobs_V[list(draw)].sum().exp() * max(rewards[v] for v in draw)
        for draw in itertools.product(range(3), repeat=k)
    )
    (exact_V,) = torch.autograd.grad(best, logits_V, retain_graph=True)
    group_N = torch.zeros(num_samples, dtype=torch.int64)
    estimate = torch.zeros((), dtype=torch.float64)
    for draw in itertools.product(range(3), repeat=num_samples):
        scores_N = torch.tensor([rewards[v] for v in draw], dtype=torch.float64)
        advantages_N = best_minus_second_advantages(scores_N, group_N, k=k)
        chance = logprobs_V[list(draw)].sum().exp().detach()
        # An advantage is a mean over the subsets of k samples that contain its sample; they are k / n of all subsets.
        estimate = estimate + chance * k / num_samples * (advantages_N * logprobs_V[list(draw)]).sum()
    (gradient_V,) = torch.autograd.grad(estimate, logits_V)
    torch.testing.assert_close(gradient_V, exact_V, rtol=1e-10, atol=1e-12)


# --- against the slow definitions -----------------------------------------------------------------------------------


def slow_grpo(scores: list[float]) -> list[float]:
    if len(scores) == 1:
        return [0.0]
    return [(s - statistics.fmean(scores)) / (statistics.stdev(scores) + 1e-6) for s in scores]


def slow_dr_grpo(scores: list[float]) -> list[float]:
    return [s - statistics.fmean(scores) for s in scores]


def slow_rloo(scores: list[float]) -> list[float]:
    if len(scores) == 1:
        return [0.0]
    return [s - statistics.fmean(scores[:i] + scores[i + 1 :]) for i, s in enumerate(scores)]


def slow_maxrl(scores: list[float]) -> list[float]:
    mean = statistics.fmean(scores)
    return [(s - mean) / mean if mean else 0.0 for s in scores]


def slow_pass_at_3(scores: list[float]) -> list[float]:
    """Rewards all triples; a sample's advantage is the mean standard score of the triples that contain it."""
    triples = list(itertools.combinations(range(len(scores)), 3))
    rewards = [float(any(scores[i] > 0 for i in triple)) for triple in triples]
    deviation = statistics.pstdev(rewards) if triples else 0.0
    if not deviation:
        return [0.0] * len(scores)
    standard = [(r - statistics.fmean(rewards)) / deviation for r in rewards]
    return [statistics.fmean(x for x, t in zip(standard, triples, strict=True) if i in t) for i in range(len(scores))]


def slow_best_minus_second(scores: list[float], k: int | None = None) -> list[float]:
    """In each subset of k samples that contains the sample, takes the best score of all k minus the best score of the
    k − 1 others. The sample's advantage is the mean of these differences."""
    k = k or len(scores)
    if not 2 <= k <= len(scores):
        return [0.0] * len(scores)
    advantages = []
    for i in range(len(scores)):
        subsets = [subset for subset in itertools.combinations(range(len(scores)), k) if i in subset]
        gains = [max(scores[j] for j in s) - max(scores[j] for j in s if j != i) for s in subsets]
        advantages.append(statistics.fmean(gains))
    return advantages


BY_GROUP: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[list[float]], list[float]]]] = {
    "grpo": (grpo_advantages, slow_grpo),
    "dr_grpo": (lambda s, g: grpo_advantages(s, g, grpo_norm_by_std=False), slow_dr_grpo),
    "rloo": (rloo_advantages, slow_rloo),
    "maxrl": (maxrl_advantages, slow_maxrl),
    "best_minus_second": (best_minus_second_advantages, slow_best_minus_second),
    "best_minus_second_of_3": (
        lambda s, g: best_minus_second_advantages(s, g, k=3),
        lambda scores: slow_best_minus_second(scores, 3),
    ),
    "pass_at_3": (lambda s, g: pass_at_k_advantages(s, g, k=3), slow_pass_at_3),
}


@pytest.mark.parametrize("name", BY_GROUP)
@given(rows=st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2)), min_size=1, max_size=14))
def test_an_estimator_equals_its_slow_definition_in_any_row_order(name: str, rows: list[tuple[int, int]]):
    estimator, slow = BY_GROUP[name]
    scores_N = torch.tensor([score / 3 for score, _ in rows], dtype=torch.float64)
    group_N = torch.tensor([group for _, group in rows])
    expected_N = torch.empty_like(scores_N)
    for group in group_N.unique():
        members = (group_N == group).nonzero().flatten()
        expected_N[members] = torch.tensor(slow(scores_N[members].tolist()), dtype=torch.float64)
    # The mean of equal float64 scores is off by one rounding; division by GRPO's 1e-6 amplifies this error to 1e-10.
    torch.testing.assert_close(estimator(scores_N, group_N), expected_N, rtol=1e-9, atol=1e-9)


@given(stream=streams())
def test_opo_and_the_reinforce_baseline_equal_their_token_by_token_definitions(stream: Stream):
    scores_N, group_N, lengths_N = stream.scores().double(), stream.groups(), torch.tensor(stream.lengths)
    opo_N, centred_N = torch.zeros_like(scores_N), torch.zeros_like(scores_N)
    has_baseline_N = torch.tensor([int((group_N == g).sum()) > 1 for g in group_N])
    for i in has_baseline_N.nonzero().flatten().tolist():
        members = group_N == group_N[i]
        opo_N[i] = scores_N[i] - torch.repeat_interleave(scores_N[members], lengths_N[members]).mean()
        centred_N[i] = scores_N[i] - scores_N[members].mean()
    torch.testing.assert_close(opo_advantages(scores_N, group_N, lengths_N), opo_N, rtol=1e-12, atol=1e-12)
    reinforce_N = reinforce_plus_plus_baseline_advantages(scores_N, group_N, lengths_N)
    tokens = torch.repeat_interleave(centred_N[has_baseline_N], lengths_N[has_baseline_N])
    if tokens.numel():
        expected_N = (centred_N - tokens.mean()) / (tokens.var(correction=0) + 1e-8).sqrt()
        torch.testing.assert_close(reinforce_N[has_baseline_N], expected_N[has_baseline_N], rtol=1e-9, atol=1e-9)
    assert not reinforce_N[~has_baseline_N].any()


def slow_gae(
    rewards_T: Tensor, values_T: Tensor, mask_T: Tensor, sequence_T: Tensor, gamma: float, lambd: float
) -> Tensor:
    """The double sum of equation 16 of the GAE paper, term by term."""
    advantages_T = torch.zeros_like(rewards_T)
    for sequence in sequence_T.unique():
        times = ((sequence_T == sequence) & mask_T).nonzero().flatten().tolist()
        errors = []
        for here, t in enumerate(times):
            next_value = float(values_T[times[here + 1]]) if here + 1 < len(times) else 0.0
            errors.append(float(rewards_T[t]) + gamma * next_value - float(values_T[t]))
        for here, t in enumerate(times):
            advantages_T[t] = sum((gamma * lambd) ** k * error for k, error in enumerate(errors[here:]))
    return advantages_T


@given(stream=streams(), gamma=st.sampled_from([0.0, 0.9, 1.0]), lambd=st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_equals_the_papers_double_sum(stream: Stream, gamma: float, lambd: float):
    rewards_T, values_T = stream.normal() * stream.mask_T, stream.normal(salt=1)
    rest = (stream.mask_T, stream.sequence_T)
    expected_T = slow_gae(rewards_T, values_T, *rest, gamma, lambd)
    result = gae_advantages(rewards_T, values_T, *rest, gamma=gamma, lambd=lambd, whiten_advantages=False)
    # Tolerance: 90 terms of order 1 in float64.
    torch.testing.assert_close(result.advantages_T, expected_T, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(result.returns_T, (expected_T + values_T) * stream.mask_T, rtol=1e-11, atol=1e-11)
    whitened = gae_advantages(rewards_T, values_T, *rest, gamma=gamma, lambd=lambd)
    torch.testing.assert_close(whitened.advantages_T, whiten(expected_T, stream.mask_T), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(whitened.returns_T, result.returns_T, rtol=0, atol=0)


@pytest.mark.parametrize("lengths", [[40_000, 7], [3] * 20_000], ids=["long", "many"])
def test_gae_in_float32_stays_close_to_a_float64_recurrence(lengths: list[int]):
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(lengths)
    rewards_T, values_T = torch.randn(2, num_tokens, generator=generator)
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask_T = torch.ones(num_tokens, dtype=torch.bool)
    result = gae_advantages(rewards_T, values_T, mask_T, sequence_T, gamma=1.0, lambd=1.0, whiten_advantages=False)
    expected, running, rewards, values = [0.0] * num_tokens, 0.0, rewards_T.tolist(), values_T.tolist()
    for t in range(num_tokens - 1, -1, -1):
        last = t + 1 == num_tokens or sequence_T[t + 1] != sequence_T[t]
        running = rewards[t] + (0.0 if last else values[t + 1] + running) - values[t]
        expected[t] = running
    # Sums of 40,000 normals reach 400; block-wise float32 sums have 6 correct digits, a float32 recurrence 4 to 5.
    torch.testing.assert_close(result.advantages_T, torch.tensor(expected), rtol=1e-5, atol=5e-4)


# --- properties -----------------------------------------------------------------------------------------------------


@given(stream=streams(max_length=3), shift=st.sampled_from([-0.5, 0.0, 2.0]))
def test_advantages_against_a_group_mean_ignore_order_ids_and_shifts(stream: Stream, shift: float):
    scores_N, group_N = stream.scores(), stream.groups()
    order = torch.randperm(scores_N.numel(), generator=torch.Generator().manual_seed(stream.seed))
    for estimator in (grpo_advantages, rloo_advantages):
        plain_N = estimator(scores_N, group_N)
        torch.testing.assert_close(estimator(scores_N[order], group_N[order]), plain_N[order], rtol=0, atol=0)
        torch.testing.assert_close(estimator(scores_N, -3 * group_N), plain_N, rtol=0, atol=0)
        # A shift rounds float32 scores by up to 1e-7; division by a deviation of at least 0.1 keeps the error below
        # 1e-5.
        torch.testing.assert_close(estimator(scores_N + shift, group_N), plain_N, rtol=1e-5, atol=1e-5)


@given(stream=streams())
def test_token_estimators_ignore_the_order_of_sequences(stream: Stream):
    order = torch.randperm(len(stream.lengths), generator=torch.Generator().manual_seed(stream.seed)).tolist()
    rewards_T, values_T = stream.normal() * stream.mask_T, stream.normal(salt=1)
    sequence_T = torch.repeat_interleave(torch.arange(len(order)), torch.tensor([stream.lengths[i] for i in order]))
    moved = [reordered(stream, values, order) for values in (rewards_T, values_T, stream.mask_T)]
    plain = gae_advantages(rewards_T, values_T, stream.mask_T, stream.sequence_T, gamma=0.99, lambd=0.9)
    other = gae_advantages(*moved, sequence_T, gamma=0.99, lambd=0.9)
    plain += reinforce_plus_plus_advantages(rewards_T, stream.mask_T, stream.sequence_T, gamma=0.99)
    other += reinforce_plus_plus_advantages(moved[0], moved[2], sequence_T, gamma=0.99)
    for before_T, after_T in zip(plain, other, strict=True):
        torch.testing.assert_close(reordered(stream, before_T, order), after_T, rtol=1e-9, atol=1e-9)


@given(stream=streams())
def test_whitening_gives_mean_0_and_variance_1_within_the_mask_and_zeros_outside_it(stream: Stream):
    whitened_T = whiten(stream.normal() * 3 + 100, stream.mask_T)
    assert not whitened_T[~stream.mask_T].any()
    inside = whitened_T[stream.mask_T]
    if inside.numel() > 1:
        assert abs(float(inside.mean())) < 1e-9
        assert abs(float(inside.var(correction=0)) - 1) < 1e-6


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_whitening_equal_values_gives_exact_zeros(count: int):
    values_T = torch.full((1001,), 0.1)
    values_T[count:] = float("nan")
    assert not whiten(values_T, torch.arange(1001) < count).any()


def test_empty_masks_and_empty_streams_give_zeros():
    for num_tokens in (0, 5):
        rewards_T = torch.zeros(num_tokens)
        mask_T = torch.zeros(num_tokens, dtype=torch.bool)
        sequence_T = torch.zeros(num_tokens, dtype=torch.int64)
        assert not gae_advantages(rewards_T, rewards_T + 1, mask_T, sequence_T).returns_T.any()
        assert not reinforce_plus_plus_advantages(rewards_T, mask_T, sequence_T).advantages_T.any()
    none = torch.zeros(0)
    ids = torch.zeros(0, dtype=torch.int64)
    for result in (grpo_advantages(none, ids), opo_advantages(none, ids, ids), pass_at_k_advantages(none, ids, k=2)):
        assert result.shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2), torch.zeros(3, dtype=torch.int64)), "row 2 is missing from scores_N"),
        ((torch.ones(2), torch.zeros(2)), r"group_N: expected torch.int64, got torch.float32; .* \.long\(\)"),
        ((torch.ones(2), None), "group_N: expected a tensor, got NoneType; convert"),
        ((torch.ones(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)), "scores_N: expected floating-point"),
        (
            (torch.ones(2, 1), torch.zeros(2, dtype=torch.int64)),
            r"scores_N: .* got shape \(2, 1\); index padded tensors",
        ),
    ],
)
def test_shapes_and_dtypes_that_do_not_fit_are_refused(arguments: tuple[Tensor, Tensor], message: str):
    with pytest.raises(ShapeError, match=message):
        grpo_advantages(*arguments)


def test_tensors_on_two_devices_are_named():
    with pytest.raises(ShapeError, match=r"group_N is on meta, scores_N on cpu; move them to one device"):
        grpo_advantages(torch.ones(2), torch.zeros(2, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("score", [math.nan, -math.inf])
def test_a_score_that_is_not_finite_is_named(score: float):
    scores_N, group_N = torch.tensor([1.0, score, 0.0]), torch.tensor([4, 4, 5])
    for function in (grpo_advantages, rloo_advantages, maxrl_advantages, best_minus_second_advantages):
        with pytest.raises(DataError, match=rf"scores_N\[1\] is {score}; expected a finite number"):
            function(scores_N, group_N)
    with pytest.raises(DataError, match=rf"greedy_scores_N\[1\] is {score}; expected a finite number"):
        remax_advantages(torch.ones(3), scores_N)
    sequence_T, mask_T = torch.tensor([0, 1, 1]), torch.ones(3, dtype=torch.bool)
    for token_advantages in (functools.partial(gae_advantages, values_T=torch.ones(3)), reinforce_plus_plus_advantages):
        with pytest.raises(DataError, match=rf"rewards_T\[1\] is {score}; expected a finite number"):
            token_advantages(rewards_T=scores_N, mask_T=mask_T, sequence_T=sequence_T)


@pytest.mark.parametrize("ids", [["a", "b"], ("a", "b"), np.array(["a", "b"]), np.array(["a", "b"], dtype=object)])
def test_the_error_for_group_ids_that_are_text_says_to_use_numbers(ids: Any):
    scores_N = torch.ones(2)
    message = "group_N: expected a tensor, got .* of str_?; replace strings by numbers"
    for function in (grpo_advantages, rloo_advantages, pass_at_k, zero_variance_groups, group_mean, group_sum):
        settings = {"k": 2} if function is pass_at_k else {}
        names = "num_samples_P" if function is pass_at_k else "group_N"
        with pytest.raises(ShapeError, match=message.replace("group_N", names)):
            function(scores_N, ids, **settings)


def test_settings_out_of_range_are_refused():
    stream = (torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"gamma: 1.5 is not between 0 and 1"):
        gae_advantages(*stream, gamma=1.5)
    with pytest.raises(ConfigError, match=r"k: 0 is not a positive number"):
        pass_at_k_advantages(torch.zeros(1), torch.zeros(1, dtype=torch.int64), k=0)
