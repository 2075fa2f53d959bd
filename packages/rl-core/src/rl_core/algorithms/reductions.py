"""Reductions as loss weights: training minimises sum_t loss_weights[t] · loss[t] over a whole mini-batch.

The controller computes the weights from the mini-batch (the tokens of one optimizer step) before it is split, and
workers only sum. So micro-batches, packing and ranks cannot change the gradient. The weights of `token_mean`,
`sequence_mean` and `prompt_mean` sum to 1. A sequence or prompt without a trained token does not count in any
denominator. A mask without any trained token gives zeros.

Every reduction divides by a number of tokens, sequences or prompts at the end. If a mini-batch arrives in parts (of
whole prompts), `Reduction.summed` returns each part's weights before this division, and the part's divisor. The summed
gradients are divided by the summed divisors after the last part.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Generic, NamedTuple, ParamSpec

import torch
from torch import Tensor

from rl_core.algorithms.checks import (
    require_bool,
    require_int64,
    require_ordered,
    require_row_per_sequence,
    require_same_length,
)
from rl_core.algorithms.groups import sequence_sum
from rl_core.errors import ConfigError

P = ParamSpec("P")


class SummedWeights(NamedTuple):
    """Loss weights before the final division."""

    weights_T: Tensor
    """float64 [T]; 0 for untrained tokens."""
    divisor: Tensor
    """int64, 0-d: number of trained tokens, or of sequences or prompts with trained tokens. If parts share no prompt,
    their divisors sum to the divisor of the whole mini-batch."""


class Reduction(Generic[P]):
    """A reduction, with the name and parameters of the function that it wraps. Called with a whole mini-batch, it
    returns the loss weights, float32 [T]."""

    def __init__(self, summed: Callable[P, SummedWeights]):
        self.summed = summed
        """The wrapped function: the weights of a part of a mini-batch before the division."""
        functools.update_wrapper(self, summed)
        self.__signature__ = inspect.signature(summed).replace(return_annotation="Tensor")

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        weights_T, divisor = self.summed(*args, **kwargs)
        return (weights_T / divisor.clamp(min=1)).float()


@Reduction
def token_mean(loss_mask_T: Tensor) -> SummedWeights:
    """All trained tokens have the same weight: w_t = m_t / sum_u m_u.

    Source: Yu et al. 2025 (DAPO), arXiv 2503.14476, eq. 12.

    Args:
        loss_mask_T: bool, the trained tokens.

    Returns:
        Weights float32 [T].

    Raises:
        ShapeError: the mask is not bool or does not have one axis.
    """
    require_same_length(loss_mask_T=loss_mask_T)
    require_bool(loss_mask_T=loss_mask_T)
    return SummedWeights(loss_mask_T.double(), loss_mask_T.count_nonzero())


@Reduction
def sequence_mean(loss_mask_T: Tensor, sequence_T: Tensor) -> SummedWeights:
    """The mean over sequences of each sequence's token mean: w_t = m_t / (n_i · S).

    n_i is the number of trained tokens of the token's sequence i, S the number of sequences with a trained token.
    Source: Shao et al. 2024 (GRPO), arXiv 2402.03300, eq. 3.

    Args:
        loss_mask_T: bool, the trained tokens.
        sequence_T: int64, non-decreasing index of the sequence that each token belongs to.

    Returns:
        Weights float32 [T].

    Raises:
        ShapeError: lengths or dtypes do not fit, or `sequence_T` decreases somewhere.
    """
    _require_stream(loss_mask_T, sequence_T)
    tokens_S = sequence_sum(loss_mask_T, sequence_T)
    return SummedWeights(_weights(loss_mask_T, sequence_T, tokens_S), (tokens_S > 0).sum())


@Reduction
def prompt_mean(loss_mask_T: Tensor, sequence_T: Tensor, group_N: Tensor) -> SummedWeights:
    """The mean over prompts of the token mean over all samples of a prompt: w_t = m_t / (n_p · P).

    n_p is the number of trained tokens of the token's prompt p, P the number of prompts with a trained token.
    Source: Khatri et al. 2025 (ScaleRL, "prompt average"), arXiv 2510.13786.

    Args:
        loss_mask_T: bool, the trained tokens.
        sequence_T: int64, non-decreasing index of the sequence that each token belongs to.
        group_N: int64, equal for the samples of one prompt, in any order.

    Returns:
        Weights float32 [T].

    Raises:
        ShapeError: lengths or dtypes do not fit, or `sequence_T` decreases somewhere.
    """
    _require_stream(loss_mask_T, sequence_T)
    require_int64(group_N=group_N)
    require_row_per_sequence(sequence_T, group_N=group_N)
    tokens_S = sequence_sum(loss_mask_T, sequence_T)
    ids_P, index_S = torch.unique(group_N[: tokens_S.numel()], return_inverse=True)
    tokens_P = tokens_S.new_zeros(ids_P.numel()).index_add(0, index_S, tokens_S)
    return SummedWeights(_weights(loss_mask_T, sequence_T, tokens_P[index_S]), (tokens_P > 0).sum())


@Reduction
def seq_mean_token_sum_norm(loss_mask_T: Tensor, sequence_T: Tensor, *, max_seq_len: int) -> SummedWeights:
    """The mean over sequences of each sequence's token sum divided by a constant: w_t = m_t / (max_seq_len · S).

    S is the number of sequences with a trained token. All trained tokens have the same weight, which does not depend
    on the lengths in the batch. The weights sum to (mean trained length) / `max_seq_len`, not to 1.
    Source: Liu et al. 2025 (Dr. GRPO), arXiv 2503.20783, section 3.2.

    Args:
        loss_mask_T: bool, the trained tokens.
        sequence_T: int64, non-decreasing index of the sequence that each token belongs to.
        max_seq_len: the constant, in tokens; usually the maximum response length.

    Returns:
        Weights float32 [T].

    Raises:
        ShapeError: lengths or dtypes do not fit, or `sequence_T` decreases somewhere.
        ConfigError: `max_seq_len` is not positive.
    """
    _require_stream(loss_mask_T, sequence_T)
    if not max_seq_len >= 1:
        raise ConfigError(f"max_seq_len: {max_seq_len} is not a positive number of tokens")
    tokens_S = sequence_sum(loss_mask_T, sequence_T)
    return SummedWeights(loss_mask_T.double() / max_seq_len, (tokens_S > 0).sum())


@Reduction
def prompt_token_sum(loss_mask_T: Tensor, sequence_T: Tensor, group_N: Tensor) -> SummedWeights:
    """The mean over prompts of the token sum over all samples of a prompt: w_t = m_t / P.

    P is the number of prompts with a trained token. Use this reduction for losses whose tokens sum to one number per
    prompt, such as pairwise losses. The weights sum to the mean number of trained tokens per prompt, not to 1.

    Args:
        loss_mask_T: bool, the trained tokens.
        sequence_T: int64, non-decreasing index of the sequence that each token belongs to.
        group_N: int64, equal for the samples of one prompt, in any order.

    Returns:
        Weights float32 [T].

    Raises:
        ShapeError: lengths or dtypes do not fit, or `sequence_T` decreases somewhere.
    """
    _require_stream(loss_mask_T, sequence_T)
    require_int64(group_N=group_N)
    require_row_per_sequence(sequence_T, group_N=group_N)
    tokens_S = sequence_sum(loss_mask_T, sequence_T)
    groups_P = group_N[: tokens_S.numel()][tokens_S > 0].unique()
    return SummedWeights(loss_mask_T.double(), torch.tensor(groups_P.numel()))


REDUCTIONS: Mapping[str, Reduction[...]] = MappingProxyType(
    {
        "token_mean": token_mean,
        "sequence_mean": sequence_mean,
        "prompt_mean": prompt_mean,
        "prompt_token_sum": prompt_token_sum,
        "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
    }
)
"""Value of `trainer.algorithm.loss_reduction` → reduction. Parameters are bound by name; keyword-only ones are
settings."""


def _require_stream(loss_mask_T: Tensor, sequence_T: Tensor) -> None:
    require_same_length(loss_mask_T=loss_mask_T, sequence_T=sequence_T)
    require_bool(loss_mask_T=loss_mask_T)
    require_ordered(sequence_T)


def _weights(loss_mask_T: Tensor, sequence_T: Tensor, denominator_S: Tensor) -> Tensor:
    # A denominator is 0 only if no token of the sequence or prompt is trained. Replacing it by 1 avoids 0 · inf.
    weight_S = torch.where(denominator_S > 0, denominator_S, 1.0).double().reciprocal()
    return weight_S[sequence_T] * loss_mask_T
