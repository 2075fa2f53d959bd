"""State of a worker on disk: weights, optimizer, schedule. Reading it gives all of it, or a CheckpointError."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_core.errors import CheckpointError

_WEIGHTS, _OPTIMIZER = "weights.safetensors", "optimizer.pt"


def write_state(directory: Path, weights: Mapping[str, Tensor], optimizer: Mapping[str, Any] | None) -> None:
    """Writes both files; `optimizer` is None for a model that is not trained."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.detach().contiguous() for name, weight in weights.items()}, directory / _WEIGHTS)
    if optimizer is not None:
        torch.save(dict(optimizer), directory / _OPTIMIZER)


def read_weights(directory: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights by name, on the CPU. Raises CheckpointError if they are not exactly those of `expected`."""
    path = directory / _WEIGHTS
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: missing or incomplete ({error}); resume from an earlier checkpoint") from error
    for name in sorted(weights.keys() | expected.keys()):
        have, want = (_describe(tensors.get(name)) for tensors in (weights, expected))
        if have != want:
            raise CheckpointError(
                f"{path}: {name} is {have}, this model's is {want}; the checkpoint belongs to another model"
            )
    return weights


def read_optimizer(directory: Path) -> dict[str, Any]:
    """What `write_state` was given as `optimizer`. Raises CheckpointError."""
    path = directory / _OPTIMIZER
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: missing or incomplete ({error}); resume from an earlier checkpoint") from error


def _describe(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
