"""Where fields of a model's configuration, taken together, make Megatron compute otherwise than transformers.

Each check is given transformers' configuration (or its `rope_parameters`) and returns `field=value, …: why not`, or
None. Differences that messages name are as in `accepted_models`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], "str | None"]


def given(name: str, value: Any) -> str:
    """`name=value` as it stands in a config.json."""
    return f"{name}={as_json(value)}"


def as_json(value: Any) -> str:
    """A value as it stands in a config.json."""
    return json.dumps(value, default=repr)


def is_positive(value: Any) -> bool:
    """A number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def layers_are_alike(config: Any) -> str | None:
    """All layers attend to all earlier tokens and are of one shape."""
    if getattr(config, "is_heterogeneous", False):
        return "per_layer_config: Megatron-Bridge 0.3.1 builds all layers alike"
    kinds = getattr(config, "layer_types", None) or ()
    other = next((kind for kind in kinds if kind != "full_attention"), None)
    if other is not None:
        return f"{given('layer_types', other)}: Megatron-Bridge 0.3.1 does not convert it (log-probs off by up to 2.3)"
    return None


# --- rotary embedding -----------------------------------------------------------------------------------------------

_ROTARY_ERRORS = {
    ("qwen2", "yarn"): 0.43,
    ("qwen3", "yarn"): 1.1,
    ("qwen3_moe", "yarn"): 1.0,
    ("llama", "yarn"): 0.45,
    ("qwen2", "llama3"): 0.0034,
    ("qwen3", "llama3"): 0.031,
    ("qwen3_moe", "llama3"): 0.17,
    ("deepseek_v3", "llama3"): 0.9,
}
"""Of model types with scaling that Megatron-Bridge converts wrongly. What is not here it does not know."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron-Core computes with, whatever the model says."""


def rotary(config: Any, accepted: Mapping[str, Check]) -> str | None:
    """Of a type of models with these rotary embeddings."""
    rope: Mapping[str, Any] = config.rope_parameters or {}
    kind: Any = rope.get("rope_type")
    if kind not in accepted:
        error = _ROTARY_ERRORS.get((config.model_type, kind))
        reason = "Megatron-Bridge 0.3.1 does not convert it"
        if error is not None:
            reason = f"Megatron computes other frequencies (log-probs off by {error})"
        names = " or ".join(map(as_json, accepted))
        return f"{_rope('rope_type', kind)} (rope_scaling.type in older files; accepted: {names}): {reason}"
    if rope.get("type", kind) != kind:
        return (
            f"{_rope('type', rope['type'])} beside rope_type={as_json(kind)}: Megatron-Bridge 0.3.1 follows the one, "
            "transformers the other (log-probs off by up to 0.73)"
        )
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        return f"{_rope('partial_rotary_factor', rope['partial_rotary_factor'])}: only whole heads are rotated here"
    if not is_positive(rope.get("rope_theta")):
        return f"{_rope('rope_theta', rope.get('rope_theta'))}: a number above 0 is expected"
    return accepted[kind](rope)


def _rope(name: str, value: Any) -> str:
    return given(f"rope_parameters.{name}", value)


def unscaled(rope: Mapping[str, Any]) -> str | None:
    """Nothing else is read."""
    return None


def llama3(rope: Mapping[str, Any]) -> str | None:
    """Scaling of Llama 3."""
    for name, value in _LLAMA3.items():
        if rope.get(name) != value:
            return f"{_rope(name, rope.get(name))}: Megatron-Core 0.16.1 knows llama3 scaling with {value} only"
    if not is_positive(rope.get("factor")):
        return f"{_rope('factor', rope.get('factor'))}: a number above 0 is expected"
    return None


