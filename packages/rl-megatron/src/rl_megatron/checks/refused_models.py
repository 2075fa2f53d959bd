"""Models that are refused without a numerical check: types that Megatron is known not to support, and fields that a
check on a small copy does not cover. Every other model is compared with transformers (`MegatronBackend.proof_worker`).
Imports no torch.
"""

from __future__ import annotations

import json
from typing import Any

import attrs

from rl_core.errors import ConfigError
from rl_core.rank_kit.model_shapes import written_config
from rl_core.rank_kit.shipped_configs import here_or_shipped
from rl_transformers.pretrained import config_at_hand
from rl_transformers.proof.model_proof import REMEDY

_NOT_BUILT = (
    "gemma3",
    "gemma3_text",
    "glm4_moe",
    "ministral3",
    "mixtral",
    "nemotron",
    "nemotron_h",
    "olmoe",
    "qwen2_moe",
    "qwen3_next",
)
REFUSED = {
    "gemma": "Megatron computes differently from transformers (log-probs off by 4.2)",
    "gemma2": "Megatron computes differently from transformers (log-probs off by 3.4)",
    "gpt_oss": "Megatron computes differently from transformers (log-probs off by 0.85)",
    **dict.fromkeys(_NOT_BUILT, "Megatron-Bridge 0.3.1 cannot build"),
}
"""Model type → why it is refused without a check. Differences are measured on tiny random models in float32."""


@attrs.frozen(kw_only=True)
class Fixed:
    """A field for which only some values are accepted."""

    values: tuple[Any, ...]
    """Accepted values. Messages name the first one; None means that the field is absent."""
    reason: str
    """Why other values are refused."""


FIXED = {
    "hidden_act": Fixed(
        values=("silu", None),
        reason="GPU kernels approximate or lack other activations, which a check on a CPU would not detect",
    ),
    "quantization_config": Fixed(
        values=(None,),
        reason="Megatron-Bridge 0.3.1 loads weights without their scales (log-probs off by 1.3); a small copy has no "
        "scales",
    ),
    "transformers_weights": Fixed(
        values=(None,),
        reason="Megatron-Bridge 0.3.1 reads the usual weight files instead; a small copy has only those",
    ),
}
"""Fields that a check on a small copy does not cover."""


def given(name: str, value: Any) -> str:
    """Returns `name=value`, with the value as config.json writes it."""
    return f"{name}={as_json(value)}"


def as_json(value: Any) -> str:
    """Returns a value as config.json writes it."""
    return json.dumps(value, default=repr)


def taken_config(path: str | None, where: str) -> Any:
    """Loads transformers' configuration of a model from a local directory, the cache of the hub, or
    the configurations that packages ship.

    Args:
        path: local directory, or name on the hub.
        where: key path of the model, which error messages name.

    Returns:
        The configuration, or None if it is not available yet because a recipe will create the model or a rank will
        download it.

    Raises:
        ConfigError: the configuration cannot be read, or the model is refused.
    """
    path = here_or_shipped(path)
    if path is None or (written := written_config(path)) is None:
        return None
    _require_type(written.get("model_type"), path, where)
    config = config_at_hand(path, where)
    require_not_refused(config, path, where)
    return config


def require_not_refused(config: Any, path: str | None, where: str) -> None:
    """Raises ConfigError for a model that is refused without a check.

    Args:
        config: transformers' configuration.
        path: the model's path, which error messages name.
        where: key path of the model, which error messages name.
    """
    _require_type(config.model_type, path, where)
    for name, fixed in FIXED.items():
        value = getattr(config, name, None)
        if value not in fixed.values:
            raise ConfigError(
                f"{path} is a {config.model_type} model with {given(name, value)} (accepted: "
                f"{as_json(fixed.values[0])}): {fixed.reason}. {REMEDY}",
                key=where,
            )


def _require_type(kind: Any, path: str | None, where: str) -> None:
    if kind is None:
        raise ConfigError(
            f"the config.json of {path} has no model_type; use the config.json of a Hugging Face model", key=where
        )
    if kind in REFUSED:
        raise ConfigError(f"{path} has model_type={as_json(kind)}, which {REFUSED[kind]}. {REMEDY}", key=where)
