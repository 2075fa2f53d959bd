"""The numbers of docs/algorithms.md that other programs report differently. The other side of each example is that
program's formula, written out with Python floats or torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_core.algorithms import (
    dppo_loss,
    grpo_advantages,
    prompt_mean,
    reinforce_plus_plus_advantages,
    rollout_is_loss,
    seq_mean_token_sum_norm,
    sequence_mean,
    whiten,
)
from rl_core.batch import Batch
from rl_core.trainer.update.batch_advantages import with_advantages, with_normalized_advantages

P, Q = 0.5, 0.45
"""Probabilities of a token under the current policy and in the engine's distribution."""
LOSSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "rollout_is": (rollout_is_loss, {}),
    "dppo, tv": (dppo_loss, {}),
    "dppo, kl": (dppo_loss, {"dppo_type": "binary_kl"}),
}


def loss_and_slope(loss: Any, params: dict[str, Any], p: float, q: float, advantage: float) -> tuple[float, float]:
    """The loss of one token, and its derivative with respect to the token's log-prob."""
    logprobs_T = torch.tensor([math.log(p)], dtype=torch.float64, requires_grad=True)
    rest = (torch.tensor([math.log(q)], dtype=torch.float64), torch.tensor([advantage]), torch.tensor([True]))
    loss_T = loss(logprobs_T, *rest, **params).loss_T
    (slope_T,) = torch.autograd.grad(loss_T.sum(), logprobs_T)
    return loss_T.item(), slope_T.item()


def value_and_slope_with_a_constant_ratio(p: float, q: float, advantage: float) -> tuple[float, float]:
    """−sg(ρ)·A·log p, as in SkyRL and verl."""
    logprob = torch.tensor(math.log(p), dtype=torch.float64, requires_grad=True)
    loss = -(p / q) * advantage * logprob
    (slope,) = torch.autograd.grad(loss, logprob)
    return loss.item(), slope.item()


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_has_another_value_than_with_a_constant_ratio_but_the_same_gradient(name: str):
    loss, params = LOSSES[name]
    value, slope = loss_and_slope(loss, params, P, Q, 1.0)
    other_value, other_slope = value_and_slope_with_a_constant_ratio(P, Q, 1.0)
    assert value == pytest.approx(-1.111, abs=5e-4)
    assert other_value == pytest.approx(0.770, abs=5e-4)
    assert slope == pytest.approx(other_slope) == pytest.approx(-P / Q)


def test_dppo_does_not_truncate_the_ratio():
    """verl truncates it at 20. At p = 0.211 and p > 20·q, the token is masked if its advantage is positive."""
    assert loss_and_slope(dppo_loss, {}, 0.1, 0.004, 1.0)[1] == pytest.approx(-25.0)
    assert loss_and_slope(dppo_loss, {}, 0.211, 0.211 / 20.1, 1.0)[1] == 0.0


def test_normalisation_divides_by_n_and_grpo_by_n_minus_1():
    values_T, mask_T = torch.tensor([1.0, -1.0, 1.0, -1.0]), torch.ones(4, dtype=torch.bool)
    assert whiten(values_T, mask_T).tolist() == pytest.approx([1.0, -1.0, 1.0, -1.0])
    over_n_minus_1_T = values_T / values_T.std(correction=1)
    assert over_n_minus_1_T.tolist() == pytest.approx([0.866, -0.866, 0.866, -0.866], abs=5e-4)
    assert math.sqrt(10_000 / 9_999) == pytest.approx(1.00005, abs=1e-6)
    assert whiten(torch.tensor([3.0]), torch.tensor([True])).tolist() == [0.0]
    assert grpo_advantages(values_T, torch.zeros(4, dtype=torch.int64)).tolist() == pytest.approx(
        over_n_minus_1_T.tolist(), rel=1e-5
    )


SEQUENCE = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 2])
TRAINED = SEQUENCE < 2


def weights_if_masked_rows_count(divisor_T: Tensor) -> list[float]:
    """A weight of 1/divisor for each trained token, with the mean over all three rows."""
    return (TRAINED / (3 * divisor_T)).tolist()


def test_a_sequence_without_a_trained_token_counts_in_no_denominator():
    tokens_T = torch.tensor([2.0, 4.0, 3.0])[SEQUENCE]
    assert sequence_mean(TRAINED, SEQUENCE).tolist() == [0.25] * 2 + [0.125] * 4 + [0.0] * 3
    assert weights_if_masked_rows_count(tokens_T)[::2][:2] == pytest.approx([0.167, 0.083], abs=5e-4)
    constant = seq_mean_token_sum_norm(TRAINED, SEQUENCE, max_seq_len=10)
    assert constant.tolist() == pytest.approx([0.05] * 6 + [0.0] * 3)
    assert weights_if_masked_rows_count(torch.full((9,), 10.0))[0] == pytest.approx(1 / 30)
    alone = prompt_mean(TRAINED, SEQUENCE, torch.tensor([0, 0, 1]))
    assert alone.tolist() == pytest.approx([1 / 6] * 6 + [0.0] * 3), "the masked prompt does not count"


def test_a_sample_without_a_trained_token_counts_in_baselines_and_in_the_estimators_normalisation():
    rows = [
        {
            "tokens": [1, 2],
            "sampled": [0, 1],
            "loss_mask": [0, is_trained],
            "rewards": [0.0, reward],
            "group_id": 0,
            "trajectory_id": i,
            "step_index": 0,
            "is_last_step": True,
        }
        for i, (reward, is_trained) in enumerate([(1.0, 1), (0.0, 1), (0.5, 0), (2.5, 0)])
    ]
    batch = Batch.from_sequences(rows)
    sampled_T = batch["sampled"]
    centred = with_advantages(batch, grpo_advantages, {"grpo_norm_by_std": False})
    assert centred["advantages"][sampled_T].tolist() == [0.0, -1.0, -0.5, 1.5]
    whitened = with_advantages(batch, reinforce_plus_plus_advantages, {})["advantages"][sampled_T]
    assert float(whitened.mean()) == pytest.approx(0.0, abs=1e-6)
    trained = with_normalized_advantages(centred)["advantages"][sampled_T]
    assert trained.tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-6)
