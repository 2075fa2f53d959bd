"""A micro-batch as the model takes it: one packed stream, or a rectangle padded on the right; and its hidden states."""

from __future__ import annotations

import attrs
import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_core.batch import Batch
from rl_core.layout.slices import even_slice, inverse_index, packed_layout, padded_layout
from rl_core.rank_kit.row_moves import gather_rows, scatter_rows
from rl_core.rank_kit.scoring.attention import PackedSequences
from rl_core.rank_kit.scoring.rank_mesh import UlyssesGroup
from rl_core.rank_kit.scoring.ulysses import sum_over_ranks


@attrs.frozen(eq=False)
class ModelInput:
    """Tokens for the model, and which of its outputs are scored. B rows of L cells, S scores."""

    tokens_BL: Tensor
    positions_BL: Tensor | None
    """None for a rectangle on one rank: every model then counts from 0 in each row."""
    packed: PackedSequences | None
    """None for a rectangle on one rank: its padding is on the right, and attention causal, so no real token sees it."""
    source_S: Tensor
    """int64, the cell (row-major) whose hidden state predicts score s."""
    target_S: Tensor
    """int64, the predicted token's id."""
    routes: Routes | None
    """None: every token goes where the model's routers send it."""
    slice: UlyssesSlice | None
    """None: all scores of the micro-batch are made here."""

    def scored_by(self, scorer: nn.Module, *, temperature: float, **options: bool) -> tuple[Tensor, ...]:
        """The scores of the whole micro-batch, also where this rank makes a slice of them.

        Args:
            scorer: the model.
            temperature: divides the logits.
            options: the scorer's own.
        """
        scores = scorer(self, temperature=temperature, **options)
        return scores if self.slice is None else tuple(self.slice.whole(values_S) for values_S in scores)


@attrs.frozen(eq=False)
class Routes:
    """Where the tokens of the B · L cells, row by row, were sent."""

    experts_CLK: Tensor
    """uint8 or int16, for all transformer layers."""
    is_known_C: Tensor
    """bool; False for padding."""


@attrs.frozen(eq=False)
class UlyssesSlice:
    """Which of a micro-batch's scores one rank of a group makes."""

    index_S: Tensor
    """int64, their places among the `num_scores`."""
    num_scores: int
    group: UlyssesGroup

    def whole(self, scores_S: Tensor) -> Tensor:
        """[num_scores], on every rank of the group. Their gradient goes to this rank's own ones only."""
        return sum_over_ranks(scatter_rows(scores_S, self.index_S, self.num_scores), self.group)


def predicted_tokens(batch: Batch, *, among: Tensor | None = None) -> Tensor:
    """int64 [S], stream indices of all tokens (of the mask `among` [T]) but each sequence's first."""
    is_predicted_T = torch.ones(batch.num_tokens, dtype=torch.bool) if among is None else among.clone()
    is_predicted_T[batch.offsets[:-1]] = False
    return is_predicted_T.nonzero().squeeze(1)


def model_input(
    batch: Batch,
    index_S: Tensor,
    *,
    use_sample_packing: bool,
    device: torch.device,
    ulysses: UlyssesGroup | None = None,
) -> ModelInput:
    """Lays out whole sequences for the model.

    Args:
        batch: the micro-batch.
        index_S: stream indices of the tokens to score.
        use_sample_packing: one stream for all sequences; else one row for each.
        device: where the model is.
        ulysses: the ranks that share it; each holds an even part of the cells of every row.
    """
    multiple, sequences = ulysses.size if ulysses else 1, np.arange(batch.num_sequences)
    if use_sample_packing:
        layout = packed_layout(batch.offsets, sequences, total_multiple=multiple)
        num_rows, lengths = 1, np.diff(layout.boundaries)
    else:
        layout = padded_layout(batch.offsets, sequences, width_multiple=multiple)
        num_rows, lengths = batch.num_sequences, np.diff(layout.boundaries)
    index_BL = torch.from_numpy(layout.index).view(num_rows, -1)
    tokens_BL = torch.where(index_BL >= 0, batch["tokens"][index_BL.clamp(min=0)], 0)
    positions_BL = torch.from_numpy(layout.position).view(num_rows, -1)
    source_S = torch.from_numpy(inverse_index([layout.index], batch.num_tokens))[index_S - 1]
    target_S, slice_ = batch["tokens"][index_S], None
    if ulysses is not None:
        columns = even_slice(index_BL.shape[1], ulysses.rank, ulysses.size)
        row_S, column_S = source_S // index_BL.shape[1], source_S % index_BL.shape[1]
        own_S = ((column_S >= columns.start) & (column_S < columns.stop)).nonzero().squeeze(1)
        source_S = (row_S * (columns.stop - columns.start) + column_S - columns.start)[own_S]
        index_BL, target_S = index_BL[:, columns], target_S[own_S]
        tokens_BL, positions_BL = tokens_BL[:, columns], positions_BL[:, columns]
        slice_ = UlyssesSlice(own_S.to(device), len(index_S), ulysses)
    has_bounds = use_sample_packing or ulysses is not None
    return ModelInput(
        tokens_BL=tokens_BL.to(device),
        positions_BL=positions_BL.to(device) if has_bounds else None,
        packed=PackedSequences.of_lengths(torch.from_numpy(lengths), device, ulysses=ulysses) if has_bounds else None,
        source_S=source_S.to(device),
        target_S=target_S.to(device),
        routes=_routes(batch, index_BL.flatten(), device) if "routed_experts" in batch else None,
        slice=slice_,
    )


def predicting_states(model: PreTrainedModel, inputs: ModelInput, compute_dtype: torch.dtype) -> Tensor:
    """[S, H] in `compute_dtype`: for every scored token the state in which it is chosen, made from those before it."""
    packing = {}
    if inputs.packed is not None:
        packing = {"position_ids": inputs.positions_BL, "packed_sequences": inputs.packed}
    with autocast(model, compute_dtype):
        hidden_BLH = model.base_model(input_ids=inputs.tokens_BL, use_cache=False, **packing).last_hidden_state
    return gather_rows(hidden_BLH.flatten(0, 1), inputs.source_S).to(compute_dtype)


def autocast(model: PreTrainedModel, compute_dtype: torch.dtype) -> torch.autocast:
    """bfloat16 where that is computed in; else no casts."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=compute_dtype == torch.bfloat16)


def _routes(batch: Batch, index_C: Tensor, device: torch.device) -> Routes:
    token_C = index_C.clamp(min=0)
    is_known_C = batch["routed"][token_C] & (index_C >= 0)
    return Routes(batch["routed_experts"][token_C].to(device), is_known_C.to(device))
