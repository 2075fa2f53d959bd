"""Shrinks a model's configuration to few layers, narrow matrices and few experts. Imports no torch.

Keeps what determines how a model is computed: the head size, and with it the rotary frequencies; kinds of layers; norms
and their eps; biases; the numbers of chosen experts and chosen groups; tied embeddings; divisibility of sizes.
Lengths that only long sequences reach (windows, and thresholds of length-dependent rotary frequencies) become shorter
than `MANY_TOKENS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.errors import ConfigError
from rl_core.rank_kit.model_shapes import EXPERT_COUNTS

MANY_TOKENS = 97
"""A sequence length that exceeds every window of a small model."""
_SIZES = {
    "vocab_size": 61,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "q_lora_rank": 36,
    "kv_lora_rank": 28,
    "n_shared_experts": 2,
}
"""Sizes on which no other size depends → their maximum in a small model. The maxima differ, so that a mix-up of two
sizes is detected."""
_HIDDEN_PER_HEAD = 20
_WINDOWS = {"sliding_window": 24, "attention_chunk_size": 24}
_FIRST_LAYERS = ("first_k_dense_replace", "max_window_layers")
"""Fields with the number of leading layers whose kind differs from the other layers' kind."""
_SOME_LAYERS = ("mlp_only_layers",)
"""Fields with a list of the layers whose kind differs from the other layers' kind."""
_EVERY_NTH_LAYER = (
    "decoder_sparse_step",
    "moe_layer_freq",
    "full_attention_interval",
    "interleave_moe_layer_step",
    "no_rope_layer_interval",
    "sliding_window_pattern",
)
_MOST_LAYERS = 12
_SAME_AT_ANY_LENGTH = (None, "default", "linear", "llama3", "yarn", "proportional")
"""Rotary embedding types whose frequencies do not depend on the sequence length."""
_ORIGINAL_LENGTH = 32
_NOT_OF_THE_MODEL = ("quantization_config", "transformers_version", "torch_dtype", "_name_or_path")


