"""Common parts of all loss functions: the result, decorators that declare what a loss reads, masks, log-ratios and
sequence means."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rl_core.algorithms.checks import require_bool, require_int64, require_same_length
from rl_core.algorithms.loss_parameters import CURRENT
from rl_core.errors import ShapeError
from rl_core.function_settings import keyword_parameters

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this value before `exp`: e^20 is about 5e8, finite in float32 and far outside any trust
region. A clamped ratio has no gradient."""


class TokenLoss(NamedTuple):
    """Result of a loss function: one value per token, no reduction."""

    loss_T: Tensor
    """Carries the gradient. Not read outside the mask, where the losses of this package return 0."""
    metrics: Mapping[str, Tensor]
    """Name → [T], detached, float or bool. The trainer averages each metric over the trained tokens."""


LossFunction = Callable[..., TokenLoss]


def prepared_by(columns_function: Callable[..., dict[str, Tensor]]) -> Callable[[LossFunction], LossFunction]:
    """Decorates a loss function that needs statistics of the whole mini-batch.

    `columns_function` takes batch columns by parameter name, as a loss does, but no scores of the current model. It may
    have the keyword parameter `seed`; its other keyword parameters become settings of the loss. The controller calls it
    once per mini-batch, before the mini-batch is split, so that the loss does not depend on the split. The columns that
    it returns are named `x_…`; the loss reads them as parameters `x_…_T`.
    """
    prepare_settings = keyword_parameters(columns_function)
    prepare_settings.pop("seed", None)

    def decorate(function: LossFunction) -> LossFunction:
        signature = inspect.signature(function)
        added = {name: p for name, p in prepare_settings.items() if name not in signature.parameters}

        @functools.wraps(function)
        def loss(*args: Any, **kwargs: Any) -> TokenLoss:
            return function(*args, **{name: value for name, value in kwargs.items() if name not in added})

        loss.__dict__["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), *added.values()])
        loss.__dict__["prepare"] = columns_function
        return loss

    return decorate


def chooses_columns(chosen: Callable[..., tuple[str, ...]]) -> Callable[[LossFunction], LossFunction]:
    """Decorates a loss function whose settings decide which of its optional columns it reads.

    Optional columns are positional parameters with a default. `chosen` has some settings of the loss as keyword
    parameters, with the same defaults, and returns the names of the optional parameters to read.
    """

    def decorate(function: LossFunction) -> LossFunction:
        function.__dict__["chosen_columns"] = chosen
        return function

    return decorate


Corrections = Literal["scales", "reads", "refuses", "unknown"]
"""How a loss uses off-policy correction weights, one factor per token. `scales`: the advantages, which scale the loss,
are multiplied by the weights. `reads`: the loss has the parameter `correction_weights_T`. `refuses`: the loss uses no
weights, because it corrects in its own way or has no advantages. `unknown`: a run that needs weights does not start."""


def takes_corrections(corrections: Literal["scales", "reads", "refuses"]) -> Callable[[LossFunction], LossFunction]:
    """Decorates a loss function to declare how it uses off-policy corrections.

    scales: its advantages are multiplied by the weights. The loss must be linear in the advantages (`Objective.try_out`
    checks this). Its `prepare` function reads the advantages without weights.
    reads: the loss, or its `prepare` function, has the parameter `correction_weights_T` and applies the weights itself.
    refuses: a run with a correction does not start.
    Without this decorator, the loss's parameters and a test of linearity decide. A loss whose `prepare` function reads
    advantages needs the decorator, because only its author knows whether that function should see weighted advantages.
    """

    def decorate(function: LossFunction) -> LossFunction:
        function.__dict__["corrections"] = corrections
        return function

    return decorate


def pairwise(function: LossFunction) -> LossFunction:
    """Decorates a loss that compares pairs of responses and whose `prepare` function computes slopes (see
    `preference_losses`).

    Such a loss is correct only for two samples per prompt, one optimizer step per batch and the reduction
    `prompt_token_sum`. A run with other settings does not start.
    """
    function.__dict__["is_pairwise"] = True
    return function


def require_tokens(mask_T: Tensor, **tensors_T: Tensor) -> None:
    """Raises ShapeError unless the mask is bool [T], all other tensors are [T] too, and only scores of the current
    model carry gradient. A gradient through another column, such as old log-probs, can cancel the policy's."""
    require_bool(mask_T=mask_T)
    require_same_length(mask_T=mask_T, **tensors_T)
    for name, values_T in tensors_T.items():
        if values_T.requires_grad and torch.is_grad_enabled() and name.removesuffix("_T") not in CURRENT:
            raise ShapeError(f"{name}: carries a gradient, expected a constant; pass {name}.detach()")


def masked(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """The values inside the mask, and 0 (without gradient) outside it, even where the values are NaN."""
    return torch.where(mask_T, values_T, 0.0)


def log_ratio(logprobs_T: Tensor, anchor_logprobs_T: Tensor, mask_T: Tensor) -> Tensor:
    """logprobs − anchor, clamped to ±LOG_RATIO_LIMIT, 0 (without gradient) outside the mask; at least float32."""
    return masked(difference(logprobs_T, anchor_logprobs_T), mask_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def difference(logprobs_T: Tensor, anchor_logprobs_T: Tensor) -> Tensor:
    """logprobs − anchor, at least float32."""
    return at_least_float32(logprobs_T) - at_least_float32(anchor_logprobs_T)


def at_least_float32(logprobs_T: Tensor) -> Tensor:
    """Converts 16-bit log-probs to float32. In float16 a ratio could overflow. The next bfloat16 number above 1 is
    1.0078, so a bfloat16 ratio could not be compared with bounds like GSPO's."""
    return logprobs_T.to(torch.promote_types(logprobs_T.dtype, torch.float32))


def mean_over_sequence(values_T: Tensor, mask_T: Tensor, sequence_T: Tensor) -> Tensor:
    """For each token, the mean over the tokens of its sequence that are inside the mask; 0 if there are none.

    Args:
        values_T: 0 outside the mask.
        mask_T: bool, the tokens that count.
        sequence_T: int64, non-decreasing index of the sequence that each token belongs to.

    Raises:
        ShapeError: lengths do not fit, or `sequence_T` is not int64.
    """
    require_same_length(values_T=values_T, mask_T=mask_T, sequence_T=sequence_T)
    require_int64(sequence_T=sequence_T)
    changes_T = torch.zeros_like(sequence_T)
    torch.ne(sequence_T[1:], sequence_T[:-1], out=changes_T[1:])
    position_T = changes_T.cumsum_(0)
    # There are at most T sequences. The exact number would have to be read from the device, which synchronises.
    count_N = torch.zeros_like(sequence_T).index_add_(0, position_T, mask_T.long()).clamp_(min=1)
    return _SequenceMean.apply(values_T, position_T, count_N)


class _SequenceMean(torch.autograd.Function):
    """For each token, the sum over its sequence, divided by the sequence's count. This linear map is symmetric, so
    backward applies the same map to the gradient."""

    @staticmethod
    def forward(ctx: Any, values_T: Tensor, position_T: Tensor, count_N: Tensor) -> Tensor:
        ctx.save_for_backward(position_T, count_N)
        sum_N = torch.zeros_like(values_T, dtype=torch.float64).index_add_(0, position_T, values_T.double())
        return sum_N.div_(count_N).to(values_T.dtype).index_select(0, position_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _SequenceMean.apply(grads[0], *ctx.saved_tensors), None, None
