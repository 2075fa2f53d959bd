"""What an engine's model is made of, by the names that weights travel under: those of the files it was loaded from.

vLLM's loaders copy into fused and padded tensors, and some take what does not fit: twice the rows of a `gate_proj` went
into the place of its `up_proj`. Of an adapter's matrix with too few rows it fills a part of the slot.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open

from rl_core.errors import WeightSyncError
from rl_core.interfaces import WeightBucket

_TIED_HEAD = "lm_head.weight"
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(gate|down)_proj\.weight")
_FUSED = {"gate": "gate_up_proj", "down": "down_proj"}
_LORA = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Names of torch, by those of the file format; of floating-point numbers that nothing is quantized to."""


@attrs.frozen
class StoredTensor:
    """A tensor of a checkpoint's files."""

    shape: tuple[int, ...]
    dtype: str
    """As torch names it, or as the file does where that is a quantized one."""


def stored_tensors(model_config: Any) -> dict[str, StoredTensor]:
    """By name: what is in the safetensors files of vLLM's `ModelConfig`; empty where it was not loaded from such."""
    directory = Path(model_config.model)
    if not directory.is_dir():
        try:
            cached = snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True)
        except LocalEntryNotFoundError:
            return {}
        directory = Path(cached)
    stored: dict[str, StoredTensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        stored |= tensors_of_file(path)
    return stored | _fused_experts(stored)


def tensors_of_file(path: Path) -> dict[str, StoredTensor]:
    """What a safetensors file holds, by name; only its header is read."""
    tensors: dict[str, StoredTensor] = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - an open file has keys and cannot be iterated
            part = file.get_slice(name)
            dtype = str(part.get_dtype())
            tensors[name] = StoredTensor(tuple(part.get_shape()), _DTYPES.get(dtype, dtype))
    return tensors


def _fused_experts(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The same experts as transformers holds them in memory: all of a layer in two tensors, which vLLM takes too."""
    fused: dict[str, StoredTensor] = {}
    num_experts: Counter[str] = Counter()
    for name, tensor in stored.items():
        if match := _EXPERT.fullmatch(name):
            layer, kind = match.groups()
            num_experts[f"{layer}.{kind}"] += 1
            rows, columns = tensor.shape
            shape = (num_experts[f"{layer}.{kind}"], *((2 * rows, columns) if kind == "gate" else (rows, columns)))
            fused[f"{layer}.{_FUSED[kind]}"] = attrs.evolve(tensor, shape=shape)
    return fused


def fitting(buckets: Iterator[WeightBucket], stored: Mapping[str, StoredTensor], dtype: str) -> Iterator[WeightBucket]:
    """The buckets, each once all its tensors are known to fit.

    Args:
        buckets: that arrive.
        stored: the engine's; empty: nothing is known, and nothing checked.
        dtype: that the engine computes in, as torch names it.

    Raises:
        WeightSyncError: names, shape or dtype of a tensor that the engine has no place for.
    """
    for bucket in buckets:
        for name, shape, given in zip(bucket.names, bucket.shapes, bucket.dtypes, strict=True):
            if stored and (name in stored or name != _TIED_HEAD):
                _require_fitting(name, tuple(shape), given, stored, dtype)
        yield bucket


def fitting_adapter(
    buckets: Iterator[WeightBucket], stored: Mapping[str, StoredTensor], rank: int
) -> Iterator[WeightBucket]:
    """The buckets of an adapter of this rank, each once all its tensors are known to fit; see `require_matrix`."""
    for bucket in buckets:
        for name, shape, given in zip(bucket.names, bucket.shapes, bucket.dtypes, strict=True):
            require_matrix(name, StoredTensor(tuple(shape), given), stored, rank)
        yield bucket


def require_matrix(name: str, given: StoredTensor, stored: Mapping[str, StoredTensor], rank: int) -> None:
    """A matrix of an adapter has the size of the layer that it is for.

    Args:
        name: as peft calls it.
        given: the matrix.
        stored: the engine's; of a layer that is not in it, or is packed there, nothing is known, and nothing checked.
        rank: of the adapter.

    Raises:
        WeightSyncError: it has another shape, or is of no floating-point numbers.
    """
    if given.dtype not in _DTYPES.values():
        raise WeightSyncError(f"{name} has the dtype {given.dtype}; an adapter's is one of {[*_DTYPES.values()]}")
    match = _LORA.fullmatch(name)
    held = stored.get(f"{match[1]}.weight") if match else None
    if match is None or held is None or held.dtype not in _DTYPES.values() or len(held.shape) != 2:
        return
    rows, columns = held.shape
    expected = (rank, columns) if match[2] == "A" else (rows, rank)
    if given.shape != expected:
        raise WeightSyncError(
            f"{name} has the shape {list(given.shape)}; with rank {rank} the engine's layer, of {list(held.shape)}, "
            f"takes {list(expected)}"
        )


def _require_fitting(
    name: str, shape: tuple[int, ...], given: str, stored: Mapping[str, StoredTensor], dtype: str
) -> None:
    if name not in stored:
        raise WeightSyncError(f"{name} arrived, but the engine's model has no tensor of that name")
    held = stored[name]
    if shape != held.shape:
        raise WeightSyncError(f"{name} arrived with shape {list(shape)}, and the engine's is {list(held.shape)}")
    if given not in (dtype, held.dtype):
        raise WeightSyncError(
            f"{name} arrived as {given}, but the engine computes in {dtype} (its files have {held.dtype}): set "
            "generator.inference_engine.model_dtype to what the trainer sends"
        )
