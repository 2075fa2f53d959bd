"""Replaces the policy's low-rank adapter in a vLLM worker; the model itself stays unchanged.

vLLM keeps an adapter twice: as received, in the worker's memory (`registered`, at most `max_cpu_loras`), and in the
buffers that a batch computes with (`active`, `max_loras` slots). The policy's adapter is pinned in memory, because no
file holds it. A batch without requests for the policy's adapter may give the policy's slot to another adapter; the next
batch that uses the policy's adapter copies it from memory again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path

from rl_core.errors import WeightSyncError
from rl_rollout.vllm.adapter_settings import read_settings, require_read
from rl_rollout.vllm.engine_arguments import BASE_MODEL_NAME
from rl_rollout.vllm.weights.stored_tensors import StoredTensor, require_matrix, tensors_of_file

POLICY_ADAPTER = LoRARequest(lora_name="rl-policy", lora_int_id=1, lora_path="(sent by the trainer)")
"""Selects the policy's adapter for a generation request. vLLM never reads the path, because this adapter is always
registered."""

BASE_MODEL = LoRARequest(lora_name=BASE_MODEL_NAME, lora_int_id=2, lora_path="(no adapter)")
"""Stands for the model without an adapter, because vLLM's routes know only the policy and adapters. It never reaches an
engine's core."""


def has_adapters(worker: Any) -> bool:
    """Whether the engine was started for adapters (`enable_lora`)."""
    return worker.vllm_config.lora_config is not None


def start_with_zeros(worker: Any) -> None:
    """Gives the policy an adapter of zeros until the first one arrives."""
    loras = worker.model_runner.lora_manager
    loras.add_dummy_lora(POLICY_ADAPTER, rank=loras.get_dummy_lora_warmup_rank(1))
    _activate(loras._adapter_manager)


def built(worker: Any, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> LoRAModel:
    """Builds the adapter in vLLM's format; changes nothing yet.

    Args:
        worker: a worker of an engine with adapters.
        tensors: the adapter's matrices by peft's names. The adapter keeps them, so the caller must not change them.
        config: content of peft's `adapter_config.json`.

    Raises:
        WeightSyncError: vLLM does not support the adapter (for example its rank is above `max_lora_rank`), the adapter
            has no layers, or a layer lacks one of its two matrices.
    """
    loras = worker.model_runner.lora_manager
    mapper = getattr(worker.model_runner.get_model(), "hf_to_vllm_mapper", None)
    try:
        require_read(config, tensors.keys())
        helper = PEFTHelper.from_dict(dict(config))
        helper.validate_legal(loras.lora_config)
        adapter = LoRAModel.from_lora_tensors(
            POLICY_ADAPTER.lora_int_id,
            dict(tensors),
            helper,
            device="cpu",
            dtype=loras.lora_config.lora_dtype,
            model_vocab_size=loras.vocab_size,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
    except ValueError as error:  # a ConfigError, too
        raise WeightSyncError(f"the adapter cannot be served: {error}") from error
    _require_both_matrices(adapter)
    return adapter


def _require_both_matrices(adapter: LoRAModel) -> None:
    half = [name for name, layer in adapter.loras.items() if layer.lora_a is None or layer.lora_b is None]
    if half or not adapter.loras:
        raise WeightSyncError(f"the adapter does not have both matrices, A and B, of {half[:3] or 'any layer'}")


def require_loadable(worker: Any, name: str, path: str, stored: Mapping[str, StoredTensor]) -> None:
    """Checks that the adapter at `path`, in peft's format, can be served; changes nothing.

    Raises:
        Exception: an error of vLLM, a ConfigError for a setting or tensor that vLLM does not read, or a WeightSyncError
            for a matrix that is missing, does not fit its layer, or belongs to no layer.
    """
    directory = Path(get_adapter_absolute_path(path))
    file = directory / "adapter_model.safetensors"
    tensors = tensors_of_file(file) if file.exists() else {}
    require_read(read_settings(directory), tensors.keys())
    adapter = worker.model_runner.lora_manager._load_adapter(LoRARequest(name, POLICY_ADAPTER.lora_int_id + 1, path))
    _require_both_matrices(adapter)
    for tensor_name, given in tensors.items():
        require_matrix(tensor_name, given, stored, adapter.rank)
    if worker.vllm_config.parallel_config.pipeline_parallel_size == 1:
        names = sorted(layer for layer in adapter.loras if ".experts" not in layer)
        known = known_layers(worker, names)
        if unknown := [layer for layer, is_known in zip(names, known, strict=True) if not is_known]:
            raise WeightSyncError(f"the model has no layers {unknown[:3]} that could have adapters")


def known_layers(worker: Any, names: Sequence[str]) -> list[bool]:
    """Returns for each name whether this worker's part of the model has a layer of that name that can have an adapter.
    vLLM ignores adapter tensors for any other name."""
    adapters = worker.model_runner.lora_manager._adapter_manager
    known = {*adapters.modules, *(part for parts in adapters.packed_modules.values() for part in parts)}
    return [name in known for name in names]


def replace(worker: Any, adapter: LoRAModel) -> None:
    """Makes the policy's requests use `adapter` from the next batch on."""
    adapters = worker.model_runner.lora_manager._adapter_manager
    adapters.remove_adapter(POLICY_ADAPTER.lora_int_id)
    adapters.add_adapter(adapter)
    _activate(adapters)


def _activate(adapters: Any) -> None:
    adapters.activate_adapter(POLICY_ADAPTER.lora_int_id)
    adapters._registered_adapters.pin(POLICY_ADAPTER.lora_int_id)
