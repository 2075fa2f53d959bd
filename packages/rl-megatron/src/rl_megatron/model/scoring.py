"""Computes log-probs and entropies from hidden states, on the last pipeline stage."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from rl_core.algorithms.logprobs import KeptIds, chunked_logprobs
from rl_megatron.model.parallel_logprobs import parallel_logprobs
from rl_megatron.place import tensor_group


class ChunkScorer:
    """Computes log-probs and entropies of tokens from the last hidden states of a language model."""

    score_names = ("logprobs", "entropies")

    def __init__(self, model: Any, *, chunk_tokens: int):
        self.model = model
        self.chunk_tokens = chunk_tokens
        _return_hidden_states(model)

    def __call__(
        self,
        hidden_SH: Tensor,
        targets_S: Tensor,
        *,
        temperature: float,
        with_entropy: bool = True,
        kept: KeptIds | None = None,
    ) -> tuple[Tensor, ...]:
        """Returns log-probs [S] and, if `with_entropy`, entropies [S], in float32.

        Args:
            hidden_SH: the hidden state that predicts each target, the same on all tensor ranks.
            targets_S: int64 token ids.
            temperature: > 0, divides the logits.
            with_entropy: whether to compute entropies.
            kept: the ids to which each distribution is restricted; None: to none.
        """
        group = tensor_group()
        weight_VH = self._weight()
        num_rows, vocab_size = weight_VH.shape[0], self.model.config.vocab_size
        first_row = num_rows * group.rank()
        weight_VH = weight_VH[: max(0, vocab_size - first_row)]  # the rest is padding
        hidden_SH = hidden_SH.to(weight_VH.dtype)
        if group.size() == 1:
            logprobs_S, entropies_S = chunked_logprobs(
                hidden_SH,
                weight_VH,
                targets_S,
                temperature=temperature,
                chunk_tokens=self.chunk_tokens,
                with_entropy=with_entropy,
                kept=kept,
            )
            return (logprobs_S,) if entropies_S is None else (logprobs_S, entropies_S)
        scores_S = parallel_logprobs(
            hidden_SH,
            weight_VH,
            targets_S,
            first_row=first_row,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            group=group,
            with_entropy=with_entropy,
            kept=kept,
        )
        return scores_S if with_entropy else scores_S[:1]

    def _weight(self) -> Tensor:
        if self.model.share_embeddings_and_output_weights:
            return self.model.shared_embedding_or_output_weight()
        return self.model.output_layer.weight


def _return_hidden_states(model: Any) -> None:
    """Makes the last stage's model return its last hidden states, whole on every tensor rank, instead of logits."""
    is_sequence_parallel = model.config.sequence_parallel

    def forward(
        hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        if is_sequence_parallel:
            # Each tensor rank continues with its own rows of the vocabulary, so gradients must be summed over ranks.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        return hidden, None

    model.output_layer.forward = forward


def zero_of(hidden_BSH: Tensor) -> Tensor:
    """Returns a loss of 0 with a gradient of zeros, for a micro-batch without sequences or without a loss."""
    return torch.zeros_like(hidden_BSH).mul(hidden_BSH).sum()
