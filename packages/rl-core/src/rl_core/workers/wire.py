"""A batch as numpy arrays, the form in which it crosses processes.

numpy arrays lie in shared memory and are read there without a copy; torch tensors would be pickled. What arrives is
read-only, as every batch is.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from rl_core.batch import Batch

_OFFSETS = "offsets"


def to_arrays(batch: Batch) -> dict[str, np.ndarray]:
    """Offsets and columns by name; views where the columns lie contiguous on the CPU."""
    columns = {name: values.detach().cpu().contiguous().numpy() for name, values in batch.columns.items()}
    return {_OFFSETS: batch.offsets.numpy(), **columns}


def from_arrays(arrays: Mapping[str, np.ndarray]) -> Batch:
    """The batch that `to_arrays` was given, as views of the arrays. Raises ShapeError."""
    tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
    return Batch(tensors.pop(_OFFSETS), tensors)


def num_bytes(batch: Batch) -> int:
    """What `to_arrays` sends."""
    return sum(values.nbytes for values in (batch.offsets, *batch.columns.values()))
