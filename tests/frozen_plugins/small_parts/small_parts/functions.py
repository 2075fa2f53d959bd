"""A policy loss and an advantage estimator."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_core.algorithms import TokenLoss, group_mean


def tilted_loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor, *, tilt: float = 0.1
) -> TokenLoss:
    """−ratio · advantage, plus `tilt` times the squared log-ratio."""
    log_ratio_T = torch.where(mask_T, logprobs_T - old_logprobs_T, 0.0)
    ratio_T = log_ratio_T.exp()
    return TokenLoss(tilt * log_ratio_T.square() - ratio_T * advantages_T, {"ratio": ratio_T.detach()})


def best_of_group_advantages(scores_N: Tensor, group_N: Tensor, *, scale: float) -> Tensor:
    """Score minus its prompt's mean score, times `scale`."""
    mean_N, _ = group_mean(scores_N, group_N)
    return scale * (scores_N - mean_N).float()
