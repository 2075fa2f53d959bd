"""The ids to which sampling restricted the distributions of a batch's tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_core.algorithms.logprobs import KeptIds
from rl_core.batch import Batch
from rl_core.rank_kit.device_copies import on_device


def kept_ids(batch: Batch, index_S: Tensor, device: torch.device) -> KeptIds | None:
    """The kept ids of the tokens with these stream indices; None if sampling was not truncated."""
    if "kept_counts" not in batch:
        return None
    ids_E = batch["kept_ids"][batch.rows_of("kept_ids", index_S, index_S)]
    return KeptIds(on_device(batch["kept_counts"][index_S], device), on_device(ids_E, device))
