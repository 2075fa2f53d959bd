"""Weights of a model in Hugging Face format, written file by file: never more than one file's tensors exist."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from rl_core.weights import pack_buckets, unpack_bucket

ADAPTER_FOLDER = "adapter"
"""Of a saved model: the adapters alone, as `peft.PeftModel.from_pretrained` reads them."""
_MAX_FILE_BYTES = 2 << 30


def write_weights(
    tensors: Iterable[tuple[str, Tensor]], directory: Path, *, max_file_bytes: int = _MAX_FILE_BYTES
) -> None:
    """One file, or several and their index, as transformers reads them.

    Args:
        tensors: whole ones by their Hugging Face names, on any device; made as they are asked for.
        directory: is made; files of an earlier model in it are not removed.
        max_file_bytes: of a file; a larger tensor has one of its own.
    """
    directory.mkdir(parents=True, exist_ok=True)
    parts, num_bytes = [], 0
    for bucket in pack_buckets(tensors, max_file_bytes):
        part = directory / f"part-{len(parts)}"
        # Copies: views of one memory are not what safetensors writes.
        copies = {name: tensor.to("cpu", copy=True) for name, tensor in unpack_bucket(bucket)}
        save_file(copies, part, {"format": "pt"})
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
