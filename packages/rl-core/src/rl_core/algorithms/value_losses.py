"""The critic's loss. See `losses` for the conventions of all losses."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_core.algorithms.checks import require_between
from rl_core.algorithms.token_loss import TokenLoss, masked, require_tokens


def value_clip_loss(
    predicted_values_T: Tensor, values_T: Tensor, returns_T: Tensor, mask_T: Tensor, *, value_clip: float = 0.2
) -> TokenLoss:
    """The larger of two squared errors to the returns: the prediction's error, and the error of the prediction clipped
    to ±value_clip around the value at the start of the update.

    loss_t = ½ max((v_t − R_t)², (values_t + clip(v_t − values_t, ±value_clip) − R_t)²).
    Source: Engstrom et al. 2020, arXiv 2005.12729, section 3 (value function clipping of PPO's reference code).

    Args:
        predicted_values_T: values of the current critic; carries gradient.
        values_T: values of the critic at the start of the update.
        returns_T: the targets.
        mask_T: bool, the trained tokens; outside it inputs may be anything.
        value_clip: >= 0, in units of value.

    Returns:
        Loss [T]; metrics value_error (absolute) and value_clip_fraction.
    """
    require_between(0.0, math.inf, value_clip=value_clip)
    require_tokens(mask_T, predicted_values_T=predicted_values_T, values_T=values_T, returns_T=returns_T)
    error_T = masked(predicted_values_T - returns_T, mask_T)
    with torch.no_grad():
        moved_T = masked(predicted_values_T - values_T, mask_T)
        bounded_error_T = error_T - moved_T + moved_T.clamp(-value_clip, value_clip)
        # Within the bounds both errors are equal up to rounding, which must not remove a token's gradient.
        clipped_T = (moved_T.abs() > value_clip) & (bounded_error_T.abs() > error_T.abs())
    loss_T = 0.5 * torch.where(clipped_T, bounded_error_T, error_T).square()
    return TokenLoss(loss_T, {"value_error": error_T.detach().abs(), "value_clip_fraction": clipped_T})
