"""Finds settings of an adapter that vLLM does not read. Imports neither torch nor vLLM.

vLLM reads an adapter's matrices, and from `adapter_config.json` only what gives one factor, lora_alpha / r or
lora_alpha / sqrt(r). peft has settings that give layers other factors, add terms, or change the base weights; vLLM
ignores most of them silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError

READ = frozenset({"r", "lora_alpha", "use_rslora"})
"""Settings from which vLLM computes the factor."""
OF_TRAINING = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "target_modules",
        "task_type",
    }
)
"""Settings that do not change what a trained adapter computes: they choose layers, which the matrices' names show, or
act only in training, or only beside a setting that is refused."""
_KEEPING_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base weights unchanged."""
_MATRICES = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")
_REMEDY = "merge the adapter into its base with peft (merge_and_unload), save the whole model, and serve that"


def require_read(config: Mapping[str, Any], tensors: Set[str] = frozenset()) -> None:
    """Requires that vLLM computes the adapter as peft does.

    Args:
        config: content of peft's `adapter_config.json`.
        tensors: names of the adapter's tensors, if they are at hand.

    Raises:
        ConfigError: vLLM does not read a setting that has an effect, or a tensor.
    """
    if (kind := str(config.get("peft_type") or "LORA").rpartition(".")[2]) != "LORA":
        raise ConfigError(f"its peft_type is {kind}, expected LORA; {_REMEDY}")
    if (start := config.get("init_lora_weights")) not in _KEEPING_BASE:
        raise ConfigError(
            f"its init_lora_weights is {start!r}, which changes the base weights, and vLLM has the unchanged ones; "
            f"{_REMEDY}, or save it with path_initial_model_for_weight_conversion"
        )
    known = READ | OF_TRAINING | {"peft_type", "init_lora_weights"}
    unread = {name: value for name, value in config.items() if name not in known and value and value != "none"}
    if unread:
        given = ", ".join(f"{name}={value!r}" for name, value in sorted(unread.items()))
        raise ConfigError(f"vLLM does not read the settings {given} of its adapter_config.json; {_REMEDY}")
    if ignored := sorted(name for name in tensors if not name.endswith(_MATRICES)):
        raise ConfigError(f"vLLM does not read its tensors {', '.join(ignored[:3])}; {_REMEDY}")


def read_settings(directory: Path) -> Mapping[str, Any]:
    """Content of an adapter's `adapter_config.json`. Raises ConfigError if it cannot be read or has no rank."""
    try:
        config = json.loads((directory / "adapter_config.json").read_bytes())
        if not isinstance(config["r"], int):
            raise TypeError(f"its rank r is {config['r']!r}")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"its adapter_config.json cannot be read ({error!r}); save the adapter again") from error
    return config
