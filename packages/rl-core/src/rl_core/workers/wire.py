"""A batch as numpy arrays, the form in which it crosses processes.

numpy arrays lie in shared memory and are read there without a copy; torch tensors would be pickled. What arrives is
read-only, as every batch is.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from rl_core.batch import Batch, field_of

_OFFSETS = "offsets"


def to_arrays(batch: Batch, sequences_M: np.ndarray) -> dict[str, np.ndarray]:
    """Offsets and columns of `batch.select(sequences_M)`, by name.

    Whole sequences are copied one after the other, which is several times faster than an index over their tokens.
    """
    offsets = batch.offsets.numpy()
    sequences = [slice(start, end) for start, end in zip(offsets[sequences_M], offsets[sequences_M + 1], strict=True)]
    lengths_M = offsets[sequences_M + 1] - offsets[sequences_M]
    arrays = {_OFFSETS: np.concatenate([[0], np.cumsum(lengths_M)])}
    for name, values in batch.columns.items():
        column = values.detach().cpu().numpy()
        per_token = field_of(name).axes[0] == "T"
        arrays[name] = np.concatenate([column[part] for part in sequences]) if per_token else column[sequences_M]
    return arrays


def from_arrays(arrays: Mapping[str, np.ndarray]) -> Batch:
    """The batch that `to_arrays` was given, as views of the arrays. Raises ShapeError."""
    tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
    return Batch(tensors.pop(_OFFSETS), tensors)
