"""Policy losses that read the log-probs of the distribution from which the engine sampled (`rollout_logprobs_T`).

`rollout_is_loss` and `dppo_loss` read these instead of the old policy's log-probs, which then need not be computed;
`decoupled_ppo_loss` reads both. ρ_t = exp(logprobs_t − rollout_logprobs_t). See `losses` for the conventions of all
losses.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from rl_core.algorithms.checks import require_between
from rl_core.algorithms.losses import clipped_surrogate, ratio_metrics
from rl_core.algorithms.token_loss import TokenLoss, at_least_float32, log_ratio, masked, require_tokens
from rl_core.errors import ConfigError


def rollout_is_loss(
    logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    eps_clip_low: float = 0.2,
    eps_clip_high: float = 0.2,
) -> TokenLoss:
    """Importance sampling from the engine's distribution, without tokens on which trainer and engine disagree.

    loss_t = −ρ_t A_t where 1 − eps_clip_low < ρ_t < 1 + eps_clip_high, else 0.
    Source: IcePop's mask (Ling Team 2025, arXiv 2510.18855), applied to the ratio of the current policy to the engine's
    distribution.

    Args:
        logprobs_T: log-probs under the current policy; carries gradient.
        rollout_logprobs_T: log-probs in the distribution from which the engine sampled.
        advantages_T: advantage of each token, any range.
        mask_T: bool, the trained tokens.
        eps_clip_low: distance of the lower clip bound from 1, in [0, 1].
        eps_clip_high: distance of the upper clip bound from 1, >= 0.

    Returns:
        Loss [T]; metrics as `losses.ppo_clip_loss`.
    """
    require_between(0.0, 1.0, eps_clip_low=eps_clip_low)
    require_between(0.0, math.inf, eps_clip_high=eps_clip_high)
    require_tokens(mask_T, logprobs_T=logprobs_T, rollout_logprobs_T=rollout_logprobs_T, advantages_T=advantages_T)
    log_ratio_T = log_ratio(logprobs_T, rollout_logprobs_T, mask_T)
    ratio_T = log_ratio_T.exp()
    with torch.no_grad():
        outside_T = (ratio_T <= 1.0 - eps_clip_low) | (ratio_T >= 1.0 + eps_clip_high)
        outside_T &= mask_T
    return _kept(log_ratio_T, ratio_T, masked(advantages_T, mask_T), outside_T)


def dppo_loss(
    logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    dppo_type: Literal["binary_tv", "binary_kl"] = "binary_tv",
    delta_low: float = 0.2,
    delta_high: float = 0.2,
) -> TokenLoss:
    """The surrogate of PPO with a trust region that bounds a divergence instead of the ratio.

    The divergence is between the current policy and the engine's distribution, both reduced to two outcomes: the
    sampled token, or any other token.

    With p = exp(logprobs_t), q = exp(rollout_logprobs_t):
    D_t = |p − q| (binary_tv) or q log(q/p) + (1 − q) log((1 − q)/(1 − p)) (binary_kl);
    loss_t = 0 if the divergence exceeds its bound and an update would increase it further (A_t > 0, ρ_t > 1 and
    D_t > delta_high, or A_t < 0, ρ_t < 1 and D_t > delta_low), else −ρ_t A_t.
    Source: Qi et al. 2026 (DPPO), arXiv 2602.04879, Binary-TV and Binary-KL.

    Args:
        logprobs_T, rollout_logprobs_T, advantages_T, mask_T: as in `rollout_is_loss`; log-probs <= 0.
        dppo_type: 'binary_tv' or 'binary_kl'.
        delta_low, delta_high: >= 0; a probability (binary_tv), or nats (binary_kl).

    Returns:
        Loss [T]; metrics as `losses.ppo_clip_loss`, and divergence.
    """
    if dppo_type not in _DIVERGENCES:
        raise ConfigError(f"dppo_type: {dppo_type!r} is not one of {', '.join(_DIVERGENCES)}")
    require_between(0.0, math.inf, delta_low=delta_low, delta_high=delta_high)
    require_tokens(mask_T, logprobs_T=logprobs_T, rollout_logprobs_T=rollout_logprobs_T, advantages_T=advantages_T)
    log_ratio_T = log_ratio(logprobs_T, rollout_logprobs_T, mask_T)
    clean_T = masked(advantages_T, mask_T)
    with torch.no_grad():
        policies = (masked(at_least_float32(values_T), mask_T) for values_T in (logprobs_T, rollout_logprobs_T))
        divergence_T = _DIVERGENCES[dppo_type](*policies)
        up_T = (clean_T > 0) & (log_ratio_T > 0) & (divergence_T > delta_high)
        down_T = (clean_T < 0) & (log_ratio_T < 0) & (divergence_T > delta_low)
        outside_T = up_T.logical_or_(down_T)
    loss_T, metrics = _kept(log_ratio_T, log_ratio_T.exp(), clean_T, outside_T)
    return TokenLoss(loss_T, {**metrics, "divergence": divergence_T})


def decoupled_ppo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    eps_clip_low: float = 0.2,
    eps_clip_high: float = 0.2,
    behav_imp_weight_cap: float = 5.0,
) -> TokenLoss:
    """PPO clip relative to the proximal (old) policy, on samples of the behaviour (rollout) policy.

    loss_t = w_t · (PPO clip's loss relative to the old policy), with w_t = exp(old_logprobs_t − rollout_logprobs_t);
    loss_t = 0 where w_t > behav_imp_weight_cap.
    Source: Hilton et al. 2021, arXiv 2110.00641, section 3; for language models, with the cap: Fu et al. 2025 (AReaL),
    arXiv 2505.24298, section 5.2.

    Args:
        logprobs_T, old_logprobs_T, advantages_T, mask_T, eps_clip_low, eps_clip_high: as in `losses.ppo_clip_loss`.
        rollout_logprobs_T: log-probs in the distribution from which the engine sampled.
        behav_imp_weight_cap: > 0; tokens with a larger weight have no loss. `inf`: no cap.

    Returns:
        Loss [T]; metrics as `losses.ppo_clip_loss`, behaviour_weight and behaviour_capped_fraction.
    """
    if behav_imp_weight_cap <= 0:
        raise ConfigError(f"behav_imp_weight_cap: must be > 0, got {behav_imp_weight_cap}")
    require_tokens(
        mask_T,
        logprobs_T=logprobs_T,
        old_logprobs_T=old_logprobs_T,
        rollout_logprobs_T=rollout_logprobs_T,
        advantages_T=advantages_T,
    )
    with torch.no_grad():
        weight_T = log_ratio(old_logprobs_T, rollout_logprobs_T, mask_T).exp_()
        capped_T = weight_T > behav_imp_weight_cap
        weight_T.masked_fill_(capped_T, 0.0)
        weighted_T = masked(advantages_T, mask_T).mul_(weight_T)  # w >= 0, so min(w·a, w·b) = w·min(a, b)
    loss_T, metrics = clipped_surrogate(
        log_ratio(logprobs_T, old_logprobs_T, mask_T), weighted_T, eps_clip_low, eps_clip_high
    )
    return TokenLoss(loss_T, {**metrics, "behaviour_weight": weight_T, "behaviour_capped_fraction": capped_T})


def _kept(log_ratio_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, outside_T: Tensor) -> TokenLoss:
    loss_T = -advantages_T * ratio_T.masked_fill(outside_T, 0.0)
    return TokenLoss(loss_T, ratio_metrics(log_ratio_T, ratio_T, clip_fraction=outside_T))


def _binary_tv(logprobs_T: Tensor, rollout_logprobs_T: Tensor) -> Tensor:
    return logprobs_T.exp().sub_(rollout_logprobs_T.exp()).abs_()


def _binary_kl(logprobs_T: Tensor, rollout_logprobs_T: Tensor) -> Tensor:
    # If p rounds to 1, log(1 − p) is −inf. Log-probs of at most −eps (p at most 1 − eps) keep the divergence finite.
    highest = -torch.finfo(logprobs_T.dtype).eps
    p_T, q_T = logprobs_T.clamp(max=highest), rollout_logprobs_T.clamp(max=highest)
    rest_T = torch.log(-torch.expm1(q_T)) - torch.log(-torch.expm1(p_T))
    return q_T.exp() * (q_T - p_T) - torch.expm1(q_T) * rest_T


_DIVERGENCES = {"binary_tv": _binary_tv, "binary_kl": _binary_kl}
