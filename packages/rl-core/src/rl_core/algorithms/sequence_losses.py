"""Policy losses with the ratio of a whole sequence. See `losses` for the conventions of all losses.

`sequence_T` defines the sequences; only their trained tokens are used. With the reduction `sequence_mean`, the weighted
sum of the losses is the negative of the papers' objective. The clamp to ±20 before `exp` applies to a sequence's mean
log-ratio, not to the log-ratio of each token, so that outlier tokens affect the mean as in the papers. A clamped mean
has no gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_core.algorithms.checks import require_between
from rl_core.algorithms.losses import clipped_surrogate, ratio_metrics
from rl_core.algorithms.token_loss import (
    LOG_RATIO_LIMIT,
    TokenLoss,
    difference,
    masked,
    mean_over_sequence,
    require_tokens,
)


def gspo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    *,
    eps_clip_low: float = 3e-4,
    eps_clip_high: float = 4e-4,
) -> TokenLoss:
    """PPO's clipped surrogate with one ratio per sequence, so that each sequence is clipped as a whole.

    s_i = exp(clamp(mean over the trained tokens of sequence i of (logprobs_t − old_logprobs_t), ±20));
    loss_t = −min(s_i A_t, clip(s_i, 1 − eps_clip_low, 1 + eps_clip_high) A_t).
    Source: Zheng et al. 2025 (GSPO), arXiv 2507.18071, eq. 5 and 7; the default bounds are from section 5.

    Args:
        logprobs_T, old_logprobs_T, mask_T: as in `losses.ppo_clip_loss`.
        advantages_T: advantage of each token, any range; meant to be equal within a sequence.
        sequence_T: int64, non-decreasing index of the sequence that each token belongs to.
        eps_clip_low: distance of the lower clip bound from 1, in [0, 1]. Useful values are small, because sequence
            ratios are much closer to 1 than token ratios.
        eps_clip_high: distance of the upper clip bound from 1, >= 0.

    Returns:
        Loss [T]; metrics as `losses.ppo_clip_loss`, for the sequence's ratio.
    """
    log_ratio_T = _token_log_ratio(logprobs_T, old_logprobs_T, advantages_T, mask_T, sequence_T)
    mean_T = _clamped_mean(log_ratio_T, mask_T, sequence_T)
    return clipped_surrogate(mean_T, masked(advantages_T, mask_T), eps_clip_low, eps_clip_high)


def gspo_token_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    *,
    eps_clip_low: float = 3e-4,
    eps_clip_high: float = 4e-4,
) -> TokenLoss:
    """GSPO for advantages that differ within a sequence: the ratio has the sequence's value and the token's gradient.

    s_t = stop_gradient(s_i) · exp(logprobs_t − stop_gradient(logprobs_t)) replaces s_i of `gspo_loss`. If advantages
    and weights are equal within each sequence, value and gradient equal those of `gspo_loss`.
    Source: Zheng et al. 2025 (GSPO), arXiv 2507.18071, eq. 13 and 14.

    Args:
        logprobs_T, old_logprobs_T, mask_T, sequence_T, eps_clip_low, eps_clip_high: as in `gspo_loss`.
        advantages_T: advantage of each token; any range, may differ within a sequence.

    Returns:
        Loss [T]; metrics as `gspo_loss`.
    """
    log_ratio_T = _token_log_ratio(logprobs_T, old_logprobs_T, advantages_T, mask_T, sequence_T)
    mean_T = _clamped_mean(log_ratio_T.detach(), mask_T, sequence_T)
    own_T = masked(log_ratio_T, mean_T.abs() < LOG_RATIO_LIMIT)
    return clipped_surrogate(
        mean_T + (own_T - own_T.detach()), masked(advantages_T, mask_T), eps_clip_low, eps_clip_high
    )


def gmpo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    *,
    gmpo_log_clip_low: float = 0.4,
    gmpo_log_clip_high: float = 0.4,
) -> TokenLoss:
    """A policy gradient weighted by the geometric mean of a sequence's clipped token ratios. Outliers affect this mean
    less than the arithmetic mean.

    d_t = min(log r_t, gmpo_log_clip_high) where A_t > 0, max(log r_t, −gmpo_log_clip_low) where A_t < 0;
    loss_t = −A_t · exp(clamp(mean of d over the trained tokens of the sequence, ±20)).
    Source: Zhao et al. 2025 (GMPO), arXiv 2507.20673, section 3 (tokens clipped before the mean); bounds e^±0.4.

    Args:
        logprobs_T, old_logprobs_T, mask_T, sequence_T: as in `gspo_loss`.
        advantages_T: advantage of each token, any range; meant to be equal within a sequence.
        gmpo_log_clip_low, gmpo_log_clip_high: >= 0, bounds of log r.

    Returns:
        Loss [T]; metrics as `losses.ppo_clip_loss`: ratio and approx_kl of the sequence's geometric mean, and the
        fraction of clipped tokens.
    """
    require_between(0.0, math.inf, gmpo_log_clip_low=gmpo_log_clip_low, gmpo_log_clip_high=gmpo_log_clip_high)
    log_ratio_T = _token_log_ratio(logprobs_T, old_logprobs_T, advantages_T, mask_T, sequence_T)
    clean_T = masked(advantages_T, mask_T)
    with torch.no_grad():
        bounded_T = log_ratio_T.clamp(-gmpo_log_clip_low, gmpo_log_clip_high)
        clipped_T = (log_ratio_T - bounded_T).mul_(clean_T) > 0
    mean_T = _clamped_mean(torch.where(clipped_T, bounded_T, log_ratio_T), mask_T, sequence_T)
    ratio_T = mean_T.exp()
    return TokenLoss(-clean_T * ratio_T, ratio_metrics(mean_T, ratio_T, clip_fraction=clipped_T))


def _token_log_ratio(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor, sequence_T: Tensor
) -> Tensor:
    require_tokens(
        mask_T,
        logprobs_T=logprobs_T,
        old_logprobs_T=old_logprobs_T,
        advantages_T=advantages_T,
        sequence_T=sequence_T,
    )
    # An infinite log-ratio becomes the largest float: otherwise, later differences would be NaN.
    log_ratio_T = masked(difference(logprobs_T, old_logprobs_T), mask_T)
    largest = torch.finfo(log_ratio_T.dtype).max
    return log_ratio_T.clamp(-largest, largest)


def _clamped_mean(log_ratio_T: Tensor, mask_T: Tensor, sequence_T: Tensor) -> Tensor:
    """For each trained token, its sequence's mean log-ratio, clamped to ±LOG_RATIO_LIMIT; 0 outside the mask."""
    mean_T = masked(mean_over_sequence(log_ratio_T, mask_T, sequence_T), mask_T)
    return mean_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
