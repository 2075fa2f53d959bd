"""Computes log-probs and entropies of given tokens without storing the logits of a whole micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_core.errors import ShapeError

LOWEST_LOGPROB = -1e4
"""In products p · log p, log-probs below this value (including −inf) are replaced by it. Its exponential is 0 even in
float64."""


@dataclass(frozen=True, eq=False)
class KeptIds:
    """The ids to which sampling restricted the distributions of T tokens (top-p, top-k, min-p)."""

    counts_T: Tensor
    """int [T]: number of kept ids of each token; 0: its distribution has the whole vocabulary."""
    ids_E: Tensor
    """int [sum of counts]: the kept ids of one token after another."""

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *self.counts_T.cumsum(0).tolist()]

    def restrict(self, logits_CV: Tensor, tokens: slice, *, first_id: int = 0) -> Tensor:
        """Sets the logits of ids that were not kept to −inf, in place.

        Args:
            logits_CV: logits of the tokens for V consecutive ids.
            tokens: which of the T tokens they are.
            first_id: the first of the V ids.
        """
        counts_C, ids_E = self.counts_T[tokens], self.ids_E[self._starts[tokens.start] : self._starts[tokens.stop]]
        row_E = torch.repeat_interleave(torch.arange(len(counts_C), device=counts_C.device), counts_C)
        is_here_E = (ids_E >= first_id) & (ids_E < first_id + logits_CV.shape[1])
        place_E = row_E[is_here_E], ids_E[is_here_E].long() - first_id
        kept_E = logits_CV[place_E]
        return logits_CV.masked_fill_((counts_C > 0)[:, None], -torch.inf).index_put_(place_E, kept_E)


def chunked_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    bias_V: Tensor | None = None,
    with_entropy: bool = True,
    kept: KeptIds | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes the log-prob of each target and the entropy of its distribution directly from the last hidden states.

    With logits_t = (hidden_t · weightᵀ + bias) / temperature and p_t = softmax(logits_t):
    logprob_t = logits_t[target_t] − logsumexp(logits_t) and entropy_t = −Σ_v p_tv log p_tv.

    Logits are stored in one buffer of `chunk_tokens` × V numbers (with entropy, in two of half that length). Inputs of
    lower precision need one more buffer in that precision. Backward recomputes the logits, so that there are four
    matrix products instead of three. Matrix products use the dtype of `hidden_TH`; softmax and sums over chunks use
    float32 (float64 for float64 inputs). Gradients flow from both results to hidden states, weight and bias. A bias of
    −inf removes a token from the vocabulary: its probability is 0, and 0 · log 0 counts as 0. With `kept`, a token's
    distribution is restricted to its kept ids in the same way: logprob_t = logits_t[target_t] − logsumexp over the kept
    ids, and the entropy is that of the renormalised distribution.

    Args:
        hidden_TH: hidden state that predicts each target.
        weight_VH: output embedding; cast to the dtype of `hidden_TH`.
        targets_T: int64 token ids in [0, V), even for tokens whose result is not used.
        temperature: > 0, divides the logits.
        chunk_tokens: >= 1, number of tokens whose logits are in memory at a time.
        bias_V: added to the logits before they are divided by the temperature.
        with_entropy: whether to compute entropies; if False, the second result is None.
        kept: the ids to which each distribution is restricted, among them the target; None: all distributions have the
            whole vocabulary.

    Returns:
        Log-probs [T] and entropies [T] or None, float32 (float64 for float64 inputs).

    Raises:
        ShapeError: shapes or dtypes do not fit, or temperature or chunk_tokens is out of range.
    """
    _require_fitting(hidden_TH, weight_VH, targets_T, bias_V)
    if temperature <= 0 or chunk_tokens < 1:
        raise ShapeError(f"temperature must be > 0 and chunk_tokens >= 1, got {temperature} and {chunk_tokens}")
    if kept is not None and kept.counts_T.shape != targets_T.shape:
        raise ShapeError(f"kept: expected counts of {len(targets_T)} tokens, got {tuple(kept.counts_T.shape)}")
    logprobs_T, entropies_T = _ChunkedLogprobs.apply(
        hidden_TH, weight_VH, bias_V, targets_T, float(temperature), chunk_tokens, with_entropy, kept
    )
    return logprobs_T, entropies_T


