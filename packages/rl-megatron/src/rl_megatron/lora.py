"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) by Megatron-Bridge.

Megatron holds query, key and value as one matrix, and gate and up as another. `lora` gives each of these one adapter,
`canonical_lora` one for each of its parts, as other libraries have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.lora import LoRA

from rl_core.errors import ConfigError
from rl_core.interfaces import LoraConfig

_PARTS = {
    "q_proj": "linear_q",
    "k_proj": "linear_k",
    "v_proj": "linear_v",
    "o_proj": "linear_proj",
    "gate_proj": "linear_fc1_gate",
    "up_proj": "linear_fc1_up",
    "down_proj": "linear_fc2",
}
"""Hugging Face's name of a layer → Bridge's, with an adapter for each."""
_FUSED = {
    frozenset({"q_proj", "k_proj", "v_proj"}): "linear_qkv",
    frozenset({"o_proj"}): "linear_proj",
    frozenset({"gate_proj", "up_proj"}): "linear_fc1",
    frozenset({"down_proj"}): "linear_fc2",
}
_INIT_METHODS = {"kaiming": "kaiming", "gaussian": "normal"}


def add_adapters(models: list[Any], lora: LoraConfig, lora_type: str, where: str) -> list[Any]:
    """Freezes the models and puts adapters into their layers; B starts at zero, so outputs do not change yet."""
    make = CanonicalLoRA if lora_type == "canonical_lora" else LoRA
    adapters = make(
        target_modules=target_modules(lora, lora_type, where),
        dim=lora.rank,
        alpha=lora.alpha,
        dropout=0.0,
        lora_A_init_method=_INIT_METHODS[lora.init_method],
    )
    adapted = adapters(models, training=True)
    if not any(".adapter." in name for model in adapted for name, _ in model.named_parameters()):
        raise ConfigError(f"{where}.model.lora.target_modules: {lora.target_modules!r}: no layer has such a name")
    return adapted


def target_modules(lora: LoraConfig, lora_type: str, where: str) -> list[str]:
    """Bridge's names of the layers that are meant. Raises ConfigError for a name that no layer here has."""
    names = _names(lora.target_modules, list(_PARTS))
    excluded = _names(lora.exclude_modules or (), [])
    for key, given in (("target_modules", names), ("exclude_modules", excluded)):
        for name in given:
            if name not in _PARTS:
                raise ConfigError(
                    f"{where}.model.lora.{key}: {name!r} is none of {', '.join(_PARTS)}, which can have adapters here"
                )
    wanted = [name for name in names if name not in excluded]
    if lora_type == "canonical_lora":
        return [_PARTS[name] for name in wanted]
    for parts, fused in _FUSED.items():
        if 0 < len(parts & set(wanted)) < len(parts):
            raise ConfigError(
                f"{where}.model.lora.target_modules: {', '.join(sorted(parts))} are one matrix ({fused}) with one "
                f"adapter; name all of them, or set {where}.megatron_config.lora_config.lora_type=canonical_lora"
            )
    return [fused for parts, fused in _FUSED.items() if parts <= set(wanted)]


def _names(given: str | Sequence[str], of_all: list[str]) -> list[str]:
    if given == "all-linear":
        return of_all
    return [given] if isinstance(given, str) else list(given)
