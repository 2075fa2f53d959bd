"""Off-policy corrections for the mismatch between the trainer's old log-probs and those of the engine that sampled.

Both are log-probs of the same tokens, but the engine's kernels and precision differ and its weights may be older, so
the samples come from a slightly different distribution. With log-ratio d_t = old_t − rollout_t, exp(d_t) is a token's
importance ratio. Over a sequence's trained tokens, exp(sum d) is the sequence's ratio, and exp(mean d) the geometric
mean of its token ratios.

Truncation keeps a token with a bounded weight. A mask drops a token from the loss and, because loss weights are
computed from the returned mask, also from the denominator. A token whose engine log-prob is missing (NaN) or not finite
has no ratio and is dropped too. If the trainer's own log-prob is NaN, the token is kept, and a truncated weight is
NaN: the loss becomes NaN, which shows the fault. Ratios are compared and truncated in log space, so a ratio with an
upper bound cannot overflow. `rollout_log_ratios` and `off_policy_correction` return tensors without a gradient.

There are three kinds of log-ratio, all [T]: the token's (`rollout_log_ratios`), its sequence's (`sequence_log_ratios`)
and the mean over its sequence (`geometric_log_ratios`). Three functions take any of them: `truncated_ratios`,
`masked_ratios`, `ratio_mask`.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rl_core.algorithms.checks import require_bool, require_floating, require_ordered, require_same_length
from rl_core.algorithms.groups import sequence_sum
from rl_core.errors import ConfigError, nearest

_MAX_METRIC_LOG_RATIO = 20.0


class OffPolicyCorrection(NamedTuple):
    """Result of a correction."""

    weights_T: Tensor
    """Factor of each token's policy loss, without gradient, in the old log-probs' dtype; 0 outside `loss_mask_T`."""
    loss_mask_T: Tensor
    """bool, the remaining loss mask, from which loss weights are computed."""
    metrics: dict[str, tuple[float, float]]
    """Name → (sum, weight). The docstring of `off_policy_correction` lists the names."""


class LogRatios(NamedTuple):
    """Log-ratios, and the tokens that have one."""

    log_ratios_T: Tensor
    """old − rollout, without gradient; 0 outside `loss_mask_T`."""
    loss_mask_T: Tensor
    """bool, the trained tokens with a finite engine log-prob."""


@torch.no_grad()
def off_policy_correction(
    old_logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    loss_mask_T: Tensor,
    sequence_T: Tensor,
    *,
    tis_ratio_type: Literal["token", "sequence"] | None = None,
    token_tis_ratio_clip_high: float = 2.0,
    sequence_tis_ratio_clip_high: float = 5.0,
    sequence_mask_metric: Literal["geometric", "product"] | None = None,
    geo_mask_high: float = 1.01,
    geo_mask_low: float = 0.99,
    product_mask_high: float = 2.0,
    product_mask_low: float = 0.5,
    outlier_token_is_threshold_low: float | None = None,
    outlier_token_is_threshold_high: float | None = None,
    token_mask_is_threshold_low: float | None = None,
    token_mask_is_threshold_high: float | None = None,
) -> OffPolicyCorrection:
    """Applies the selected corrections in this order. Each step uses the mask of the previous one.

    0. drops tokens without a finite engine log-prob from the mask
    1. drops outliers: sequences with any token ratio outside the outlier thresholds (`outlier_sequence_mask`)
    2. drops tokens with a ratio outside the token thresholds (`ratio_mask`)
    3. sets weights: min(ratio, cap), with the ratio of the token or of the sequence (`tis_ratio_type`,
       `truncated_ratios`); 1 if `tis_ratio_type` is None
    4. drops sequences whose geometric mean or product of ratios (`sequence_mask_metric`) is out of bounds

    Values equal to a bound are kept. The parameters are the keys of `trainer.algorithm.off_policy_correction`; None,
    where it is the default, disables a step or a bound. For masked importance sampling, use step 2 together with token
    ratios in step 3, or the product in step 4 together with sequence ratios in step 3. In both cases, the cap must not
    be below the mask's upper bound. Empty tensors are accepted, so that settings can be checked before a run.

    Metrics, each a pair (sum, weight). The weight counts the tokens or sequences named at the end of the line:
        off_policy/logprob_diff: |d|, over the trained tokens with a finite engine log-prob
        off_policy/ratio: exp(d) with d clamped to ±20, over the same tokens
        off_policy/missing_tokens: tokens that step 0 dropped, of the trained tokens
        off_policy/outlier_sequences: sequences that step 1 dropped, of those that step 0 kept
        off_policy/masked_tokens: tokens that step 2 dropped, of those that step 1 kept
        off_policy/truncated_tokens: tokens whose ratio in step 3 exceeded the cap, of those that step 2 kept
        off_policy/masked_sequences: sequences that step 4 dropped, of those that step 2 kept
        off_policy/kept_tokens: remaining tokens, of the trained tokens

    Args:
        old_logprobs_T: log-probs under the trainer's policy at the start of the update.
        rollout_logprobs_T: log-probs in the distribution from which the engine sampled; NaN where it returned none.
        loss_mask_T: bool, the trained tokens.
        sequence_T: int64, non-decreasing index of the sequence that each token belongs to.

    Returns:
        OffPolicyCorrection.

    Raises:
        ShapeError: lengths or dtypes do not fit, or `sequence_T` decreases somewhere.
        ConfigError: an unknown `tis_ratio_type` or `sequence_mask_metric`, only one of the two token thresholds, or
            bounds between which no ratio lies.
    """
    _require_choice("tis_ratio_type", tis_ratio_type, ("token", "sequence"))
    _require_choice("sequence_mask_metric", sequence_mask_metric, ("geometric", "product"))
    if (token_mask_is_threshold_low is None) != (token_mask_is_threshold_high is None):
        raise ConfigError("token_mask_is_threshold_low, token_mask_is_threshold_high: one is set; set both or neither")
    _log_bounds(None, token_tis_ratio_clip_high, "token_tis_ratio_clip_high")
    _log_bounds(None, sequence_tis_ratio_clip_high, "sequence_tis_ratio_clip_high")
    _log_bounds(geo_mask_low, geo_mask_high, "geo_mask_low, geo_mask_high")
    _log_bounds(product_mask_low, product_mask_high, "product_mask_low, product_mask_high")
    thresholds = (outlier_token_is_threshold_low, outlier_token_is_threshold_high)
    _log_bounds(*thresholds, "outlier_token_is_threshold_low, outlier_token_is_threshold_high")
    thresholds = (token_mask_is_threshold_low, token_mask_is_threshold_high)
    _log_bounds(*thresholds, "token_mask_is_threshold_low, token_mask_is_threshold_high")

    log_ratios_T, known_T = rollout_log_ratios(old_logprobs_T, rollout_logprobs_T, loss_mask_T)
    inlier_T = outlier_sequence_mask(
        log_ratios_T,
        known_T,
        sequence_T,
        low=outlier_token_is_threshold_low,
        high=outlier_token_is_threshold_high,
    )
    token_T = ratio_mask(log_ratios_T, inlier_T, low=token_mask_is_threshold_low, high=token_mask_is_threshold_high)
    weight_log_ratios_T, cap = torch.zeros_like(log_ratios_T), math.inf
    if tis_ratio_type == "token":
        weight_log_ratios_T, cap = log_ratios_T, token_tis_ratio_clip_high
    elif tis_ratio_type == "sequence":
        weight_log_ratios_T = sequence_log_ratios(log_ratios_T, token_T, sequence_T)
        cap = sequence_tis_ratio_clip_high
    kept_T = token_T
    if sequence_mask_metric == "geometric":
        geometric_T = geometric_log_ratios(log_ratios_T, token_T, sequence_T)
        kept_T = ratio_mask(geometric_T, token_T, low=geo_mask_low, high=geo_mask_high)
    elif sequence_mask_metric == "product":
        product_T = sequence_log_ratios(log_ratios_T, token_T, sequence_T)
        kept_T = ratio_mask(product_T, token_T, low=product_mask_low, high=product_mask_high)

    weights_T = truncated_ratios(weight_log_ratios_T, kept_T, high=cap)
    truncated_T = token_T & (weight_log_ratios_T > math.log(cap))
    num_known = _count(known_T)
    clamped_T = log_ratios_T.clamp(-_MAX_METRIC_LOG_RATIO, _MAX_METRIC_LOG_RATIO)
    metrics = {
        "off_policy/logprob_diff": (float(log_ratios_T.abs().sum()), num_known),
        "off_policy/ratio": (float((clamped_T.exp() * known_T).sum()), num_known),
        "off_policy/missing_tokens": _dropped(loss_mask_T, known_T),
        "off_policy/outlier_sequences": _dropped_sequences(known_T, inlier_T, sequence_T),
        "off_policy/masked_tokens": _dropped(inlier_T, token_T),
        "off_policy/truncated_tokens": (_count(truncated_T), _count(token_T)),
        "off_policy/masked_sequences": _dropped_sequences(token_T, kept_T, sequence_T),
        "off_policy/kept_tokens": (_count(kept_T), _count(loss_mask_T)),
    }
    return OffPolicyCorrection(weights_T, kept_T, metrics)


@torch.no_grad()
def rollout_log_ratios(old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, loss_mask_T: Tensor) -> LogRatios:
    """The trainer's log-prob minus the engine's, for trained tokens with a finite engine log-prob.

    d_t = old_t − rollout_t.

    Args:
        old_logprobs_T: log-probs under the trainer's policy at the start of the update.
        rollout_logprobs_T: log-probs in the distribution from which the engine sampled; NaN where it returned none.
        loss_mask_T: bool, the trained tokens; log-probs of other tokens may be anything.

    Returns:
        LogRatios [T].

    Raises:
        ShapeError: lengths or dtypes do not fit.
    """
    require_same_length(old_logprobs_T=old_logprobs_T, rollout_logprobs_T=rollout_logprobs_T, loss_mask_T=loss_mask_T)
    require_floating(old_logprobs_T=old_logprobs_T, rollout_logprobs_T=rollout_logprobs_T)
    require_bool(loss_mask_T=loss_mask_T)
    known_T = loss_mask_T & rollout_logprobs_T.isfinite()
    return LogRatios(torch.where(known_T, old_logprobs_T - rollout_logprobs_T, 0.0), known_T)


def sequence_log_ratios(log_ratios_T: Tensor, loss_mask_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Log-ratio of each token's whole sequence: the sum of d over the sequence's tokens in the mask.

    Args:
        log_ratios_T: d of each token.
        loss_mask_T: bool, the tokens that count.
        sequence_T: int64, non-decreasing index of the sequence that each token belongs to.

    Returns:
        [T] in the dtype of `log_ratios_T`, equal within a sequence; 0 for a sequence without a token in the mask.

    Raises:
        ShapeError: lengths or dtypes do not fit, or `sequence_T` decreases somewhere.
    """
    _require_stream(log_ratios_T, loss_mask_T, sequence_T)
    sums_S = sequence_sum(torch.where(loss_mask_T, log_ratios_T, 0.0), sequence_T)
    return sums_S.to(log_ratios_T.dtype)[sequence_T]


