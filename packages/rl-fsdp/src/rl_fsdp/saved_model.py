"""A model in Hugging Face format, written shard by shard: no rank ever holds more than one file of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl_core.model_files import write_weights


def write_whole_weights(tensors: Iterator[tuple[str, Tensor]], directory: Path, *, is_first: bool) -> None:
    """Drains `tensors` (whole ones, gathered as they are asked for) on every rank; rank 0 writes them."""
    if is_first:
        write_weights(tensors, directory)
        return
    for _ in tensors:
        pass


def write_config(model: PreTrainedModel, dtype: torch.dtype, directory: Path) -> None:
    """The configuration, naming the class and the dtype of the weights, and how the model generates."""
    model.config.save_pretrained(directory)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config |= {"architectures": [type(model).__name__], "dtype": str(dtype).removeprefix("torch.")}
    file.write_text(json.dumps(config, indent=2) + "\n")
