"""A model in Hugging Face format: weights as they are gathered, configuration and tokenizer as they were."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from rl_core.errors import ConfigError
from rl_core.weights import pack_buckets, unpack_bucket

_MAX_FILE_BYTES = 2 << 30


def write_weights(tensors: Iterable[tuple[str, Tensor]], directory: Path) -> None:
    """One file, or several and their index, as transformers reads them; at most one file's tensors exist at a time."""
    directory.mkdir(parents=True, exist_ok=True)
    parts, num_bytes = [], 0
    for bucket in pack_buckets(tensors, _MAX_FILE_BYTES):
        part = directory / f"part-{len(parts)}"
        save_file({name: tensor.cpu().clone() for name, tensor in unpack_bucket(bucket)}, part, {"format": "pt"})
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


def write_config(config: Any, path: str, dtype: str, directory: Path) -> None:
    """Configuration (naming the dtype of the weights), tokenizer, and how the model generates where `path` says so.

    Raises:
        ConfigError: `path` has no tokenizer.
    """
    config.save_pretrained(directory)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": dtype}, indent=2) + "\n")
    if Path(path, "generation_config.json").is_file():
        GenerationConfig.from_pretrained(path).save_pretrained(directory)
    try:
        AutoTokenizer.from_pretrained(path).save_pretrained(directory)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: has no tokenizer that could be saved with the model: {error}") from error
