"""KL estimates: numbers worked by hand, expectation and gradient on a known distribution, and the adaptive
coefficient."""

from __future__ import annotations

import math

import pytest
import torch

from rl_core.algorithms import adaptive_kl_coef, estimate_kl, kl_penalty
from rl_core.algorithms.kl import KL_ESTIMATORS
from rl_core.errors import ConfigError

ALL = torch.tensor([True, True])
LOGITS_V = torch.tensor([0.3, -0.5, 1.1, 0.2], dtype=torch.float64)
REF_LOGPROBS_V = torch.tensor([0.1, 0.4, 0.7, -0.6], dtype=torch.float64).log_softmax(0)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [0.5, -0.5]),
        ("k2", [0.125, 0.125]),
        ("k3", [math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5]),
        ("abs", [0.5, 0.5]),
    ],
)
def test_kl_estimates_equal_values_worked_by_hand(estimator, expected):
    logprobs_T, ref_logprobs_T = (
        torch.tensor([-1.0, -1.5], dtype=torch.float64),
        torch.tensor([-1.5, -1.0], dtype=torch.float64),
    )
    for suffix in ("", "+"):
        assert estimate_kl(logprobs_T, ref_logprobs_T, ALL, estimator=estimator + suffix).tolist() == pytest.approx(
            expected
        )


@pytest.mark.parametrize("estimator", ["k1", "k3", "k1+", "k3+"])
def test_k1_and_k3_have_the_kl_as_expectation(estimator):
    logprobs_V = LOGITS_V.log_softmax(0)
    kl = (logprobs_V.exp() * (logprobs_V - REF_LOGPROBS_V)).sum()
    everywhere = torch.ones(4, dtype=torch.bool)
    estimates_V = estimate_kl(logprobs_V, REF_LOGPROBS_V, everywhere, estimator=estimator)
    assert (logprobs_V.exp() * estimates_V).sum().item() == pytest.approx(kl.item())


@pytest.mark.parametrize(
    ("estimator", "is_right"),
    [(name, name.endswith("+") or name in ("k2", "k3_unbiased")) for name in KL_ESTIMATORS],
)
def test_only_k2_the_straight_through_forms_and_the_unbiased_form_have_the_gradient_of_the_kl(estimator, is_right):
    """Compares the expected gradient E[∇ estimate] with the exact gradient of the KL with respect to the logits."""
    logits_V = LOGITS_V.clone().requires_grad_()
    logprobs_V = logits_V.log_softmax(0)
    (exact_V,) = torch.autograd.grad(
        (logprobs_V.exp() * (logprobs_V - REF_LOGPROBS_V)).sum(), logits_V, retain_graph=True
    )
    everywhere = torch.ones(4, dtype=torch.bool)
    sampled = (
        logprobs_V.exp().detach() * estimate_kl(logprobs_V, REF_LOGPROBS_V, everywhere, estimator=estimator)
    ).sum()
    (gradient_V,) = torch.autograd.grad(sampled, logits_V)
    assert torch.allclose(gradient_V, exact_V, atol=1e-12) == is_right


@pytest.mark.parametrize(("estimator", "is_right"), [(name, name == "k3_unbiased") for name in KL_ESTIMATORS])
def test_on_samples_of_an_older_policy_only_the_unbiased_form_has_value_and_gradient_of_the_kl(estimator, is_right):
    """Compares expectations under the old policy, summed over the vocabulary, with the exact KL and its gradient."""
    old_logprobs_V = torch.tensor([0.9, -0.2, -0.4, 0.5], dtype=torch.float64).log_softmax(0)
    logits_V = LOGITS_V.clone().requires_grad_()
    logprobs_V = logits_V.log_softmax(0)
    exact = (logprobs_V.exp() * (logprobs_V - REF_LOGPROBS_V)).sum()
    (exact_V,) = torch.autograd.grad(exact, logits_V, retain_graph=True)
    everywhere = torch.ones(4, dtype=torch.bool)
    estimates_V = estimate_kl(logprobs_V, REF_LOGPROBS_V, everywhere, old_logprobs_V, estimator=estimator)
    expected = (old_logprobs_V.exp() * estimates_V).sum()
    (gradient_V,) = torch.autograd.grad(expected, logits_V)
    assert (expected.item() == pytest.approx(exact.item(), rel=1e-12)) == is_right
    assert torch.allclose(gradient_V, exact_V, atol=1e-12) == is_right


