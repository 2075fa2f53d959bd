"""A micro-batch as model input, either a packed stream or a right-padded rectangle, and its hidden states."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rl_core.algorithms.logprobs import KeptIds
from rl_core.batch import Batch, token_inputs
from rl_core.errors import ConfigError
from rl_core.layout.prefixes import input_cells, prefix_forest, separate_sequences
from rl_core.layout.slices import even_slice, inverse_index, padded_layout
from rl_core.rank_kit.device_copies import on_device
from rl_core.rank_kit.kept_ids import kept_ids
from rl_core.rank_kit.row_moves import gather_rows, scatter_rows
from rl_transformers.rank.packed_sequences import PackedSequences
from rl_transformers.rank.rank_mesh import UlyssesGroup
from rl_transformers.rank.ulysses import sum_over_ranks


@attrs.frozen(eq=False)
class ModelInput:
    """The model's input, B rows of L cells (each is a token or padding), and the S outputs from which scores are
    computed."""

    tokens_BL: Tensor
    positions_BL: Tensor | None
    """None for a rectangle on one rank: every model then counts positions from 0 in each row."""
    packed: PackedSequences | None
    """None for a rectangle on one rank: attention is causal, so no real token sees the padding on its right."""
    source_S: Tensor
    """int64; score s is computed from the hidden state of cell `source_S[s]` (row-major)."""
    target_S: Tensor
    """int64, id of the predicted token."""
    routes: Routes | None
    """None: the model's routers choose the experts."""
    slice: UlyssesSlice | None
    """None: this rank computes all scores of the micro-batch."""
    kept: KeptIds | None = None
    """The ids to which sampling restricted the distribution of each predicted token; None: to none."""
    score_S: Tensor | None = None
    """int64, for each token to score, the index of its score among the computed scores. Sequences with a shared prefix
    share the prefix's scores. None: every token has a separate score."""

    def scored_by(self, scorer: nn.Module, *, temperature: float, **options: bool) -> tuple[Tensor, ...]:
        """The scores of the whole micro-batch, even if this rank computes only a slice of them.

        Args:
            scorer: the model.
            temperature: divides the logits.
            options: further options of the scorer.
        """
        scores = scorer(self, temperature=temperature, **options)
        if self.slice is not None:
            scores = tuple(self.slice.whole(values_S) for values_S in scores)
        return scores if self.score_S is None else tuple(values_S.index_select(0, self.score_S) for values_S in scores)


@attrs.frozen(eq=False)
class Routes:
    """The experts of the tokens in the B · L cells, row-major."""

    experts_CLK: Tensor
    """uint8 or int16, for all transformer layers."""
    is_known_C: Tensor
    """bool; False for padding and unknown routes."""


@attrs.frozen(eq=False)
class UlyssesSlice:
    """The part of a micro-batch's scores that one rank of a group computes."""

    index_S: Tensor
    """int64, indices of this rank's scores among the `num_scores`."""
    num_scores: int
    group: UlyssesGroup

    def whole(self, scores_S: Tensor) -> Tensor:
        """Gathers the scores of all ranks on every rank of the group, [num_scores]. The gradient flows only to this
        rank's scores."""
        return sum_over_ranks(scatter_rows(scores_S, self.index_S, self.num_scores), self.group)


def predicted_tokens(batch: Batch, *, among: Tensor | None = None) -> Tensor:
    """Returns the stream indices of all tokens except each sequence's first, int64 [S]. `among`, bool [T]: only tokens
    for which it is True."""
    is_predicted_T = torch.ones(batch.num_tokens, dtype=torch.bool) if among is None else among.clone()
    is_predicted_T[batch.offsets[:-1]] = False
    return is_predicted_T.nonzero().squeeze(1)


