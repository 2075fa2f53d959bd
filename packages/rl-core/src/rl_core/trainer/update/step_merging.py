"""Merges steps of multi-turn trajectories into fewer, longer sequences, so that tokens they share are computed once."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_core.batch import Batch
from rl_core.columns import ROUTE_COLUMNS, STEP_COLUMNS
from rl_core.errors import DataError
from rl_core.layout.merging import PrefixMerge, merge_prefixes

_ZERO_IN_PROMPTS = ("loss_mask", "loss_weights", "rewards")


def merge_steps(batch: Batch) -> tuple[Batch, PrefixMerge]:
    """Merges each step with the previous step if the step's prompt continues the previous step's tokens.

    Every sampled token keeps its log-probs, reward, mask, advantage and weight, at the position where it was sampled.
    Advantages and loss weights are the same before and after merging, and so is the gradient of a per-token loss. A
    ratio per sequence (GSPO) is taken over the whole merged sequence. `step_index` is renumbered.

    Args:
        batch: has `sampled` and the columns of `columns.STEP_COLUMNS`. Its rows may be in any order.

    Returns:
        The merged batch, and the merge (its `tokens_saved` is a metric).

    Raises:
        DataError: a trajectory is incomplete; or a step has rewards, a loss mask or loss weights on prompt tokens that
            the merge drops, because they are part of an earlier step.
        ShapeError: a column is missing.
    """
    merge = merge_prefixes(
        batch.offsets.numpy(),
        batch["tokens"].numpy(),
        batch["sampled"].numpy(),
        **{f"{name}_N": batch[name].numpy() for name in STEP_COLUMNS},
    )
    _require_nothing_lost(batch, merge)
    columns = {name: values[_rows_of(name, batch, merge)] for name, values in batch.columns.items()}
    columns["step_index"] = _position_in_trajectory(columns["trajectory_id"], columns["step_index"])
    return Batch(torch.from_numpy(merge.offsets), columns), merge


def _rows_of(name: str, batch: Batch, merge: PrefixMerge) -> Tensor:
    tokens = merge.input_index if name in ROUTE_COLUMNS else merge.token_index
    return batch.rows_of(name, torch.from_numpy(tokens), torch.from_numpy(merge.last_step))


def _require_nothing_lost(batch: Batch, merge: PrefixMerge) -> None:
    dropped_T = torch.ones(batch.num_tokens, dtype=torch.bool)
    dropped_T[torch.from_numpy(merge.token_index)] = False
    for name in _ZERO_IN_PROMPTS:
        lost_T = dropped_T & (batch[name] != 0) if name in batch else dropped_T.new_zeros(1)
        if bool(lost_T.any()):
            token = int(lost_T.nonzero()[0])
            row = int(batch.sequence_index[token])
            raise DataError(
                f"row {row} (trajectory {int(batch['trajectory_id'][row])}): {name} is not zero at token "
                f"{token - int(batch.offsets[row])}, a prompt token that belongs to an earlier step; set the value in "
                "that step"
            )


def _position_in_trajectory(trajectory_id_M: Tensor, step_index_M: Tensor) -> Tensor:
    """int64 [M]: for each sequence, the number of earlier sequences of the same trajectory."""
    order = torch.argsort(step_index_M, stable=True)
    order = order[torch.argsort(trajectory_id_M[order], stable=True)]
    place = torch.arange(len(order))
    starts = torch.cat([torch.ones(1, dtype=torch.bool), trajectory_id_M[order].diff() != 0])
    return torch.empty_like(place).index_copy_(0, order, place - place[starts][starts.cumsum(0) - 1])