def geometric_log_ratios(log_ratios_T: Tensor, loss_mask_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Log of the geometric mean ratio of each token's sequence: the mean of d over the sequence's tokens in the mask.

    Args, Returns and Raises as for `sequence_log_ratios`.
    """
    _require_stream(log_ratios_T, loss_mask_T, sequence_T)
    sums_S = sequence_sum(torch.where(loss_mask_T, log_ratios_T, 0.0), sequence_T)
    tokens_S = sequence_sum(loss_mask_T, sequence_T)
    return (sums_S / tokens_S.clamp(min=1)).to(log_ratios_T.dtype)[sequence_T]


def truncated_ratios(log_ratios_T: Tensor, loss_mask_T: Tensor, *, high: float) -> Tensor:
    """Truncated importance sampling: w_t = min(exp(d_t), high) on tokens in the mask, 0 elsewhere.

    Source: Ionides 2008 (truncated importance sampling); between engine and trainer: Yao et al. 2025, "Your efficient
    RL framework secretly brings you off-policy RL training".

    Args:
        log_ratios_T: d of each token, or of its sequence (`sequence_log_ratios`).
        loss_mask_T: bool, the tokens that count.
        high: the cap, above 0.

    Returns:
        Weights [T] in the dtype of `log_ratios_T`, in [0, high].

    Raises:
        ShapeError: lengths or dtypes do not fit.
        ConfigError: the cap is not above 0.
    """
    _require_stream(log_ratios_T, loss_mask_T)
    _, log_high = _log_bounds(None, high)
    return torch.where(loss_mask_T, log_ratios_T.clamp(max=log_high).exp(), 0.0)


def masked_ratios(
    log_ratios_T: Tensor, loss_mask_T: Tensor, *, low: float | None = None, high: float | None = None
) -> Tensor:
    """Masked importance sampling: w_t = exp(d_t) where low <= exp(d_t) <= high, else 0.

    Source: Liu et al. 2025, "When speed kills stability"; with both bounds on tokens: IcePop, Ling Team 2025,
    arXiv 2510.18855.

    Args:
        log_ratios_T: d of each token, or of its sequence (`sequence_log_ratios`).
        loss_mask_T: bool, the tokens that count.
        low: lowest ratio that is kept, at least 0; None for no bound.
        high: highest ratio that is kept; None for no bound.

    Returns:
        Weights [T] in the dtype of `log_ratios_T`; 0 outside the mask.

    Raises:
        ShapeError: lengths or dtypes do not fit.
        ConfigError: no ratio lies within the bounds.
    """
    kept_T = ratio_mask(log_ratios_T, loss_mask_T, low=low, high=high)
    return torch.where(kept_T, log_ratios_T.exp(), 0.0)


def ratio_mask(
    log_ratios_T: Tensor, loss_mask_T: Tensor, *, low: float | None = None, high: float | None = None
) -> Tensor:
    """The tokens in the mask with low <= exp(d_t) <= high.

    With token ratios, this is IcePop's mask (Ling Team 2025, arXiv 2510.18855); with sequence ratios or geometric means
    of ratios, it is one of the sequence masks of Liu et al. 2025, "When speed kills stability".

    Args:
        log_ratios_T: d of each token, of its sequence, or the mean over its sequence.
        loss_mask_T: bool, the tokens that count.
        low: lowest ratio that is kept, at least 0; None for no bound.
        high: highest ratio that is kept; None for no bound.

    Returns:
        bool [T], a subset of `loss_mask_T`.

    Raises:
        ShapeError: lengths or dtypes do not fit.
        ConfigError: no ratio lies within the bounds.
    """
    _require_stream(log_ratios_T, loss_mask_T)
    log_low, log_high = _log_bounds(low, high)
    return loss_mask_T & ~((log_ratios_T < log_low) | (log_ratios_T > log_high))


def outlier_sequence_mask(
    log_ratios_T: Tensor,
    loss_mask_T: Tensor,
    sequence_T: Tensor,
    *,
    low: float | None = None,
    high: float | None = None,
) -> Tensor:
    """The tokens in the mask whose sequence has low <= exp(d_t) <= high for all of its tokens in the mask.

    An extreme token ratio indicates that engine and trainer computed on different inputs (a broken cache, a wrong
    position), so the whole sequence is unreliable.
    Source: Liu et al. 2025, "When speed kills stability" (token veto).

    Args:
        log_ratios_T: d of each token.
        loss_mask_T: bool, the tokens that count.
        sequence_T: int64, non-decreasing index of the sequence that each token belongs to.
        low: lowest ratio that is not an outlier, at least 0; None for no bound.
        high: highest ratio that is not an outlier; None for no bound.

    Returns:
        bool [T], a subset of `loss_mask_T`.

    Raises:
        ShapeError: lengths or dtypes do not fit, or `sequence_T` decreases somewhere.
        ConfigError: no ratio lies within the bounds.
    """
    _require_stream(log_ratios_T, loss_mask_T, sequence_T)
    if low is None and high is None:
        return loss_mask_T
    outlier_T = loss_mask_T & ~ratio_mask(log_ratios_T, loss_mask_T, low=low, high=high)
    return loss_mask_T & (sequence_sum(outlier_T, sequence_T) == 0)[sequence_T]


def _log_bounds(low: float | None, high: float | None, name: str = "low, high") -> tuple[float, float]:
    """The bounds in log space; a missing bound is infinite."""
    low, high = 0.0 if low is None else low, math.inf if high is None else high
    if not 0 <= low <= high or high == 0:
        raise ConfigError(f"{name}: no ratio lies between {low:g} and {high:g}; expected 0 <= low <= high and high > 0")
    return (math.log(low) if low else -math.inf), math.log(high)


def _require_choice(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise ConfigError(
            f"{name}: {value!r} is not one of {', '.join(choices)} or null.{nearest(str(value), choices)}"
        )


def _require_stream(log_ratios_T: Tensor, loss_mask_T: Tensor, sequence_T: Tensor | None = None) -> None:
    require_same_length(log_ratios_T=log_ratios_T, loss_mask_T=loss_mask_T)
    require_floating(log_ratios_T=log_ratios_T)
    require_bool(loss_mask_T=loss_mask_T)
    if sequence_T is not None:
        require_same_length(log_ratios_T=log_ratios_T, sequence_T=sequence_T)
        require_ordered(sequence_T)


def _count(mask: Tensor) -> float:
    # `mask.sum()` would first make an int64 copy: 20 times slower for 4M tokens.
    return float(mask.count_nonzero())


def _dropped(before_T: Tensor, after_T: Tensor) -> tuple[float, float]:
    before = _count(before_T)
    return before - _count(after_T), before


def _dropped_sequences(before_T: Tensor, after_T: Tensor, sequence_T: Tensor) -> tuple[float, float]:
    before = _count(sequence_sum(before_T, sequence_T))
    after = before if after_T is before_T else _count(sequence_sum(after_T, sequence_T))
    return before - after, before
