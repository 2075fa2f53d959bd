"""Log-probs and entropies of a vocabulary that is split over tensor-parallel ranks, without materialising the logits of
a whole micro-batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_core.algorithms.logprobs import LOWEST_LOGPROB, KeptIds


def parallel_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    *,
    first_row: int,
    temperature: float,
    chunk_tokens: int,
    group: Any,
    with_entropy: bool = True,
    kept: KeptIds | None = None,
) -> tuple[Tensor, Tensor]:
    """Like `rl_core.algorithms.logprobs.chunked_logprobs`, for an output layer that is split by rows over tensor ranks.

    With x the logits of all ranks' rows: lse = log Σ_r Σ_v∈r exp(x_v), logprob = x_target − lse and entropy = −Σ_r
    Σ_v∈r p_v log p_v; ranks exchange three sums and one maximum per token, never logits. The gradient of `hidden_TH`
    contains only the contribution of this rank's rows; the caller must sum the gradient over the ranks.

    Args:
        hidden_TH: hidden states, the same on all ranks.
        weight_VH: this rank's rows of the output layer, without padding; may have no rows.
        targets_T: int64 token ids in the whole vocabulary.
        first_row: token id of this rank's first row.
        temperature: > 0, divides the logits.
        chunk_tokens: number of tokens for which logits exist at a time, at least 1.
        group: the tensor-parallel ranks.
        with_entropy: if False, entropies are 0 and have no gradient.
        kept: ids in the whole vocabulary to which each distribution is restricted; None: to none.

    Returns:
        Log-probs [T] and entropies [T], float32, the same on all ranks.
    """
    return _ParallelLogprobs.apply(  # pyright: ignore[reportReturnType]
        hidden_TH,
        weight_VH,
        targets_T - first_row,
        (float(temperature), chunk_tokens, with_entropy, first_row, kept),
        group,
    )


class _ParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        row_T: Tensor,
        settings: tuple[float, int, bool, int, KeptIds | None],
        group: Any,
    ) -> tuple[Tensor, Tensor]:
        _, chunk_tokens, with_entropy, _, _ = settings
        logprobs_T, entropies_T, lse_T = hidden_TH.new_zeros((3, row_T.numel()), dtype=torch.float32)
        for tokens in _chunks(row_T.numel(), chunk_tokens):
            logits_CV = _logits(hidden_TH, weight_VH, tokens, settings)
            lse_C = _logsumexp(logits_CV, group)
            target_C, is_own_C = _own_target(logits_CV, row_T[tokens])
            sums = [torch.where(is_own_C, target_C - lse_C, 0.0)]
            if with_entropy:
                # x − lse is formed before the weighted sum: subtracting two large sums would cancel.
                all_logprobs_CV = _bounded(logits_CV.sub_(lse_C[:, None]), settings)
                sums.append(-(all_logprobs_CV.exp() * all_logprobs_CV).sum(-1))
            sums_SC = torch.stack(sums)
            dist.all_reduce(sums_SC, group=group)
            logprobs_T[tokens] = sums_SC[0]
            if with_entropy:
                entropies_T[tokens] = sums_SC[1]
            lse_T[tokens] = lse_C
        ctx.save_for_backward(hidden_TH, weight_VH, row_T, lse_T, entropies_T)
        ctx.settings = settings
        return logprobs_T, entropies_T

    @staticmethod
    @once_differentiable
    # The decorator hides the parameters' names from pyright.
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_logprobs_T, grad_entropies_T = grad_outputs
        hidden_TH, weight_VH, row_T, lse_T, entropies_T = ctx.saved_tensors
        temperature, chunk_tokens, with_entropy, _, _ = ctx.settings
        grad_hidden_TH = torch.empty_like(hidden_TH)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        for tokens in _chunks(row_T.numel(), chunk_tokens):
            logits_CV = _logits(hidden_TH, weight_VH, tokens, ctx.settings)
            all_logprobs_CV = _bounded(logits_CV.sub_(lse_T[tokens, None]), ctx.settings)
            # dH/dx = −p · (log p + H), dlogprob/dx = onehot − p
            if with_entropy:
                shift_C = grad_entropies_T[tokens] * entropies_T[tokens] + grad_logprobs_T[tokens]
                grad_CV = grad_entropies_T[tokens, None] * all_logprobs_CV
                grad_CV.add_(shift_C[:, None]).mul_(all_logprobs_CV.exp_()).neg_()
            else:
                grad_CV = all_logprobs_CV.exp_().mul_(-grad_logprobs_T[tokens, None])
            if weight_VH.shape[0]:
                is_own_C = _is_own(row_T[tokens], weight_VH.shape[0])
                own_C = torch.where(is_own_C, grad_logprobs_T[tokens], 0.0)
                grad_CV.scatter_add_(-1, row_T[tokens, None].clamp(0, weight_VH.shape[0] - 1), own_C[:, None])
            grad_CV = grad_CV.div_(temperature).to(hidden_TH.dtype)
            grad_hidden_TH[tokens] = grad_CV @ weight_VH
            grad_weight_VH += grad_CV.T @ hidden_TH[tokens]
        return grad_hidden_TH, grad_weight_VH.to(weight_VH.dtype), None, None, None


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, min(start + chunk_tokens, num_tokens)) for start in range(0, num_tokens, chunk_tokens)]


def _logits(hidden_TH: Tensor, weight_VH: Tensor, tokens: slice, settings: tuple[Any, ...]) -> Tensor:
    temperature, _, _, first_row, kept = settings
    logits_CV = (hidden_TH[tokens] @ weight_VH.T).float().div_(temperature)
    return logits_CV if kept is None else kept.restrict(logits_CV, tokens, first_id=first_row)


def _bounded(all_logprobs_CV: Tensor, settings: tuple[Any, ...]) -> Tensor:
    """Makes the log-probs of ids that were not kept finite, in place, because 0 · −inf is NaN."""
    return all_logprobs_CV if settings[-1] is None else all_logprobs_CV.clamp_(min=LOWEST_LOGPROB)


def _logsumexp(logits_CV: Tensor, group: Any) -> Tensor:
    """Returns log Σ exp over the logits of all ranks."""
    has_rows = logits_CV.shape[1] > 0
    peak_C = logits_CV.amax(-1) if has_rows else logits_CV.new_full(logits_CV.shape[:1], float("-inf"))
    dist.all_reduce(peak_C, op=dist.ReduceOp.MAX, group=group)
    sum_C = (logits_CV - peak_C[:, None]).exp_().sum(-1)
    dist.all_reduce(sum_C, group=group)
    return sum_C.log_().add_(peak_C)


def _is_own(row_C: Tensor, num_rows: int) -> Tensor:
    return (row_C >= 0) & (row_C < num_rows)


def _own_target(logits_CV: Tensor, row_C: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the target's logit and whether this rank holds it; if it does not, the returned logit is meaningless."""
    num_rows = logits_CV.shape[1]
    if num_rows == 0:
        return torch.zeros_like(row_C, dtype=torch.float32), torch.zeros_like(row_C, dtype=torch.bool)
    return logits_CV.gather(-1, row_C.clamp(0, num_rows - 1)[:, None]).squeeze(-1), _is_own(row_C, num_rows)
