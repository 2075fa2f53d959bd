"""A micro-batch as the model takes it: one packed stream, or a rectangle padded on the right."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from rl_core.batch import Batch
from rl_fsdp.attention import PackedSequences


@attrs.frozen(eq=False)
class ModelInput:
    """Tokens for the model, and which of its outputs are scored. B rows of L cells, S scores."""

    tokens_BL: Tensor
    positions_BL: Tensor | None
    """None for a rectangle: every model then counts from 0 in each row."""
    packed: PackedSequences | None
    """None for a rectangle, whose padding no real token sees: attention is causal and the padding is on the right."""
    source_S: Tensor
    """int64, the cell (row-major) whose hidden state predicts score s."""
    target_S: Tensor
    """int64, the predicted token's id."""


def predicted_tokens(batch: Batch, *, among: Tensor | None = None) -> Tensor:
    """int64 [S], stream indices of all tokens (of the mask `among` [T]) but each sequence's first."""
    is_predicted_T = torch.ones(batch.num_tokens, dtype=torch.bool) if among is None else among.clone()
    is_predicted_T[batch.offsets[:-1]] = False
    return is_predicted_T.nonzero().squeeze(1)


def model_input(batch: Batch, index_S: Tensor, *, use_sample_packing: bool, device: torch.device) -> ModelInput:
    """Lays out whole sequences for the model.

    Args:
        batch: the micro-batch.
        index_S: stream indices of the tokens to score.
        use_sample_packing: one stream for all sequences; else one row for each.
        device: where the model is.
    """
    lengths_N, tokens_T = batch.lengths, batch["tokens"]
    positions_T = torch.arange(batch.num_tokens) - torch.repeat_interleave(batch.offsets[:-1], lengths_N)
    if use_sample_packing:
        tokens_BL, positions_BL, cell_T = tokens_T[None], positions_T[None], torch.arange(batch.num_tokens)
    else:
        width = int(lengths_N.max())
        cell_T = batch.sequence_index * width + positions_T
        tokens_BL = tokens_T.new_zeros(batch.num_sequences * width).index_copy_(0, cell_T, tokens_T).view(-1, width)
        positions_BL = None
    return ModelInput(
        tokens_BL=tokens_BL.to(device),
        positions_BL=None if positions_BL is None else positions_BL.to(device),
        packed=PackedSequences.of_lengths(lengths_N, device) if use_sample_packing else None,
        source_S=cell_T[index_S - 1].to(device),
        target_S=tokens_T[index_S].to(device),
    )
