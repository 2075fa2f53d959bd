"""Policy losses that select tokens by comparing them with all other tokens of the mini-batch.

See `losses` for the conventions of all losses.

Each loss has a `prepare` function (`token_loss.prepared_by`), which selects the tokens. It runs on the controller, once
per mini-batch, on log-probs and entropies from the start of the update. So the selection depends neither on how the
mini-batch is split nor on the progress of the update.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_core.algorithms.checks import require_between
from rl_core.algorithms.losses import ppo_clip_loss, ratio_metrics
from rl_core.algorithms.token_loss import (
    TokenLoss,
    log_ratio,
    masked,
    prepared_by,
    require_tokens,
    takes_corrections,
)


def clip_cov_columns(
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    clip_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    seed: int = 0,
) -> dict[str, Tensor]:
    """The `prepare` function of `clip_cov_loss`. Returns `x_cov_clipped`, which marks the tokens whose gradient is
    removed.

    Draws max(1, floor(clip_ratio · trained tokens)) tokens without replacement from the tokens whose covariance is
    strictly between clip_cov_lb and clip_cov_ub, or all of these if there are fewer. The draw depends on the seed and
    on the order of the tokens in the mini-batch.
    """
    require_between(0.0, 1.0, clip_ratio=clip_ratio)
    covariances_T = token_covariances(old_logprobs_T, advantages_T, mask_T)
    candidates_C = (mask_T & (covariances_T > clip_cov_lb) & (covariances_T < clip_cov_ub)).nonzero().squeeze(-1)
    generator = torch.Generator().manual_seed(seed)
    order_C = torch.randperm(candidates_C.numel(), generator=generator).to(candidates_C.device)
    clipped_T = torch.zeros_like(mask_T)
    clipped_T[candidates_C[order_C[: _num_selected(clip_ratio, mask_T)]]] = True
    return {"x_cov_clipped": clipped_T}


@takes_corrections("scales")
@prepared_by(clip_cov_columns)
def clip_cov_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    x_cov_clipped_T: Tensor,
    *,
    eps_clip_low: float = 0.2,
    eps_clip_high: float = 0.2,
) -> TokenLoss:
    """PPO clip without the gradient of a few tokens whose log-prob and advantage covary strongly, because updates of
    these tokens reduce the entropy.

    loss_t = 0 at the selected tokens (`clip_cov_columns`), else PPO clip's loss.
    Source: Cui et al. 2025, arXiv 2505.22617, section 4 (Clip-Cov), there with the covariance under the current policy.

    Args:
        logprobs_T, old_logprobs_T, advantages_T, mask_T, eps_clip_low, eps_clip_high: as in `losses.ppo_clip_loss`.
        x_cov_clipped_T: bool, computed by `clip_cov_columns` from advantages without correction weights.
        clip_ratio: fraction of the trained tokens to select, in [0, 1] (setting of `clip_cov_columns`).
        clip_cov_lb, clip_cov_ub: range of covariances to select from (settings of `clip_cov_columns`).

    Returns:
        Loss [T]; metrics as `losses.ppo_clip_loss`, and cov_fraction.
    """
    require_tokens(mask_T, x_cov_clipped_T=x_cov_clipped_T)
    loss_T, metrics = ppo_clip_loss(
        logprobs_T, old_logprobs_T, advantages_T, mask_T, eps_clip_low=eps_clip_low, eps_clip_high=eps_clip_high
    )
    return TokenLoss(loss_T.masked_fill(x_cov_clipped_T, 0.0), {**metrics, "cov_fraction": x_cov_clipped_T})


def kl_cov_columns(
    old_logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor, *, kl_cov_frac: float = 0.2
) -> dict[str, Tensor]:
    """The `prepare` function of `kl_cov_loss`. Returns `x_cov_top`, which marks the tokens with the largest covariance.

    It marks max(1, floor(kl_cov_frac · trained tokens)) tokens.
    """
    require_between(0.0, 1.0, kl_cov_frac=kl_cov_frac)
    covariances_T = token_covariances(old_logprobs_T, advantages_T, mask_T)
    return {"x_cov_top": _largest(covariances_T, mask_T, _num_selected(kl_cov_frac, mask_T))}


@takes_corrections("reads")
@prepared_by(kl_cov_columns)
def kl_cov_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    x_cov_top_T: Tensor,
    correction_weights_T: Tensor | None = None,
    *,
    ppo_kl_coef: float = 1.0,
) -> TokenLoss:
    """The unclipped surrogate, with a penalty on changes of the log-probs of tokens whose log-prob and advantage covary
    most.

    loss_t = w_t · (−r_t A_t), plus w_t · ppo_kl_coef · |log r_t| at the selected tokens (`kl_cov_columns`).
    Source: Cui et al. 2025, arXiv 2505.22617, section 4 (KL-Cov), there with the covariance under the current policy;
    w scales the penalty too, as in verl's `kl_cov`.

    Args:
        logprobs_T, old_logprobs_T, advantages_T, mask_T: as in `losses.ppo_clip_loss`.
        x_cov_top_T: bool, computed by `kl_cov_columns` from advantages without correction weights.
        correction_weights_T: w, the weights of an off-policy correction; None: 1.
        ppo_kl_coef: coefficient of the penalty, >= 0.
        kl_cov_frac: fraction of the trained tokens to select, in [0, 1] (setting of `kl_cov_columns`); the paper uses
            0.0002 to 0.002.

    Returns:
        Loss [T]; metrics ratio, approx_kl, cov_fraction.
    """
    require_between(0.0, math.inf, ppo_kl_coef=ppo_kl_coef)
    require_tokens(
        mask_T,
        logprobs_T=logprobs_T,
        old_logprobs_T=old_logprobs_T,
        advantages_T=advantages_T,
        x_cov_top_T=x_cov_top_T,
    )
    log_ratio_T = log_ratio(logprobs_T, old_logprobs_T, mask_T)
    ratio_T = log_ratio_T.exp()
    penalty_T = ppo_kl_coef * masked(log_ratio_T.abs(), x_cov_top_T)
    loss_T = penalty_T - masked(advantages_T, mask_T) * ratio_T
    if correction_weights_T is not None:
        require_tokens(mask_T, correction_weights_T=correction_weights_T)
        loss_T = loss_T * masked(correction_weights_T, mask_T)
    return TokenLoss(loss_T, ratio_metrics(log_ratio_T, ratio_T, cov_fraction=x_cov_top_T))


def top_entropy_columns(
    old_entropies_T: Tensor, mask_T: Tensor, *, top_entropy_fraction: float = 0.2
) -> dict[str, Tensor]:
    """The `prepare` function of `top_entropy_loss`. Returns `x_top_entropy`, the result of `top_entropy_mask`."""
    return {"x_top_entropy": top_entropy_mask(old_entropies_T, mask_T, top_entropy_fraction=top_entropy_fraction)}


@prepared_by(top_entropy_columns)
def top_entropy_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    x_top_entropy_T: Tensor,
    *,
    eps_clip_low: float = 0.2,
    eps_clip_high: float = 0.2,
) -> TokenLoss:
    """PPO's clipped surrogate for the tokens with the highest entropy. All other tokens have no loss, but still count
    in the denominator.

    loss_t = PPO clip's loss at the selected tokens (`top_entropy_mask`), else 0.
    Source: Wang et al. 2025, "Beyond the 80/20 rule", arXiv 2506.01939, section 5.

    Args:
        logprobs_T, old_logprobs_T, advantages_T, mask_T, eps_clip_low, eps_clip_high: as in `losses.ppo_clip_loss`.
        x_top_entropy_T: bool, computed by `top_entropy_columns`.
        top_entropy_fraction: fraction of the trained tokens to keep, in [0, 1] (setting of `top_entropy_columns`).

    Returns:
        Loss [T]; metrics as `losses.ppo_clip_loss`, and top_entropy_fraction.
    """
    require_tokens(mask_T, x_top_entropy_T=x_top_entropy_T)
    loss_T, metrics = ppo_clip_loss(
        logprobs_T, old_logprobs_T, advantages_T, mask_T, eps_clip_low=eps_clip_low, eps_clip_high=eps_clip_high
    )
    return TokenLoss(masked(loss_T, x_top_entropy_T), {**metrics, "top_entropy_fraction": x_top_entropy_T})


def top_entropy_mask(entropies_T: Tensor, mask_T: Tensor, *, top_entropy_fraction: float = 0.2) -> Tensor:
    """The max(1, floor(top_entropy_fraction · trained tokens)) trained tokens with the highest entropy.

    Source: Wang et al. 2025, arXiv 2506.01939, section 5 (there the top 20%).

    Args:
        entropies_T: nats; may be anything outside the mask.
        mask_T: bool, the trained tokens.
        top_entropy_fraction: in [0, 1].

    Returns:
        bool [T]. If several tokens have the same entropy at the threshold, `torch.topk` decides which of them are
        selected.
    """
    require_between(0.0, 1.0, top_entropy_fraction=top_entropy_fraction)
    require_tokens(mask_T, entropies_T=entropies_T)
    return _largest(entropies_T, mask_T, _num_selected(top_entropy_fraction, mask_T))


def token_covariances(logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor) -> Tensor:
    """(logprob_t − mean logprob) · (A_t − mean A), with means over the trained tokens; float64 [T], 0 outside the mask.

    Source: Cui et al. 2025, arXiv 2505.22617, section 4 (token-wise centred cross product).
    """
    require_tokens(mask_T, logprobs_T=logprobs_T, advantages_T=advantages_T)
    count = mask_T.sum().clamp(min=1)

    def centred(values_T: Tensor) -> Tensor:
        clean_T = masked(values_T.double(), mask_T)
        return clean_T - clean_T.sum() / count

    return masked(centred(logprobs_T) * centred(advantages_T), mask_T)


def _num_selected(fraction: float, mask_T: Tensor) -> int:
    return max(1, int(fraction * int(mask_T.sum())))


def _largest(values_T: Tensor, mask_T: Tensor, count: int) -> Tensor:
    index_M = mask_T.nonzero().squeeze(-1)
    top_K = values_T[index_M].topk(min(count, index_M.numel()), sorted=False).indices
    chosen_T = torch.zeros_like(mask_T)
    chosen_T[index_M[top_K]] = True
    return chosen_T
