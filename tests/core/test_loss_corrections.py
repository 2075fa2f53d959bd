"""How correction weights reach a loss: as a declared parameter, or as factors of a loss that is proved to scale with
them."""

from __future__ import annotations

import math

import pytest
import torch

from rl_core.algorithms import Objective, TokenLoss, prepared_by, takes_corrections
from rl_core.errors import PluginError
from rl_core.interfaces import LossSpec
from rl_core.rank_kit.objectives import objective_from_spec
from tests.core.test_objective import LOSSES

REFUSING = {"dpo", "reward_model", "cross_entropy", "decoupled_ppo", "dppo", "rollout_is", "value_clip"}
"""Losses that refuse correction weights: they correct by themselves or have no advantages."""


def mini_batch(seed: int = 0, num_tokens: int = 60):
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(num_tokens, generator=generator, dtype=torch.float64)

    old_T = -0.2 - noise(1.0).abs()
    columns = {
        "old_logprobs": old_T,
        "advantages": noise(1.0),
        "old_entropies": noise(1.0).abs(),
        "loss_mask": torch.rand(num_tokens, generator=generator) < 0.8,
        "loss_weights": noise(1.0).abs(),
        "correction_weights": noise(1.0).abs().clamp(max=2.0),
    }
    sequence_T = torch.arange(4).repeat_interleave(num_tokens // 4)
    return columns, old_T + noise(0.3), sequence_T


def token_losses(objective: Objective, columns, logprobs_T, sequence_T, seed=0) -> torch.Tensor:
    """The loss of each token: the gradient of the loss with respect to the token's weight."""
    columns = {**columns, **objective.prepare(columns, sequence_T, seed=seed)}
    columns["loss_weights"] = columns["loss_weights"].clone().requires_grad_()
    loss, _ = objective(columns, sequence_T=sequence_T, logprobs_T=logprobs_T)
    return torch.autograd.grad(loss, columns["loss_weights"])[0]


@pytest.mark.parametrize("name", LOSSES)
def test_weights_scale_the_loss_of_every_token_or_are_refused(name):
    objective = objective_from_spec(LossSpec(name=name))
    assert objective.corrections == (
        "refuses" if name in REFUSING else "reads" if name in ("dro", "kl_cov") else "scales"
    )
    if objective.corrections == "refuses":
        return
    columns, logprobs_T, sequence_T = mini_batch()
    weights_T = columns.pop("correction_weights")
    plain_T = token_losses(objective, columns, logprobs_T, sequence_T)
    weighted_T = token_losses(objective, {**columns, "correction_weights": weights_T}, logprobs_T, sequence_T)
    # Float64 throughout; only the order of the factors differs.
    torch.testing.assert_close(weighted_T, weights_T * plain_T, rtol=1e-12, atol=1e-12)
    assert not torch.equal(weighted_T, plain_T)


def covariance_choice(name: str, columns, settings) -> set[int]:
    """Positions of the tokens that verl's `clip_cov` or `kl_cov` chooses by the covariance with these advantages."""
    trained = columns["loss_mask"].nonzero().squeeze(1).tolist()
    old, advantages = columns["old_logprobs"].tolist(), columns["advantages"].tolist()
    mean_logprob = sum(old[t] for t in trained) / len(trained)
    mean_advantage = sum(advantages[t] for t in trained) / len(trained)
    covariance = {t: (old[t] - mean_logprob) * (advantages[t] - mean_advantage) for t in trained}
    if name == "kl_cov":
        count = max(1, int(settings["kl_cov_frac"] * len(trained)))
        return set(sorted(trained, key=lambda t: covariance[t])[-count:])
    # clip_ratio=1.0 clips all candidates, so the random draw has no effect
    return {t for t in trained if settings["clip_cov_lb"] < covariance[t] < settings["clip_cov_ub"]}


def verl_losses(name: str, columns, logprobs_T, settings) -> list[float]:
    """verl's `clip_cov` and `kl_cov` with `rollout_is_weights`, token by token: covariances use the unweighted
    advantages, and the weights multiply the resulting loss."""
    old, new, advantages, weights = (
        v.tolist() for v in (columns["old_logprobs"], logprobs_T, columns["advantages"], columns["correction_weights"])
    )
    chosen = covariance_choice(name, columns, settings)
    losses = [0.0] * len(old)
    for t in columns["loss_mask"].nonzero().squeeze(1).tolist():
        ratio = math.exp(new[t] - old[t])
        if name == "kl_cov":
            loss = -advantages[t] * ratio + (settings["ppo_kl_coef"] * abs(new[t] - old[t]) if t in chosen else 0.0)
        else:
            loss = max(-advantages[t] * ratio, -advantages[t] * min(max(ratio, 0.8), 1.2))
            loss *= t not in chosen
        losses[t] = weights[t] * loss
    return losses


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("kl_cov", {"kl_cov_frac": 0.2, "ppo_kl_coef": 0.7}),
        ("clip_cov", {"clip_ratio": 1.0, "clip_cov_lb": 0.3, "clip_cov_ub": 1.5}),
    ],
)
def test_covariance_losses_under_a_correction_equal_those_of_verl(name, settings):
    columns, logprobs_T, sequence_T = mini_batch(seed=3)
    objective = objective_from_spec(LossSpec(name=name, params=settings))
    actual_T = token_losses(objective, columns, logprobs_T, sequence_T)
    expected = verl_losses(name, columns, logprobs_T, settings)
    assert actual_T.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    # Negative control: advantages multiplied by the weights would choose other tokens.
    scaled = {**columns, "advantages": columns["advantages"] * columns["correction_weights"]}
    assert covariance_choice(name, scaled, settings) != covariance_choice(name, columns, settings)