def shrunken(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the configuration of a small model of the same kind.

    Args:
        config: all fields of transformers' configuration (`to_dict()`).
        where: key path of the model, for messages.

    Raises:
        ConfigError: the configuration is not that of a plain language model, or lacks a size.
    """
    if any(isinstance(config.get(name), Mapping) for name in ("text_config", "vision_config", "encoder", "decoder")):
        raise ConfigError(
            f"{config.get('model_type')} combines several models; expected a plain language model", key=where
        )
    missing = [
        n for n in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size") if not config.get(n)
    ]
    if missing:
        raise ConfigError(f"its configuration has no {missing[0]}; expected sizes, named as in Llama's", key=where)
    small = {name: value for name, value in config.items() if name not in _NOT_OF_THE_MODEL}
    small |= {name: min(most, size) for name, most in _SIZES.items() if isinstance(size := config.get(name), int)}
    small |= {name: min(most, size) for name, most in _WINDOWS.items() if isinstance(size := config.get(name), int)}
    small |= _heads(config) | _experts(config) | _layers(config) | _lengths(config) | _tokens(small)
    return {**small, "dtype": "float32"}


# --- heads ----------------------------------------------------------------------------------------------------------


def _heads(config: Mapping[str, Any]) -> dict[str, Any]:
    """Reduces the number of heads. Its parity, the kind of grouping and the head size are kept."""
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads")
    if groups is None or groups == heads:
        small_heads = _few(heads, 4)
        small_groups = None if groups is None else small_heads
    elif groups < 1 or heads % groups:
        small_heads, small_groups = heads, groups
    else:
        small_groups = _few(groups, 2)
        small_heads = small_groups * _few(heads // groups, 2)
    found = {"num_attention_heads": small_heads, "hidden_size": _hidden_size(config, small_heads)}
    return found if small_groups is None else {**found, "num_key_value_heads": small_groups}


def _few(count: int, most: int) -> int:
    """Returns `count` if it is at most `most`. A larger even count becomes `most`, and a larger odd count becomes 3,
    because 2 and 4 must not divide the result of an odd count."""
    return count if count <= most else (3 if count % 2 else most)


def _hidden_size(config: Mapping[str, Any], small_heads: int) -> int:
    """Returns the small model's hidden size. If attention is not latent, and the hidden size per head equals the head
    size in the model, they are also equal in the small model; otherwise, they differ. Adds a remainder if the model's
    hidden size is not a multiple of its number of heads."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    per_head = hidden // heads
    if config.get("kv_lora_rank") or per_head != size:
        per_head = min(per_head, _HIDDEN_PER_HEAD)
        per_head += 2 * (per_head == size)  # else the two sizes could be mixed up unnoticed
    return small_heads * per_head + min(hidden % heads, small_heads - 1)


# --- experts --------------------------------------------------------------------------------------------------------


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Reduces the numbers of experts and of expert groups. The numbers of chosen experts and chosen groups are kept."""
    chosen, groups, best = (config.get(name) for name in ("num_experts_per_tok", "n_group", "topk_group"))
    small: dict[str, Any] = {}
    for name in EXPERT_COUNTS:
        count = config.get(name)
        if not isinstance(count, int) or count < 1:
            continue
        if isinstance(groups, int) and isinstance(best, int) and groups > 1 and best > 0 and count >= groups:
            # Some groups and experts stay unchosen if the model does not choose all; otherwise, a wrong choice could
            # not occur.
            few = min(groups, max(8, best + 1))
            size = min(count // groups, max(3, -(-(chosen or 1) // best) + 1))
            small |= {"n_group": few, name: few * size + min(count % groups, 1)}
        elif isinstance(chosen, int):
            small[name] = min(count, max(chosen + 5, 8))
    return small


# --- layers ---------------------------------------------------------------------------------------------------------


def _layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keeps the first layer of each kind, and one more if there are at most two kinds. If every n-th layer is of
    another kind, keeps the first layers without gaps. Never keeps more than `_MOST_LAYERS`."""
    count = config["num_hidden_layers"]
    lists = {
        name: value
        for name, value in config.items()
        if isinstance(value, list | tuple) and len(value) == count and "layer" in name and name not in _SOME_LAYERS
    }
    kept = _kept_layers(config, count, list(lists.values()))
    small: dict[str, Any] = {"num_hidden_layers": len(kept)}
    small |= {name: [value[layer] for layer in kept] for name, value in lists.items()}
    for name in _FIRST_LAYERS:
        if isinstance(first := config.get(name), int):
            small[name] = sum(layer < first for layer in kept) + max(0, first - count)
    for name in _SOME_LAYERS:
        if isinstance(some := config.get(name), list | tuple):
            small[name] = [place for place, layer in enumerate(kept) if layer in some]
    if isinstance(own := config.get("per_layer_config"), Mapping):
        small["per_layer_config"] = {str(i): own[str(layer)] for i, layer in enumerate(kept) if str(layer) in own}
    return small


def _kept_layers(config: Mapping[str, Any], count: int, lists: Sequence[Sequence[Any]]) -> list[int]:
    first = [value for name in _FIRST_LAYERS if isinstance(value := config.get(name), int)]
    some = [value for name in _SOME_LAYERS if isinstance(value := config.get(name), list | tuple)]
    every = [value for name in _EVERY_NTH_LAYER if isinstance(value := config.get(name), int) and value > 1]
    own = config.get("per_layer_config") or {}
    kinds: dict[str, int] = {}
    for layer in range(count):
        kind = [
            [value[layer] for value in lists],
            [layer < value for value in first],
            [layer in value for value in some],
            [(layer + 1) % value == 0 for value in every],
            str(layer) in own,
        ]
        kinds.setdefault(str(kind), layer)
    kept = sorted(kinds.values())[:_MOST_LAYERS]
    if every:
        return list(range(min(count, max(*every, kept[-1]) + 1)))[:_MOST_LAYERS]
    another = next((layer for layer in range(count) if layer not in kept), None)
    return kept if another is None or len(kept) > 2 else sorted([*kept, another])


# --- lengths and tokens ---------------------------------------------------------------------------------------------


def _lengths(config: Mapping[str, Any]) -> dict[str, Any]:
    """If rotary frequencies depend on the sequence length, returns a small threshold and a small maximum length;
    otherwise, an empty dict."""
    rope = config.get("rope_parameters") or {}
    parts = [part for part in (rope, *rope.values()) if isinstance(part, Mapping)]
    if all(part.get(key) in _SAME_AT_ANY_LENGTH for part in parts for key in ("rope_type", "type")):
        return {}
    name = "original_max_position_embeddings"
    longest = config.get("max_position_embeddings") or _ORIGINAL_LENGTH
    original = next((value for part in (*parts, config) if (value := part.get(name))), longest)

    def scaled(length: int) -> int:
        return max(1, round(length * _ORIGINAL_LENGTH / original))

    def small(part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        return {key: scaled(value) if key == name and value else small(value) for key, value in part.items()}

    found = {"rope_parameters": small(rope), "max_position_embeddings": scaled(longest)}
    return {**found, name: scaled(config[name])} if config.get(name) else found


def _tokens(small: Mapping[str, Any]) -> dict[str, Any]:
    """Returns for each special token an id that exists in the small vocabulary."""
    size = small["vocab_size"]
    found: dict[str, Any] = {}
    for number, (name, value) in enumerate(sorted(small.items())):
        if name.endswith("_token_id") and isinstance(value, int | list) and not isinstance(value, bool):
            first = value[0] if isinstance(value, list) and value else value
            found[name] = first if isinstance(first, int) and first < size else number % size
    return found