def test_the_unbiased_form_stays_finite():
    logprobs_T = torch.tensor([-1.0, -80.0], requires_grad=True)
    for ref, old in ((0.0, -1.0), (-90.0, -90.0), (0.0, -90.0)):
        values_T = estimate_kl(logprobs_T, torch.full((2,), ref), ALL, torch.full((2,), old), estimator="k3_unbiased")
        assert values_T.isfinite().all()
        assert torch.autograd.grad(values_T.sum(), logprobs_T)[0].isfinite().all()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_the_gradient_is_the_derivative_of_the_value(estimator):
    logprobs_T = torch.tensor([-1.0, -1.7], dtype=torch.float64, requires_grad=True)
    ref_logprobs_T = torch.tensor([-1.5, -1.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: estimate_kl(x, ref_logprobs_T, ALL, estimator=estimator), (logprobs_T,))


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_masked_tokens_and_far_policies_stay_finite(estimator):
    logprobs_T = torch.tensor([math.nan, -60.0, -0.1, -math.inf], requires_grad=True)
    ref_logprobs_T = torch.tensor([-1.0, -10.0, -50.1, math.nan])
    mask_T = torch.tensor([False, True, True, False])
    kl_T = estimate_kl(logprobs_T, ref_logprobs_T, mask_T, estimator=estimator)
    (gradient_T,) = torch.autograd.grad(kl_T.sum(), logprobs_T)
    assert kl_T.isfinite().all()
    assert kl_T.abs().max() <= 10.0
    assert gradient_T.isfinite().all()
    assert not kl_T[~mask_T].any()
    assert not gradient_T[~mask_T].any()


def test_penalty_is_the_coefficient_times_the_estimate_without_gradient():
    old_logprobs_T = torch.tensor([-1.0, -2.0], requires_grad=True)
    penalty_T = kl_penalty(old_logprobs_T, torch.tensor([-1.5, -1.0]), torch.tensor([True, False]), kl_coef=0.1)
    assert penalty_T.tolist() == pytest.approx([0.05, 0.0])
    assert not penalty_T.requires_grad


@pytest.mark.parametrize("estimator", ["k3+", "k3_unbiased"])
def test_penalty_refuses_a_form_that_differs_in_gradient_only(estimator):
    with pytest.raises(ConfigError, match=r"differs from 'k3' only in its gradient"):
        kl_penalty(torch.zeros(2), torch.zeros(2), ALL, kl_coef=0.1, estimator=estimator)


def test_the_error_for_an_unknown_estimator_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'k3'"):
        estimate_kl(torch.zeros(2), torch.zeros(2), ALL, estimator="k3x")


def test_the_adaptive_coefficient_equals_values_worked_by_hand():
    step = {"kl_target": 0.1, "horizon": 1000, "num_samples": 100}
    assert adaptive_kl_coef(1.0, 0.11, **step) == pytest.approx(1.01)  # error +10 %
    assert adaptive_kl_coef(1.0, 9.0, **step) == pytest.approx(1.02)  # error limited to +20 %
    assert adaptive_kl_coef(1.0, 0.0, **step) == pytest.approx(0.98)
    assert adaptive_kl_coef(1.0, 0.1, **step) == 1.0


@pytest.mark.parametrize("num_samples", [1000, 4000, 50_000])
def test_a_large_step_changes_the_adaptive_coefficient_by_a_fifth_at_most(num_samples):
    step = {"kl_target": 0.1, "horizon": 1000, "num_samples": num_samples}
    assert adaptive_kl_coef(1.0, 0.0, **step) == pytest.approx(0.8)
    assert adaptive_kl_coef(1.0, 9.0, **step) == pytest.approx(1.2)


def test_adaptive_coefficient_settles_where_the_kl_is_on_target():
    coef = 1.0
    for _ in range(4000):
        coef = adaptive_kl_coef(coef, 0.05 / coef, kl_target=0.1, horizon=1000, num_samples=100)
    assert 0.05 / coef == pytest.approx(0.1, rel=1e-3)


def test_adaptive_coefficient_refuses_an_impossible_target():
    with pytest.raises(ConfigError, match="kl_target"):
        adaptive_kl_coef(1.0, 0.1, kl_target=0.0, horizon=1000, num_samples=1)


@pytest.mark.parametrize("kl_coef", [-1.0, math.nan])
def test_a_penalty_that_would_reward_the_kl_is_refused(kl_coef: float):
    one_T = torch.zeros(1)
    with pytest.raises(ConfigError, match=f"kl_coef: {kl_coef} is not between 0 and inf"):
        kl_penalty(one_T, one_T, one_T.bool(), kl_coef=kl_coef)