def latent_yarn(rope: Mapping[str, Any]) -> str | None:
    """Scaling of latent attention, which Megatron computes as transformers does but for some of its options."""
    if rope.get("attention_factor") is not None:
        return (
            f"{_rope('attention_factor', rope['attention_factor'])}: Megatron does not read it (log-probs off by 1.2)"
        )
    if not rope.get("truncate", True):
        return f"{_rope('truncate', rope['truncate'])}: Megatron-Bridge 0.3.1 does not read it (log-probs off by 0.094)"
    scales = [rope.get("mscale"), rope.get("mscale_all_dim")]
    if scales != [None, None] and not all(map(is_positive, scales)):
        return (
            f"{_rope('mscale', scales[0])} and {given('mscale_all_dim', scales[1])}: transformers takes both or "
            "none, Megatron each (log-probs off by up to 1.2); both above 0, or neither, is right"
        )
    for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
        is_left_out = name.startswith("beta_") and rope.get(name) is None
        if not is_left_out and not is_positive(rope.get(name)):
            return f"{_rope(name, rope.get(name))}: a number above 0 is expected"
    return None


# --- experts and latent attention -----------------------------------------------------------------------------------


def softmax_router(config: Any) -> str | None:
    """Experts of Qwen3-MoE."""
    if config.num_experts < 1:
        return f"{given('num_experts', config.num_experts)}: Megatron cannot build it"
    if config.norm_topk_prob and config.num_experts_per_tok < 2:
        return (
            f"{given('num_experts_per_tok', config.num_experts_per_tok)} and norm_topk_prob=true: Megatron-Core "
            "0.16.1 does not normalise a single weight (log-probs off by 0.55)"
        )
    return None


def sigmoid_router(config: Any) -> str | None:
    """Experts of DeepSeek-V3."""
    chosen, scale = config.num_experts_per_tok, config.routed_scaling_factor
    if chosen is None or chosen < 2:
        return (
            f"{given('num_experts_per_tok', chosen)}: Megatron-Core 0.16.1 does not normalise a single weight "
            "(log-probs off by 0.57); 2 or more are right"
        )
    if not is_positive(scale):
        return (
            f"{given('routed_scaling_factor', scale)}: Megatron-Core 0.16.1 leaves a factor of 0 out (log-probs off "
            "by 0.41); above 0 is right"
        )
    if config.n_shared_experts < 1:
        return f"{given('n_shared_experts', config.n_shared_experts)}: Megatron cannot build it without shared experts"
    dense, layers = config.first_k_dense_replace, config.num_hidden_layers
    if dense is None or not 0 <= dense <= layers:
        return f"{given('first_k_dense_replace', dense)}: expected 0 to {layers}, the model's layers"
    return _expert_groups(config)


def _expert_groups(config: Any) -> str | None:
    """A choice that is limited to the best groups is transformers' where Megatron scores a group alike, or where all
    groups are among the best."""
    groups, best, chosen = config.n_group, config.topk_group, config.num_experts_per_tok
    sizes = f"{given('n_group', groups)}, {given('topk_group', best)}, num_experts_per_tok={chosen}"
    if not (is_positive(groups) and is_positive(best) and best <= groups):
        return f"{sizes}: expected 1 or more groups, and as many or fewer to choose from"
    if config.n_routed_experts % groups or config.n_routed_experts // groups < 2:
        return f"{sizes}: {config.n_routed_experts} experts are not {groups} groups of 2 or more"
    if best == groups or chosen // best == 2:
        return None
    return (
        f"{sizes}: Megatron-Core 0.16.1 sums the scores of a group's best {chosen // best} experts "
        "(num_experts_per_tok // topk_group), transformers those of its best 2 (log-probs off by up to 0.94)"
    )


def latent_heads(config: Any) -> str | None:
    """Heads of latent attention."""
    if config.num_key_value_heads != config.num_attention_heads:
        return (
            f"{given('num_key_value_heads', config.num_key_value_heads)}: transformers runs latent attention with "
            f"num_attention_heads={config.num_attention_heads} of them only"
        )
    if config.head_dim != config.qk_rope_head_dim:
        return (
            f"{given('head_dim', config.head_dim)}: transformers runs latent attention with "
            f"qk_rope_head_dim={config.qk_rope_head_dim} only"
        )
    return None
