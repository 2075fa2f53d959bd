"""What an engine's model is made of, by the names that weights travel under: those of the files it was loaded from.

vLLM's loaders copy into fused and padded tensors, and some take what does not fit: twice the rows of a `gate_proj` went
into the place of its `up_proj`.
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
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                part = file.get_slice(name)
                dtype = str(part.get_dtype())
                stored[name] = StoredTensor(tuple(part.get_shape()), _DTYPES.get(dtype, dtype))
    return stored | _fused_experts(stored)


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
