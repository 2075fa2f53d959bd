"""Determines which layers get adapters, under Hugging Face's and Megatron-Bridge's names. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

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
"""Hugging Face's name of a layer → Bridge's name, for `canonical_lora`, which gives each layer its own adapter."""
_FUSED = {
    frozenset({"q_proj", "k_proj", "v_proj"}): "linear_qkv",
    frozenset({"o_proj"}): "linear_proj",
    frozenset({"gate_proj", "up_proj"}): "linear_fc1",
    frozenset({"down_proj"}): "linear_fc2",
}
QUERY_KEY_VALUE = frozenset({"q_proj", "k_proj", "v_proj"})
"""Layers that cannot have adapters in a model with latent attention."""
FEED_FORWARD = frozenset({"gate_proj", "up_proj", "down_proj"})
"""Layers that a Mixture of Experts has once for each expert."""


def adapted_layers(lora: LoraConfig, section: str) -> list[str]:
    """Returns Hugging Face's names of the layers that get adapters.

    Args:
        lora: its `target_modules` name the layers or are `all-linear`; its `exclude_modules` are left out.
        section: key path of the model's section, which error messages name.

    Raises:
        ConfigError: a named layer cannot have adapters, or every layer is excluded.
    """
    names = _names(lora.target_modules, list(_PARTS))
    excluded = _names(lora.exclude_modules or (), [])
    for key, given in (("target_modules", names), ("exclude_modules", excluded)):
        for name in given:
            if name not in _PARTS:
                raise ConfigError(
                    f"got {name!r}; expected layers that can have adapters here: {', '.join(_PARTS)}",
                    key=f"{section}.model.lora.{key}",
                )
    wanted = [name for name in names if name not in excluded]
    if not wanted:
        raise ConfigError("no layer is left; name at least one", key=f"{section}.model.lora.target_modules")
    return wanted


def bridge_layers(lora: LoraConfig, lora_type: str, section: str) -> list[str]:
    """Returns Bridge's names of the adapted layers. Raises ConfigError if `adapted_layers` does, or if the names cover
    only some parts of a fused matrix."""
    wanted = adapted_layers(lora, section)
    for parts, fused in _FUSED.items():
        if 0 < len(parts & set(wanted)) < len(parts):
            raise ConfigError(
                f"{', '.join(sorted(parts))} are one matrix here ({fused}), and Megatron-Bridge 0.3.1 adapts all parts "
                "of a matrix or none; name all of them, or none",
                key=f"{section}.model.lora.target_modules",
            )
    if lora_type == "canonical_lora":
        return [_PARTS[name] for name in wanted]
    return [fused for parts, fused in _FUSED.items() if parts <= set(wanted)]


def _names(given: str | Sequence[str], of_all: list[str]) -> list[str]:
    if given == "all-linear":
        return of_all
    return [given] if isinstance(given, str) else list(given)
