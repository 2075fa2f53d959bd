"""Policy losses of single tokens: pure functions of log-probs, one value per token, no reduction.

r_t = exp(logprobs_t − old_logprobs_t) is the probability ratio of the current policy to the policy at the start of the
update, and A_t the advantage. Conventions of all losses in this package:

- `mask_T` (bool) marks the trained tokens. At other tokens, inputs may be anything, and loss and gradient are 0.
- Log-ratios (of a token, or in `sequence_losses` the mean over a sequence) are clamped to ±20
  (`token_loss.LOG_RATIO_LIMIT`) before `exp`. Log-ratios beyond this limit have no gradient.
- Positional parameters are columns of the batch, bound by name (see `objective`). Keyword-only parameters are settings.
  If `trainer.algorithm` has a key for a setting, the key has the same name.
- Only scores of the current model carry gradient. Log-ratios of 16-bit log-probs are computed in float32.
- A loss raises ShapeError if lengths differ, if the mask is not bool, or if a column other than the current model's
  scores carries gradient. It raises ConfigError if a setting is out of range.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from rl_core.algorithms.checks import require_between
from rl_core.algorithms.token_loss import (
    TokenLoss,
    chooses_columns,
    difference,
    log_ratio,
    masked,
    require_tokens,
    takes_corrections,
)
from rl_core.errors import ConfigError


def ppo_clip_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    eps_clip_low: float = 0.2,
    eps_clip_high: float = 0.2,
) -> TokenLoss:
    """PPO's clipped surrogate, with separate lower and upper bounds.

    loss_t = −min(r_t A_t, clip(r_t, 1 − eps_clip_low, 1 + eps_clip_high) A_t).
    Source: Schulman et al. 2017, arXiv 1707.06347, eq. 7; two bounds: Yu et al. 2025 (DAPO), arXiv 2503.14476, eq. 10.

    Args:
        logprobs_T: log-probs under the current policy; carries gradient.
        old_logprobs_T: log-probs under the policy at the start of the update.
        advantages_T: advantage of each token, any range.
        mask_T: bool, the trained tokens.
        eps_clip_low: distance of the lower clip bound from 1, in [0, 1].
        eps_clip_high: distance of the upper clip bound from 1, >= 0.

    Returns:
        Loss [T]; metrics ratio, clip_fraction and approx_kl (the k3 estimate of KL(old ‖ current)).
    """
    require_tokens(mask_T, logprobs_T=logprobs_T, old_logprobs_T=old_logprobs_T, advantages_T=advantages_T)
    log_ratio_T = log_ratio(logprobs_T, old_logprobs_T, mask_T)
    return clipped_surrogate(log_ratio_T, masked(advantages_T, mask_T), eps_clip_low, eps_clip_high)


def dual_clip_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    eps_clip_low: float = 0.2,
    eps_clip_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> TokenLoss:
    """PPO's clipped surrogate with an additional bound on the loss of tokens with negative advantage.

    loss_t = PPO clip's loss where A_t >= 0, else min(PPO clip's loss, −clip_ratio_c · A_t).
    Source: Ye et al. 2020, arXiv 1912.09729, eq. 5.

    Args:
        logprobs_T, old_logprobs_T, advantages_T, mask_T, eps_clip_low, eps_clip_high: as in `ppo_clip_loss`.
        clip_ratio_c: >= 1, the largest ratio at which a token with negative advantage has a gradient.

    Returns:
        Loss [T]; metrics as `ppo_clip_loss`, and dual_clip_fraction.
    """
    require_between(1.0, math.inf, clip_ratio_c=clip_ratio_c)
    loss_T, metrics = ppo_clip_loss(
        logprobs_T, old_logprobs_T, advantages_T, mask_T, eps_clip_low=eps_clip_low, eps_clip_high=eps_clip_high
    )
    with torch.no_grad():
        bound_T = masked(advantages_T, mask_T).mul_(-clip_ratio_c)
        bounded_T = (bound_T > 0) & (loss_T > bound_T)
    return TokenLoss(torch.where(bounded_T, bound_T, loss_T), {**metrics, "dual_clip_fraction": bounded_T})


def _cispo_columns(*, cispo_anchor: str = "old") -> tuple[str, ...]:
    if cispo_anchor not in ("old", "rollout"):
        raise ConfigError(f"cispo_anchor: {cispo_anchor!r} is neither 'old' nor 'rollout'")
    return (f"{cispo_anchor}_logprobs_T",)


@chooses_columns(_cispo_columns)
def cispo_loss(
    logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    old_logprobs_T: Tensor | None = None,
    rollout_logprobs_T: Tensor | None = None,
    *,
    cispo_eps_clip_low: float = 1.0,
    cispo_eps_clip_high: float = 4.0,
    cispo_anchor: Literal["old", "rollout"] = "old",
) -> TokenLoss:
    """REINFORCE weighted by a clipped ratio. Clipping bounds a token's weight, but does not remove its gradient.

    loss_t = −stop_gradient(clip(ρ_t, 1 − cispo_eps_clip_low, 1 + cispo_eps_clip_high)) · A_t · logprobs_t,
    ρ_t = exp(logprobs_t − anchor_t).
    Source: MiniMax 2025 (MiniMax-M1), arXiv 2506.13585, eq. 4 and 5.

    Args:
        logprobs_T, advantages_T, mask_T: as in `ppo_clip_loss`.
        old_logprobs_T: log-probs under the policy at the start of the update; read only if `cispo_anchor` is 'old'.
        rollout_logprobs_T: log-probs in the distribution from which the engine sampled; read only if `cispo_anchor` is
            'rollout'.
        cispo_eps_clip_low: in [0, 1]; 1 leaves the ratio without a lower bound.
        cispo_eps_clip_high: >= 0.
        cispo_anchor: 'old' or 'rollout', the log-probs in the ratio's denominator.

    Returns:
        Loss [T]; metrics ratio (ρ), clip_fraction (of the tokens whose ratio the clip changes) and approx_kl (the k3
        estimate of KL(anchor ‖ current)).
    """
    require_between(0.0, 1.0, cispo_eps_clip_low=cispo_eps_clip_low)
    require_between(0.0, math.inf, cispo_eps_clip_high=cispo_eps_clip_high)
    (anchor,) = _cispo_columns(cispo_anchor=cispo_anchor)
    anchor_T = old_logprobs_T if anchor == "old_logprobs_T" else rollout_logprobs_T
    if anchor_T is None:
        raise ConfigError(f"cispo_loss: cispo_anchor={cispo_anchor!r} needs {anchor}, got None")
    require_tokens(mask_T, logprobs_T=logprobs_T, advantages_T=advantages_T, **{anchor: anchor_T})
    with torch.no_grad():
        log_ratio_T = log_ratio(logprobs_T, anchor_T, mask_T)
        ratio_T = log_ratio_T.exp()
        weight_T = ratio_T.clamp(1.0 - cispo_eps_clip_low, 1.0 + cispo_eps_clip_high)
        metrics = ratio_metrics(log_ratio_T, ratio_T, clip_fraction=weight_T != ratio_T)
        weight_T.mul_(masked(advantages_T, mask_T)).neg_()
    return TokenLoss(weight_T * masked(logprobs_T, mask_T), metrics)


def sapo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> TokenLoss:
    """The surrogate of PPO with a smooth gate in place of the hard clip. The gradient with respect to the ratio is
    largest at 1 and decreases in both directions.

    loss_t = −A_t · σ(τ (r_t − 1)) · 4 / τ, with τ = tau_pos where A_t > 0, else tau_neg. At r_t = 1 the gradient is
    the same as PPO's. The gradient with respect to log-probs has the further factor r_t, so it is largest at a ratio
    above 1 (2.1 for τ = 1).
    Source: Gao et al. 2025 (SAPO), arXiv 2511.20347, eq. 5 and 6.

    Args:
        logprobs_T, old_logprobs_T, advantages_T, mask_T: as in `ppo_clip_loss`.
        tau_pos, tau_neg: > 0; with a larger value, the gradient decreases faster.

    Returns:
        Loss [T]; metrics ratio and approx_kl, and gate_fraction: the fraction of the gradient that the gate removes.
    """
    if not (tau_pos > 0 and tau_neg > 0):
        raise ConfigError(f"tau_pos and tau_neg must be > 0, got {tau_pos} and {tau_neg}")
    require_tokens(mask_T, logprobs_T=logprobs_T, old_logprobs_T=old_logprobs_T, advantages_T=advantages_T)
    log_ratio_T = log_ratio(logprobs_T, old_logprobs_T, mask_T)
    ratio_T = log_ratio_T.exp()
    with torch.no_grad():
        clean_T = masked(advantages_T, mask_T)
        tau_T = torch.full_like(ratio_T, tau_neg).masked_fill_(clean_T > 0, tau_pos)
        scale_T = clean_T.mul_(-4.0).div_(tau_T)
    gate_T = torch.sigmoid((ratio_T - 1.0) * tau_T)
    with torch.no_grad():
        faded_T = 1.0 - 4.0 * gate_T * (1.0 - gate_T)
    return TokenLoss(gate_T * scale_T, ratio_metrics(log_ratio_T, ratio_T, gate_fraction=faded_T))


def importance_sampling_loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor
) -> TokenLoss:
    """The unclipped surrogate: the policy gradient, importance-weighted for samples of the old policy.

    loss_t = −r_t A_t.
    Source: Schulman et al. 2017, arXiv 1707.06347, eq. 6 (conservative policy iteration).

    Args:
        logprobs_T, old_logprobs_T, advantages_T, mask_T: as in `ppo_clip_loss`.

    Returns:
        Loss [T]; metrics ratio and approx_kl.
    """
    require_tokens(mask_T, logprobs_T=logprobs_T, old_logprobs_T=old_logprobs_T, advantages_T=advantages_T)
    log_ratio_T = log_ratio(logprobs_T, old_logprobs_T, mask_T)
    ratio_T = log_ratio_T.exp()
    return TokenLoss(-masked(advantages_T, mask_T) * ratio_T, ratio_metrics(log_ratio_T, ratio_T))


@takes_corrections("reads")
def dro_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    correction_weights_T: Tensor | None = None,
    *,
    dro_beta: float = 0.05,
) -> TokenLoss:
    """Direct reward optimisation: the policy gradient without a ratio, plus a quadratic penalty on log r.

    loss_t = w_t · (−A_t · logprobs_t + ½ dro_beta · (log r_t)²). log r_t is not clamped, so that the penalty also has a
    gradient for tokens far from the old policy.
    Source: Richemond et al. 2024, arXiv 2405.19107, eq. 6. The gradient of the paper's loss, ½ (A − dro_beta · log r)²,
    is dro_beta times the gradient of the form above. verl's and Tinker's `dro` use the form above too.

    Args:
        logprobs_T, old_logprobs_T, advantages_T, mask_T: as in `ppo_clip_loss`.
        correction_weights_T: w, the weights of an off-policy correction; None: 1.
        dro_beta: >= 0, coefficient of the penalty.

    Returns:
        Loss [T]; metrics ratio and approx_kl.
    """
    require_between(0.0, math.inf, dro_beta=dro_beta)
    require_tokens(mask_T, logprobs_T=logprobs_T, old_logprobs_T=old_logprobs_T, advantages_T=advantages_T)
    difference_T = masked(difference(logprobs_T, old_logprobs_T), mask_T)
    loss_T = 0.5 * dro_beta * difference_T.square() - masked(advantages_T, mask_T) * masked(logprobs_T, mask_T)
    if correction_weights_T is not None:
        require_tokens(mask_T, correction_weights_T=correction_weights_T)
        loss_T = loss_T * masked(correction_weights_T, mask_T)
    with torch.no_grad():
        log_ratio_T = log_ratio(logprobs_T, old_logprobs_T, mask_T)
        metrics = ratio_metrics(log_ratio_T, log_ratio_T.exp())
    return TokenLoss(loss_T, metrics)


def reinforce_loss(logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor) -> TokenLoss:
    """The plain policy gradient. It is correct only for one optimizer step per batch, on samples of the current policy.

    loss_t = −A_t · logprobs_t.
    Source: Williams 1992, "Simple statistical gradient-following algorithms", eq. 4.

    Args:
        logprobs_T, advantages_T, mask_T: as in `ppo_clip_loss`.

    Returns:
        Loss [T]; no metrics.
    """
    require_tokens(mask_T, logprobs_T=logprobs_T, advantages_T=advantages_T)
    return TokenLoss(-masked(advantages_T, mask_T) * masked(logprobs_T, mask_T), {})


def cross_entropy_loss(logprobs_T: Tensor, mask_T: Tensor) -> TokenLoss:
    """The negative log-likelihood of the trained tokens, for supervised fine-tuning. It uses no advantages.

    loss_t = −logprobs_t.

    Args:
        logprobs_T: log-probs under the current policy; carries gradient.
        mask_T: bool, the trained tokens.

    Returns:
        Loss [T]; no metrics.
    """
    require_tokens(mask_T, logprobs_T=logprobs_T)
    return TokenLoss(-masked(logprobs_T, mask_T), {})


def clipped_surrogate(
    log_ratio_T: Tensor, advantages_T: Tensor, eps_clip_low: float, eps_clip_high: float
) -> TokenLoss:
    """Computes PPO's clipped surrogate from log-ratios of tokens or sequences. Both tensors must be 0 outside the
    mask."""
    require_between(0.0, 1.0, eps_clip_low=eps_clip_low)
    require_between(0.0, math.inf, eps_clip_high=eps_clip_high)
    ratio_T = log_ratio_T.exp()
    with torch.no_grad():
        bounded_T = ratio_T.clamp(1.0 - eps_clip_low, 1.0 + eps_clip_high)
        # The clipped term is the minimum where the advantage has already pushed the ratio beyond its bound.
        clipped_T = (ratio_T - bounded_T).mul_(advantages_T) > 0
    loss_T = -advantages_T * torch.where(clipped_T, bounded_T, ratio_T)
    return TokenLoss(loss_T, ratio_metrics(log_ratio_T, ratio_T, clip_fraction=clipped_T))


def ratio_metrics(log_ratio_T: Tensor, ratio_T: Tensor, **others_T: Tensor) -> dict[str, Tensor]:
    """The metrics ratio and approx_kl (r − 1 − log r, the k3 estimate of KL(anchor ‖ current)), and the given ones."""
    with torch.no_grad():
        approx_kl_T = torch.expm1(log_ratio_T).sub_(log_ratio_T)
    return {"ratio": ratio_T.detach(), "approx_kl": approx_kl_T, **others_T}