def full_logprobs(
    hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, *, temperature: float, bias_V: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The results of `chunked_logprobs`, computed from the logits of all tokens at once: simple, but needs memory for
    T × V numbers."""
    _require_fitting(hidden_TH, weight_VH, targets_T, bias_V)
    logits_TV = hidden_TH @ weight_VH.to(hidden_TH.dtype).T
    logits_TV = logits_TV.to(_softmax_dtype(hidden_TH))
    if bias_V is not None:
        logits_TV = logits_TV + bias_V
    all_logprobs_TV = (logits_TV / temperature).log_softmax(-1)
    entropies_T = -(all_logprobs_TV.exp() * all_logprobs_TV.clamp(min=LOWEST_LOGPROB)).sum(-1)
    return all_logprobs_TV.gather(-1, targets_T[:, None]).squeeze(-1), entropies_T


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool,
        kept: KeptIds | None,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = _softmax_dtype(hidden_TH)
        lse_T, logprobs_T = (hidden_TH.new_empty(targets_T.numel(), dtype=dtype) for _ in range(2))
        entropies_T = torch.empty_like(lse_T) if with_entropy else None
        with torch.autocast(hidden_TH.device.type, enabled=False):
            num_buffers = 2 if with_entropy else 1
            logits = _Logits(
                hidden_TH, weight_VH, bias_V, temperature, chunk_tokens, num_buffers=num_buffers, kept=kept
            )
            for rows in logits.chunks():
                logits_CV = logits.fill(rows)
                peak_C = logits_CV.amax(-1)
                target_C = logits_CV.gather(-1, targets_T[rows, None]).squeeze(-1)
                if entropies_T is None:
                    lse_C = logits_CV.sub_(peak_C[:, None]).exp_().sum(-1).log_().add_(peak_C)
                else:
                    weights_CV = logits.spare(rows)
                    torch.sub(logits_CV, peak_C[:, None], out=weights_CV).exp_()
                    sum_C = weights_CV.sum(-1)
                    lse_C = sum_C.log().add_(peak_C)
                    # Subtract lse before the weighted sum: the difference of two large sums would lose precision.
                    all_logprobs_CV = logits.bounded(logits_CV.sub_(lse_C[:, None]))
                    entropies_T[rows] = all_logprobs_CV.mul_(weights_CV).sum(-1).div_(sum_C).neg_()
                lse_T[rows] = lse_C
                logprobs_T[rows] = target_C.sub_(lse_C)
        ctx.save_for_backward(hidden_TH, weight_VH, bias_V, targets_T, lse_T, entropies_T)
        ctx.settings = temperature, chunk_tokens, kept
        ctx.set_materialize_grads(False)
        return logprobs_T, entropies_T

    @staticmethod
    @once_differentiable
    # The decorator hides the names of the parameters from the type checker.
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_logprobs_T, grad_entropies_T = grad_outputs
        if grad_logprobs_T is None and grad_entropies_T is None:
            return (None,) * 8
        hidden_TH, weight_VH, bias_V, targets_T, lse_T, entropies_T = ctx.saved_tensors
        temperature, chunk_tokens, kept = ctx.settings
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dtype = lse_T.dtype
        grad_hidden_TH = torch.empty_like(hidden_TH) if needs_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=dtype) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=dtype) if needs_bias else None
        compute_weight_VH = weight_VH.to(hidden_TH.dtype)
        # Logits are divided by the temperature. Dividing the gradients of T tokens saves a pass over T × V numbers.
        grad_logprobs_T, grad_entropies_T = (
            None if grad_T is None else grad_T / temperature for grad_T in (grad_logprobs_T, grad_entropies_T)
        )
        with torch.autocast(hidden_TH.device.type, enabled=False):
            num_buffers = 1 if grad_entropies_T is None else 2
            logits = _Logits(
                hidden_TH, compute_weight_VH, bias_V, temperature, chunk_tokens, num_buffers=num_buffers, kept=kept
            )
            for rows in logits.chunks():
                grad_CV = logits.fill(rows).sub_(lse_T[rows, None])  # log-probs of the whole vocabulary
                if grad_entropies_T is None:
                    assert grad_logprobs_T is not None
                    grad_CV.exp_().mul_(-grad_logprobs_T[rows, None])
                else:
                    # dH/dx = −p · (log p + H), dlogprob/dx = onehot − p
                    probs_CV = torch.exp(grad_CV, out=logits.spare(rows))
                    logits.bounded(grad_CV)
                    shift_C = grad_entropies_T[rows] * entropies_T[rows]
                    if grad_logprobs_T is not None:
                        shift_C = shift_C + grad_logprobs_T[rows]
                    grad_CV.mul_(grad_entropies_T[rows, None]).add_(shift_C[:, None]).mul_(probs_CV).neg_()
                if grad_logprobs_T is not None:
                    grad_CV.scatter_add_(-1, targets_T[rows, None], grad_logprobs_T[rows, None])
                if grad_bias_V is not None:
                    grad_bias_V += grad_CV.sum(0)
                product_CV = logits.lowered(grad_CV)
                if grad_hidden_TH is not None:
                    torch.mm(product_CV, compute_weight_VH, out=grad_hidden_TH[rows])
                if grad_weight_VH is not None and product_CV.dtype == dtype:
                    grad_weight_VH.addmm_(product_CV.T, hidden_TH[rows])
                elif grad_weight_VH is not None:
                    grad_weight_VH += product_CV.T @ hidden_TH[rows]
        grad_weight = None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype)
        grad_bias = None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype)
        return grad_hidden_TH, grad_weight, grad_bias, None, None, None, None, None


class _Logits:
    """Logits of one chunk at a time, in one allocation of `chunk_tokens` × V numbers that all chunks share.

    With two buffers, a chunk has half as many tokens, and the second buffer holds another quantity of the same shape.
    """

    def __init__(
        self,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        temperature: float,
        chunk_tokens: int,
        *,
        num_buffers: int,
        kept: KeptIds | None,
    ) -> None:
        self.hidden_TH, self.bias_V, self.temperature, self.kept = hidden_TH, bias_V, temperature, kept
        self.weight_VH = weight_VH.to(hidden_TH.dtype)
        self.rows = min(max(chunk_tokens // num_buffers, 1), max(hidden_TH.shape[0], 1))
        dtype = _softmax_dtype(hidden_TH)
        self.buffers = hidden_TH.new_empty((num_buffers, self.rows, weight_VH.shape[0]), dtype=dtype)
        self.product = None if dtype == hidden_TH.dtype else hidden_TH.new_empty(self.buffers.shape[1:])

    def chunks(self) -> list[slice]:
        """The range of rows of each chunk, in order."""
        num_tokens = self.hidden_TH.shape[0]
        return [slice(start, min(start + self.rows, num_tokens)) for start in range(0, num_tokens, self.rows)]

    def fill(self, rows: slice) -> Tensor:
        """Computes the logits [C, V] of these rows in the shared buffer. The next call overwrites them."""
        hidden_CH = self.hidden_TH[rows]
        logits_CV = self.buffers[0, : hidden_CH.shape[0]]
        if self.product is None:
            torch.mm(hidden_CH, self.weight_VH.T, out=logits_CV)
        else:
            product_CV = self.product[: hidden_CH.shape[0]]
            torch.mm(hidden_CH, self.weight_VH.T, out=product_CV)
            logits_CV.copy_(product_CV)
        if self.bias_V is not None:
            logits_CV.add_(self.bias_V)
        if self.temperature != 1.0:
            logits_CV.div_(self.temperature)
        return logits_CV if self.kept is None else self.kept.restrict(logits_CV, rows)

    def lowered(self, values_CV: Tensor) -> Tensor:
        """Converts the values to the dtype of the matrix products."""
        return values_CV if self.product is None else self.product[: values_CV.shape[0]].copy_(values_CV)

    def bounded(self, all_logprobs_CV: Tensor) -> Tensor:
        """The log-probs, made finite in place where a token of the vocabulary has a bias of −inf or was not kept."""
        is_finite = self.bias_V is None and self.kept is None
        return all_logprobs_CV if is_finite else all_logprobs_CV.clamp_(min=LOWEST_LOGPROB)

    def spare(self, rows: slice) -> Tensor:
        """The part of the second buffer that belongs to these rows, [C, V]."""
        return self.buffers[1, : rows.stop - rows.start]


def _softmax_dtype(hidden_TH: Tensor) -> torch.dtype:
    return torch.float64 if hidden_TH.dtype == torch.float64 else torch.float32


def _require_fitting(hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, bias_V: Tensor | None) -> None:
    if hidden_TH.dim() != 2 or weight_VH.dim() != 2 or hidden_TH.shape[1] != weight_VH.shape[1]:
        raise ShapeError(
            f"expected hidden [T, H] and weight [V, H], got {tuple(hidden_TH.shape)} and {tuple(weight_VH.shape)}"
        )
    if targets_T.dtype != torch.int64 or targets_T.shape != hidden_TH.shape[:1]:
        raise ShapeError(
            f"targets: expected int64 [{hidden_TH.shape[0]}], got {targets_T.dtype} {tuple(targets_T.shape)}"
        )
    if bias_V is not None and bias_V.shape != weight_VH.shape[:1]:
        raise ShapeError(f"bias: expected [{weight_VH.shape[0]}], got {tuple(bias_V.shape)}")