def test_correction_weights_are_one_without_a_correction():
    columns, _, sequence_T = mini_batch()
    del columns["correction_weights"]
    made = objective_from_spec(LossSpec(name="kl_cov")).prepare(columns, sequence_T, seed=0)
    assert made["correction_weights"].tolist() == [1.0] * 60


def with_penalty(logprobs_T, old_logprobs_T, advantages_T):
    return TokenLoss(-advantages_T * logprobs_T + 0.1 * (logprobs_T - old_logprobs_T).square(), {})


def of_the_mean(logprobs_T, advantages_T):
    return TokenLoss(-advantages_T.mean() * logprobs_T, {})


def bounded(logprobs_T, advantages_T):
    return TokenLoss(-advantages_T.clamp(-5.0, 5.0) * logprobs_T, {})


@pytest.mark.parametrize("loss", [with_penalty, of_the_mean, bounded])
def test_a_loss_that_weights_do_not_scale_is_detected(loss):
    """In each of these losses, a weight on a token's advantage does not multiply the token's loss."""
    objective = Objective(loss)
    objective.try_out()
    assert objective.corrections == "unknown"

    def declared(**columns):
        return loss(**columns)

    declared.__dict__.update(__wrapped__=loss)
    with pytest.raises(PluginError, match=r"declares that .* scale it.*let it read correction_weights_T"):
        Objective(takes_corrections("scales")(declared)).try_out()


def test_a_loss_may_read_the_weights_itself():
    def loss(logprobs_T, old_logprobs_T, advantages_T, correction_weights_T):
        return TokenLoss(correction_weights_T * with_penalty(logprobs_T, old_logprobs_T, advantages_T).loss_T, {})

    objective = Objective(loss)
    objective.try_out()
    assert objective.corrections == "reads"
    columns, logprobs_T, sequence_T = mini_batch()
    weights_T = columns["correction_weights"]
    expected_T = weights_T * with_penalty(logprobs_T, columns["old_logprobs"], columns["advantages"]).loss_T
    actual_T = token_losses(objective, columns, logprobs_T, sequence_T)
    torch.testing.assert_close(actual_T, torch.where(columns["loss_mask"], expected_T, 0.0))


def test_a_prepare_function_may_read_the_weights_itself():
    def heavy(correction_weights_T, advantages_T):
        return {"x_heavy": correction_weights_T * advantages_T > 0.5, "x_weight": correction_weights_T}

    @prepared_by(heavy)
    def loss(logprobs_T, advantages_T, x_heavy_T, x_weight_T):
        return TokenLoss(-x_weight_T * advantages_T * logprobs_T * x_heavy_T, {})

    objective = Objective(loss)
    objective.try_out()
    assert objective.corrections == "reads"
    columns, _, sequence_T = mini_batch()
    made = objective.prepare(columns, sequence_T, seed=0)
    wanted_T = columns["correction_weights"] * columns["advantages"] > 0.5
    assert torch.equal(made["x_heavy"][columns["loss_mask"]], wanted_T[columns["loss_mask"]])


def test_choosing_by_advantages_needs_a_declaration():
    def best(advantages_T):
        return {"x_best": advantages_T > 0}

    @prepared_by(best)
    def loss(logprobs_T, advantages_T, x_best_T):
        return TokenLoss(-advantages_T * logprobs_T * x_best_T, {})

    assert Objective(loss).corrections == "unknown"
    assert Objective(takes_corrections("refuses")(loss)).corrections == "refuses"
    scaled = Objective(takes_corrections("scales")(loss))
    scaled.try_out()
    assert scaled.corrections == "scales"


def test_a_declaration_that_the_parameters_contradict_is_refused():
    @takes_corrections("reads")
    def loss(logprobs_T, advantages_T):
        return TokenLoss(-advantages_T * logprobs_T, {})

    with pytest.raises(PluginError, match=r"loss: declares corrections 'reads', but has no parameter"):
        Objective(loss)
