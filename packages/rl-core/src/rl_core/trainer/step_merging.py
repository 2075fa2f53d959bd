"""Merges the steps of multi-turn trajectories into fewer, longer sequences that train exactly alike."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_core.batch import Batch, field_of
from rl_core.columns import ROUTE_COLUMNS, STEP_COLUMNS
from rl_core.errors import DataError
from rl_core.layout.merging import PrefixMerge, merge_prefixes

_ZERO_IN_PROMPTS = ("loss_mask", "loss_weights", "rewards")


def merge_steps(batch: Batch) -> tuple[Batch, PrefixMerge]:
    """A batch in which steps whose prompt continues the step before them are one sequence.

    Every sampled token keeps its log-probs, reward, mask, advantage and weight, at the place where it was sampled. So
    the gradient of a per-token loss is that of the steps, if advantages and loss weights are there already; a mean per
    sequence made afterwards, or a ratio per sequence (GSPO), sees the merged ones. `step_index` is renumbered.

    Args:
        batch: with `sampled` and the columns of `columns.STEP_COLUMNS`; rows in any order.

    Returns:
        The merged batch, and the merge with its `tokens_saved`.

    Raises:
        DataError: an incomplete trajectory, or a step with rewards or loss on prompt tokens that an earlier step has.
        ShapeError: a column is missing.
    """
    merge = merge_prefixes(
        batch.offsets.numpy(),
        batch["tokens"].numpy(),
        batch["sampled"].numpy(),
        **{f"{name}_N": batch[name].numpy() for name in STEP_COLUMNS},
    )
    _require_nothing_lost(batch, merge)
    columns = {name: values[_rows_of(name, merge)] for name, values in batch.columns.items()}
    columns["step_index"] = _position_in_trajectory(columns["trajectory_id"], columns["step_index"])
    return Batch(torch.from_numpy(merge.offsets), columns), merge


def _rows_of(name: str, merge: PrefixMerge) -> Tensor:
    if field_of(name).axes[0] == "N":
        return torch.from_numpy(merge.last_step)
    return torch.from_numpy(merge.input_index if name in ROUTE_COLUMNS else merge.token_index)


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
                f"{token - int(batch.offsets[row])}, which is prompt there and belongs to an earlier step: put it there"
            )


def _position_in_trajectory(trajectory_id_M: Tensor, step_index_M: Tensor) -> Tensor:
    """int64 [M]: how many sequences of the same trajectory come before each."""
    order = torch.argsort(step_index_M, stable=True)
    order = order[torch.argsort(trajectory_id_M[order], stable=True)]
    place = torch.arange(len(order))
    starts = torch.cat([torch.ones(1, dtype=torch.bool), trajectory_id_M[order].diff() != 0])
    return torch.empty_like(place).index_copy_(0, order, place - place[starts][starts.cumsum(0) - 1])
