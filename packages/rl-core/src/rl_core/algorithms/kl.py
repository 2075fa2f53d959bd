"""Estimates KL(policy ‖ reference) per token from the log-probs of sampled tokens, and adapts the KL coefficient.

Use `estimate_kl` in the loss: its result carries a gradient. Use `kl_penalty` in the reward: its result does not.

On samples of the current policy, the values of `k2`, `abs`, `k2+` and `abs+` are biased; all others are unbiased. The
gradient is an unbiased estimate of the KL's gradient only for `k2`, for the forms with the suffix `+` (they use the
gradient of `k2`) and for `k3_unbiased`. On samples of an older policy, only `k3_unbiased` has an unbiased value and
gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_core.algorithms.checks import require_between
from rl_core.algorithms.token_loss import log_ratio, require_tokens
from rl_core.errors import ConfigError, nearest

KL_LIMIT = 10.0
"""The estimate of a token's KL (for `k3_unbiased`, its factor k3) is clamped to ± this value, in nats. Beyond this
limit, only the `+` forms and `k3_unbiased` (through its ratio) have a gradient. This gradient ends where a log-ratio
reaches its own limit (`token_loss.LOG_RATIO_LIMIT`)."""

KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+", "k3_unbiased")
UNBIASED = "k3_unbiased"
"""The estimator that also reads `old_logprobs`, as the log-probs of the policy that sampled the tokens."""


def estimate_kl(
    logprobs_T: Tensor,
    ref_logprobs_T: Tensor,
    mask_T: Tensor,
    old_logprobs_T: Tensor | None = None,
    *,
    estimator: str = "k3",
) -> Tensor:
    """An estimate of KL(policy ‖ reference) at each token.

    With d = logprobs − ref_logprobs, clamped to ±LOG_RATIO_LIMIT:
    k1 = d, k2 = d²/2, k3 = exp(−d) − 1 + d, and abs = |d|, each clamped to ±KL_LIMIT.
    With the suffix `+`, the value is the same as without it, and the gradient is the gradient of d²/2: d · ∇logprobs.
    k3_unbiased = r · k3 with r = exp(logprobs − old_logprobs). The log-ratio in r is clamped to ±LOG_RATIO_LIMIT and k3
    to ±KL_LIMIT, but the product r · k3 is not clamped; r carries gradient.
    Source: Schulman 2020, "Approximating KL divergence" (k1, k2, k3); their gradients: Tang & Munos 2025, arXiv
    2506.09477; k3_unbiased: DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv 2512.02556, section 3.1.

    Args:
        logprobs_T: log-probs under the current policy; carries gradient.
        ref_logprobs_T: log-probs under the reference policy.
        mask_T: bool; outside it inputs may be anything.
        old_logprobs_T: log-probs under the policy that sampled the tokens; only `k3_unbiased` reads them. None: the
            current policy sampled the tokens, so that r is 1 but still has a gradient.
        estimator: one of KL_ESTIMATORS.

    Returns:
        Nats [T]; 0 outside the mask.

    Raises:
        ConfigError: unknown estimator.
        ShapeError: lengths differ, the mask is not bool, or another argument than `logprobs_T` carries gradient.
    """
    require_tokens(mask_T, logprobs_T=logprobs_T, ref_logprobs_T=ref_logprobs_T)
    require_kl_estimator(estimator)
    difference_T = log_ratio(logprobs_T, ref_logprobs_T, mask_T)
    if estimator == UNBIASED:
        old_logprobs_T = logprobs_T.detach() if old_logprobs_T is None else old_logprobs_T
        require_tokens(mask_T, old_logprobs_T=old_logprobs_T)
        ratio_T = log_ratio(logprobs_T, old_logprobs_T, mask_T).exp()
        return ratio_T * _ESTIMATES["k3"](difference_T).clamp(-KL_LIMIT, KL_LIMIT)
    if not estimator.endswith("+"):
        return _ESTIMATES[estimator](difference_T).clamp(-KL_LIMIT, KL_LIMIT)
    with torch.no_grad():
        value_T = _ESTIMATES[estimator[:-1]](difference_T).clamp(-KL_LIMIT, KL_LIMIT)
    square_T = 0.5 * difference_T.square()
    return value_T + (square_T - square_T.detach())


def kl_penalty(
    old_logprobs_T: Tensor, ref_logprobs_T: Tensor, mask_T: Tensor, *, kl_coef: float, estimator: str = "k1"
) -> Tensor:
    """The KL penalty that is subtracted from each token's reward: kl_coef · KL[t], without gradient.

    Source: Ziegler et al. 2019, arXiv 1909.08593, equation 2 (there k1).

    Args:
        old_logprobs_T: log-probs under the policy at the start of the update.
        ref_logprobs_T: log-probs under the reference policy.
        mask_T: bool, the sampled tokens.
        kl_coef: coefficient of the penalty, >= 0.
        estimator: k1, k2, k3 or abs. The others differ from these only in the gradient, so they are refused.

    Returns:
        Penalty [T] in units of reward; 0 outside the mask.

    Raises:
        ConfigError: the estimator is unknown, or is for the loss only; or `kl_coef` is negative or NaN.
        ShapeError: lengths differ, or the mask is not bool.
    """
    require_between(0.0, math.inf, kl_coef=kl_coef)
    if estimator.endswith("+") or estimator == UNBIASED:
        plain = estimator.removesuffix("+").removesuffix("_unbiased")
        raise ConfigError(
            f"kl_penalty: {estimator!r} differs from {plain!r} only in its gradient; use {plain!r} in rewards"
        )
    with torch.no_grad():
        return kl_coef * estimate_kl(old_logprobs_T, ref_logprobs_T, mask_T, estimator=estimator)


def adaptive_kl_coef(
    kl_coef: float, observed_kl: float, *, kl_target: float, horizon: float, num_samples: int
) -> float:
    """The KL coefficient of the next step, adapted so that the KL approaches its target.

    kl_coef · (1 + clip(observed_kl / kl_target − 1, −0.2, 0.2) · min(1, num_samples / horizon)).
    Source: Ziegler et al. 2019, arXiv 1909.08593, section 2.2, without the minimum. Without it, a step of more than
    5 · horizon samples could make the coefficient negative, which would reward a large KL.

    Args:
        kl_coef: coefficient of this step, >= 0; 0 stays 0.
        observed_kl: mean KL of this step, with the estimator and unit of the target.
        kl_target: KL to approach, > 0.
        horizon: number of samples after which the largest (clipped) error has changed the coefficient by 20%, > 0.
        num_samples: number of samples of this step.

    Raises:
        ConfigError: kl_target or horizon is not positive.
    """
    if kl_target <= 0 or horizon <= 0:
        raise ConfigError(f"adaptive_kl_coef: kl_target and horizon must be > 0, got {kl_target} and {horizon}")
    error = min(max(observed_kl / kl_target - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + error * min(1.0, num_samples / horizon))


def require_kl_estimator(estimator: str) -> None:
    """Raises ConfigError for a name that is not in KL_ESTIMATORS."""
    if estimator not in KL_ESTIMATORS:
        known = ", ".join(KL_ESTIMATORS)
        raise ConfigError(f"{estimator!r} is not a KL estimator ({known}).{nearest(estimator, KL_ESTIMATORS)}")


_ESTIMATES = {
    "k1": lambda difference_T: difference_T,
    "k2": lambda difference_T: 0.5 * difference_T.square(),
    # expm1 keeps k3 accurate for nearly equal policies.
    "k3": lambda difference_T: torch.expm1(-difference_T) + difference_T,
    "abs": lambda difference_T: difference_T.abs(),
}
