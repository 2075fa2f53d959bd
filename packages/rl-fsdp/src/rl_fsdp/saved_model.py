"""A model in Hugging Face format, written shard by shard: no rank ever holds more than one file of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from rl_core.weights import pack_buckets, unpack_bucket

_MAX_FILE_BYTES = 2 << 30


def write_weights(tensors: Iterator[tuple[str, Tensor]], directory: Path, *, is_first: bool) -> None:
    """Drains `tensors` (whole ones, gathered as they are asked for) on every rank; rank 0 writes them.

    One file, or several and their index, as transformers reads them.
    """
    if not is_first:
        for _ in tensors:
            pass
        return
    directory.mkdir(parents=True, exist_ok=True)
    parts, num_bytes = [], 0
    for bucket in pack_buckets(tensors, _MAX_FILE_BYTES):
        part = directory / f"part-{len(parts)}"
        save_file({name: tensor.clone() for name, tensor in unpack_bucket(bucket)}, part, {"format": "pt"})
        parts.append((part, bucket.names))
        num_bytes += bucket.data.numel()
    if len(parts) == 1:
        parts[0][0].rename(directory / "model.safetensors")
        return
    file_of = {}
    for i, (part, names) in enumerate(parts, start=1):
        file = part.rename(directory / f"model-{i:05d}-of-{len(parts):05d}.safetensors")
        file_of.update(dict.fromkeys(names, file.name))
    index = {"metadata": {"total_size": num_bytes}, "weight_map": file_of}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_config(model: PreTrainedModel, dtype: torch.dtype, directory: Path) -> None:
    """The configuration, naming the class and the dtype of the weights, and how the model generates."""
    model.config.save_pretrained(directory)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config |= {"architectures": [type(model).__name__], "dtype": str(dtype).removeprefix("torch.")}
    file.write_text(json.dumps(config, indent=2) + "\n")