def require_own_frequencies(config: PretrainedConfig, longest: int, num_sequences: int) -> None:
    """Raises ConfigError if a sequence of a micro-batch would get rotary frequencies that depend on other sequences.

    With `dynamic` and `longrope` scaling, transformers chooses the frequencies of the whole input by its largest
    position; with `dynamic`, also by the largest position of earlier inputs.

    Args:
        config: the text model's configuration.
        longest: tokens of the micro-batch's longest sequence.
        num_sequences: number of sequences of the micro-batch.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):
        kind = part.get("rope_type") if isinstance(part, Mapping) else None
        if kind not in ("dynamic", "longrope") or (kind == "longrope" and num_sequences == 1):
            continue
        original = part.get("original_max_position_embeddings") if kind == "longrope" else None
        limit = original or config.max_position_embeddings
        if longest > limit:
            alone = "compute one sequence per micro-batch (micro_…_batch_size_per_gpu=1, max_tokens_per_microbatch=-1)"
            raise ConfigError(
                f"{config.model_type}: got a sequence of {longest} tokens; with rope_type={kind}, a sequence of more "
                f"than {limit} tokens changes the rotary frequencies of other sequences. Limit prompt and response to "
                f"{limit} tokens together, or {alone if kind == 'longrope' else 'choose another model'}"
            )


def model_input(
    batch: Batch,
    index_S: Tensor,
    *,
    use_sample_packing: bool,
    share_prefixes: bool,
    device: torch.device,
    ulysses: UlyssesGroup | None = None,
) -> ModelInput:
    """Lays out whole sequences for the model.

    Args:
        batch: the micro-batch.
        index_S: stream indices of the tokens to score.
        use_sample_packing: whether all sequences form one stream; else each sequence is a row.
        share_prefixes: whether a prefix that sequences share is in the stream only once. Ignored without packing.
        device: the model's device.
        ulysses: the ranks that split the micro-batch; each holds an equal part of the cells of every row.
    """
    multiple, score_S = ulysses.size if ulysses else 1, None
    if use_sample_packing:
        offsets = batch.offsets.numpy()
        forest = prefix_forest(offsets, *token_inputs(batch)) if share_prefixes else separate_sequences(offsets)
        cells = input_cells(forest, offsets, total_multiple=multiple)
        index_BL = torch.from_numpy(cells.index_C).view(1, -1)
        positions_BL = torch.from_numpy(cells.position_C).view(1, -1)
        cell_T = torch.from_numpy(cells.cell_T)
        packed = PackedSequences.of_nodes(cells, device, ulysses=ulysses)
        # Compare the number of cells instead of reading `packed.shared`: if sequences differ only in their last tokens,
        # which are not in the input, they share cells although `packed.shared` is None.
        if forest.num_cells < batch.num_tokens:
            index_S, score_S = _first_of_each(index_S, _scored_cells(batch, torch.from_numpy(forest.cell_T)))
    else:
        layout = padded_layout(batch.offsets, np.arange(batch.num_sequences), width_multiple=multiple)
        index_BL = torch.from_numpy(layout.index).view(batch.num_sequences, -1)
        positions_BL = torch.from_numpy(layout.position).view(batch.num_sequences, -1)
        cell_T = torch.from_numpy(inverse_index([layout.index], batch.num_tokens))
        rows = np.diff(layout.boundaries)
        packed = PackedSequences.of_lengths(rows, device, ulysses=ulysses) if ulysses is not None else None
    tokens_BL = torch.where(index_BL >= 0, batch["tokens"][index_BL.clamp(min=0)], 0)
    source_S, target_S, slice_ = cell_T[index_S - 1], batch["tokens"][index_S], None
    if ulysses is not None:
        columns = even_slice(index_BL.shape[1], ulysses.rank, ulysses.size)
        row_S, column_S = source_S // index_BL.shape[1], source_S % index_BL.shape[1]
        own_S = ((column_S >= columns.start) & (column_S < columns.stop)).nonzero().squeeze(1)
        source_S = (row_S * (columns.stop - columns.start) + column_S - columns.start)[own_S]
        slice_ = UlyssesSlice(on_device(own_S, device), len(index_S), ulysses)
        index_BL, index_S, target_S = index_BL[:, columns], index_S[own_S], target_S[own_S]
        tokens_BL, positions_BL = tokens_BL[:, columns], positions_BL[:, columns]
    return ModelInput(
        tokens_BL=on_device(tokens_BL, device),
        positions_BL=None if packed is None else on_device(positions_BL, device),
        packed=packed,
        source_S=on_device(source_S, device),
        target_S=on_device(target_S, device),
        routes=_routes(batch, index_BL.flatten(), device) if "routed_experts" in batch else None,
        slice=slice_,
        kept=kept_ids(batch, index_S, device),
        score_S=None if score_S is None else on_device(score_S, device),
    )


def _scored_cells(batch: Batch, cell_T: Tensor) -> Tensor:
    """Returns equal numbers for tokens that have the same score: those in the same cell whose distributions have the
    whole vocabulary."""
    if "kept_counts" not in batch:
        return cell_T
    return torch.where(batch["kept_counts"] > 0, batch.num_tokens + torch.arange(batch.num_tokens), cell_T)


def _first_of_each(index_S: Tensor, cell_T: Tensor) -> tuple[Tensor, Tensor]:
    """Reduces the tokens `index_S` to one token per distinct cell. Returns these tokens, and for each token of
    `index_S` the index of the returned token that is in the same cell."""
    cells, score_S = torch.unique(cell_T[index_S], return_inverse=True)
    return torch.empty_like(cells).index_copy_(0, score_S, index_S), score_S


def predicting_states(model: PreTrainedModel, inputs: ModelInput, compute_dtype: torch.dtype) -> Tensor:
    """[S, H] in `compute_dtype`: for every scored token, the hidden state that predicts it."""
    packing = {}
    if inputs.packed is not None:
        packing = {"position_ids": inputs.positions_BL, "packed_sequences": inputs.packed}
    with autocast(model, compute_dtype):
        hidden_BLH = model.base_model(input_ids=inputs.tokens_BL, use_cache=False, **packing).last_hidden_state
    hidden_CH, source_S = hidden_BLH.flatten(0, 1), inputs.source_S
    # A token of a shared prefix may predict several tokens, whose gradients must be summed.
    states_SH = gather_rows(hidden_CH, source_S) if inputs.score_S is None else hidden_CH.index_select(0, source_S)
    return states_SH.to(compute_dtype)


def autocast(model: PreTrainedModel, compute_dtype: torch.dtype) -> torch.autocast:
    """Returns a context that autocasts to bfloat16 if this is the compute dtype, and otherwise has no effect."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=compute_dtype == torch.bfloat16)


def _routes(batch: Batch, index_C: Tensor, device: torch.device) -> Routes:
    token_C = index_C.clamp(min=0)
    is_known_C = batch["routed"][token_C] & (index_C >= 0)
    return Routes(on_device(batch["routed_experts"][token_C], device), on_device(is_known_C, device))
