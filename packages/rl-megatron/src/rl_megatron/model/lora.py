"""Adds low-rank adapters (Hu et al. 2021, arXiv 2106.09685) with Megatron-Bridge, and writes them to files.

Megatron holds query, key and value as one matrix, and gate and up as another. `lora` gives each of these matrices one
adapter; `canonical_lora` gives each part of a matrix its own adapter, as other libraries do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rl_core.errors import ConfigError
from rl_core.interfaces import LoraConfig, WorkerSpec
from rl_core.rank_kit.worker_specs import SECTIONS
from rl_megatron.checks.lora_targets import adapted_layers, bridge_layers
from rl_megatron.model.bridge import CanonicalLoRA, LoRA

_INIT_METHODS = {"kaiming": "kaiming", "gaussian": "normal"}


def add_adapters(models: list[Any], lora: LoraConfig, lora_type: str, section: str) -> list[Any]:
    """Freezes the models and adds adapters to their layers. The adapters' second matrices start at zero, so the
    models compute the same as before.

    Raises ConfigError if no layer gets an adapter, or if `bridge_layers` refuses the names.
    """
    make = CanonicalLoRA if lora_type == "canonical_lora" else LoRA
    adapters = make(
        target_modules=bridge_layers(lora, lora_type, section),
        dim=lora.rank,
        alpha=lora.alpha,
        dropout=0.0,
        lora_A_init_method=_INIT_METHODS[lora.init_method],
    )
    adapted = adapters(models, training=True)
    if not any(".adapter." in name for model in adapted for name, _ in model.named_parameters()):
        raise ConfigError(
            f"got {lora.target_modules!r}, but no layer has such a name", key=f"{section}.model.lora.target_modules"
        )
    return adapted


def write_adapter(tensors: Mapping[str, Tensor], spec: WorkerSpec, directory: Path) -> None:
    """Writes only the adapters, in the format that `peft.PeftModel.from_pretrained` reads."""
    directory.mkdir(parents=True, exist_ok=True)
    lora = spec.model.lora
    config = lora.peft_config() | {
        "base_model_name_or_path": str(spec.model.path),
        "exclude_modules": None,
        "target_modules": adapted_layers(lora, SECTIONS[spec.role]),
        "task_type": "CAUSAL_LM",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    copies = {name: tensor.to("cpu", torch.float32, copy=True) for name, tensor in tensors.items()}
    save_file(copies, directory / "adapter_model.safetensors", {"format": "pt"})
