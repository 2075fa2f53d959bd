"""Reads names, shapes and dtypes from the checkpoint of an engine's model, and checks arriving weights against them.

vLLM does not check every shape. It copies weights into fused and padded tensors: a `gate_proj` with twice the expected
number of rows overwrites the `up_proj`, and an adapter matrix with too few rows fills only a part of its slot.
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
"""Maps names of safetensors dtypes to torch's; only floating-point dtypes that are not quantized."""


@attrs.frozen
class StoredTensor:
    """Shape and dtype of a tensor in a checkpoint or in arriving weights."""

    shape: tuple[int, ...]
    dtype: str
    """torch's name of the dtype; for a dtype that `_DTYPES` lacks, its name in safetensors."""


def stored_tensors(model_config: Any) -> dict[str, StoredTensor]:
    """Returns the tensors in the safetensors files of vLLM's `ModelConfig`, by name; empty if the model was not loaded
    from such files."""
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
    """Returns the tensors of a safetensors file, by name; reads only the file's header."""
    tensors: dict[str, StoredTensor] = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - an open file has keys and cannot be iterated
            part = file.get_slice(name)
            dtype = str(part.get_dtype())
            tensors[name] = StoredTensor(tuple(part.get_shape()), _DTYPES.get(dtype, dtype))
    return tensors


def _fused_experts(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the shapes that experts have if they are sent fused: each layer's `gate_up_proj` and `down_proj` hold all
    its experts. Transformers keeps experts in memory in this form, and vLLM also accepts it."""
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
    """Yields each bucket after checking that all its tensors match the engine's. Accepts an `lm_head.weight` that the
    checkpoint lacks because it is tied to the embeddings.

    Args:
        buckets: the arriving buckets.
        stored: the engine's tensors by name. If it is empty, nothing is checked.
        dtype: torch's name of the engine's compute dtype; a tensor may also have the dtype in `stored`.

    Raises:
        WeightSyncError: the engine has no tensor of this name, or its shape or dtype differs.
    """
    for bucket in buckets:
        for name, shape, given in zip(bucket.names, bucket.shapes, bucket.dtypes, strict=True):
            if stored and (name in stored or name != _TIED_HEAD):
                _require_fitting(name, tuple(shape), given, stored, dtype)
        yield bucket


def fitting_adapter(
    buckets: Iterator[WeightBucket], stored: Mapping[str, StoredTensor], rank: int
) -> Iterator[WeightBucket]:
    """Yields each bucket of an adapter of LoRA rank `rank` after checking that all its tensors fit; see
    `require_matrix`."""
    for bucket in buckets:
        for name, shape, given in zip(bucket.names, bucket.shapes, bucket.dtypes, strict=True):
            require_matrix(name, StoredTensor(tuple(shape), given), stored, rank)
        yield bucket


def require_matrix(name: str, given: StoredTensor, stored: Mapping[str, StoredTensor], rank: int) -> None:
    """Checks that an adapter's matrix fits its layer.

    Args:
        name: peft's name of the matrix.
        given: the matrix.
        stored: the engine's tensors by name. The shape is not checked if the layer is missing, quantized or not
            two-dimensional.
        rank: the adapter's rank.

    Raises:
        WeightSyncError: the matrix has a wrong shape, or its dtype is not a floating-point dtype.
    """
    if given.dtype not in _DTYPES.values():
        raise WeightSyncError(f"{name} has the dtype {given.dtype}; expected one of {[*_DTYPES.values()]}")
    match = _LORA.fullmatch(name)
    held = stored.get(f"{match[1]}.weight") if match else None
    if match is None or held is None or held.dtype not in _DTYPES.values() or len(held.shape) != 2:
        return
    rows, columns = held.shape
    expected = (rank, columns) if match[2] == "A" else (rows, rank)
    if given.shape != expected:
        raise WeightSyncError(
            f"{name} has the shape {list(given.shape)}; expected {list(expected)} for rank {rank} and the engine's "
            f"layer of shape {list(held.shape)}"
        )


def _require_fitting(
    name: str, shape: tuple[int, ...], given: str, stored: Mapping[str, StoredTensor], dtype: str
) -> None:
    if name not in stored:
        raise WeightSyncError(f"{name} arrived, but the engine's model has no tensor of that name")
    held = stored[name]
    if shape != held.shape:
        raise WeightSyncError(f"{name} arrived with shape {list(shape)}, but the engine's is {list(held.shape)}")
    if given not in (dtype, held.dtype):
        raise WeightSyncError(
            f"{name} arrived as {given}, but the engine computes in {dtype} (its files have {held.dtype}): set "
            "generator.inference_engine.model_dtype to what the trainer sends"
        )
