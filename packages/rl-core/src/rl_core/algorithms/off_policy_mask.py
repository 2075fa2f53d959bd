"""Masks sequences with negative advantage that have become unlikely, so that their probability is not reduced
further."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_core.algorithms.checks import require_between
from rl_core.algorithms.token_loss import masked, mean_over_sequence, require_tokens


@torch.no_grad()
def off_policy_sequence_mask(
    logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    *,
    delta: float,
) -> Tensor:
    """Marks the tokens that keep their policy loss: those with advantage >= 0, and those in a sequence that is still
    likely.

    M_t = 0 where A_t < 0 and mean over the sequence's trained tokens of (rollout_logprobs − logprobs) > delta, else 1.
    The mean estimates KL(sampling policy ‖ current policy) in nats per token. M changes during an update as the current
    policy changes. M multiplies only the policy loss; KL, entropy and denominators stay the same.
    Source: DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv 2512.02556, section 3.1 (off-policy sequence masking).

    Args:
        logprobs_T: log-probs under the current policy.
        rollout_logprobs_T: log-probs in the distribution from which the engine sampled. Tokens whose log-prob is not
            finite are left out of the mean.
        advantages_T: advantage of each token, any range; only the sign is used.
        mask_T: bool, the trained tokens.
        sequence_T: int64, non-decreasing index of the sequence that each token belongs to.
        delta: largest mean difference at which a sequence still counts as likely, >= 0, in nats per token.

    Returns:
        bool [T]: true for the tokens that keep their policy loss, and for all tokens outside `mask_T`.

    Raises:
        ShapeError: lengths or dtypes do not fit.
        ConfigError: `delta` is negative.
    """
    require_between(0.0, float("inf"), delta=delta)
    require_tokens(
        mask_T,
        logprobs_T=logprobs_T,
        rollout_logprobs_T=rollout_logprobs_T,
        advantages_T=advantages_T,
        sequence_T=sequence_T,
    )
    distance_T = rollout_logprobs_T - logprobs_T
    known_T = mask_T & rollout_logprobs_T.isfinite()
    is_far_T = mean_over_sequence(masked(distance_T, known_T), known_T, sequence_T) > delta
    return ~(is_far_T & (advantages_T < 0) & mask_T)
