"""The files of a model in Hugging Face format: weights (written file by file, with only one file's tensors in memory),
configuration, and a critic's head.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_core.errors import ConfigError, DiskFullError, StorageError
from rl_core.rank_kit.publishing import pack_on_first
from rl_core.rank_kit.weight_buckets import draining, unpack_bucket
from rl_core.stored_files import is_disk_full

ADAPTER_FOLDER = "adapter"
"""Folder of a saved model that contains only the adapters, as `peft.PeftModel.from_pretrained` reads them."""
HEAD_FILE = "value_head.safetensors"
"""File of a critic's head, next to the base model's files: `value_head.weight` [1, H] and `value_head.bias` [1],
float32 (float64 for a float64 model)."""
MAX_FILE_BYTES = 2 << 30


@contextmanager
def writing_model(directory: Path) -> Iterator[None]:
    """Context for the code that writes a model's files.

    Raises:
        StorageError: the storage failed; DiskFullError if the disk was full.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        what = f"{directory}: could not be written ({type(error).__name__}: {error})"
        if is_disk_full(error, directory):
            raise DiskFullError(f"disk full: {what}") from error
        raise StorageError(what) from error


def write_weights(
    tensors: Iterator[tuple[str, Tensor]],
    directory: Path,
    *,
    is_first: bool = True,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes the weights as transformers reads them: to one file, or to several files with an index.

    Args:
        tensors: whole tensors with their Hugging Face names, on any device. Advancing the iterator is collective.
        directory: the model's directory; created if missing. Files of an earlier model in it are not removed.
        is_first: whether this rank writes; the others only drain `tensors`.
        max_file_bytes: largest size of a file; a larger tensor has its own file.
    """
    parts, num_bytes = [], 0
    buckets = pack_on_first(tensors, max_file_bytes, is_first=is_first)
    if not is_first:
        for _ in buckets:
            pass
        return
    with draining(buckets):
        directory.mkdir(parents=True, exist_ok=True)
        for bucket in buckets:
            part = directory / f"part-{len(parts)}"
            # Copies, because safetensors does not write views that share memory.
            copies = {name: tensor.to("cpu", copy=True) for name, tensor in unpack_bucket(bucket)}
            save_file(copies, part, {"format": "pt"})
            parts.append((part, bucket.names))
            num_bytes += bucket.data.numel()
    if len(parts) == 1:
        parts[0][0].rename(directory / "model.safetensors")
        return
    file_of = {}
    # Files are renamed at the end, because their names contain the number of files.
    for i, (part, names) in enumerate(parts, start=1):
        file = part.rename(directory / f"model-{i:05d}-of-{len(parts):05d}.safetensors")
        file_of.update(dict.fromkeys(names, file.name))
    index = {"metadata": {"total_size": num_bytes}, "weight_map": file_of}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_config(config: Any, directory: Path, *, dtype: torch.dtype, generation: Any = None, **changes: Any) -> None:
    """Writes `config.json` and, if `generation` is given, `generation_config.json`.

    Args:
        config: transformers' configuration of the model.
        directory: the model's directory.
        dtype: dtype of the weights in the files.
        generation: transformers' GenerationConfig, if the model has one.
        changes: fields of `config.json` to set in addition.
    """
    config.save_pretrained(directory)
    if generation is not None:
        # `save_pretrained` rejects settings that some public models have, such as a temperature without `do_sample`.
        generation.to_json_file(directory / "generation_config.json", keys_to_pop=["compile_config"])
    file = directory / "config.json"
    fields = json.loads(file.read_text()) | {"dtype": str(dtype).removeprefix("torch.")} | changes
    file.write_text(json.dumps(fields, indent=2) + "\n")


def require_all_weights(missing: Collection[str], what: str) -> None:
    """Requires that a model's files have every weight: transformers fills in random values for missing weights.

    Args:
        missing: `missing_keys` of `from_pretrained(…, output_loading_info=True)`.
        what: key and path of the model, for the message.

    Raises:
        ConfigError: a weight is missing.
    """
    if missing:
        raise ConfigError(
            f"{what} has no weights for {len(missing)} parameters of the model, for example {min(missing)}; expected a "
            "complete model"
        )


def write_head(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Writes a critic's head to `HEAD_FILE`. `tensors`: weight and bias, named as in this file."""
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, directory / HEAD_FILE, {"format": "pt"})


def read_head(directory: str, expected: Mapping[str, Tensor], where: str) -> dict[str, Tensor] | None:
    """Returns the head that `write_head` wrote, on the CPU. None: there is no such file, so the model is not a critic.

    Args:
        directory: the model's directory.
        expected: the head of the critic that loads the file; only names and shapes are compared.
        where: section of the configuration, for messages.

    Raises:
        ConfigError: names or shapes differ from those of `expected`, or the file is damaged.
    """
    file = Path(directory) / HEAD_FILE
    if not file.is_file():
        return None
    try:
        head = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{file} cannot be read ({error}); save the critic again", key=f"{where}.model.path"
        ) from error
    for name in sorted(expected.keys() | head.keys()):
        found, wanted = (
            f"shape {list(tensors[name].shape)}" if name in tensors else "no such tensor"
            for tensors in (head, expected)
        )
        if found != wanted:
            raise ConfigError(
                f"{name} in {file}: got {found}; expected {wanted}, as in this model. Save the critic again, or remove "
                "the file to start with a new head",
                key=f"{where}.model.path",
            )
    return head
