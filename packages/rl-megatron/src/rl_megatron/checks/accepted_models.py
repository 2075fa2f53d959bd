"""The models that Megatron computes as transformers does. Every other one is refused before any rank starts.

An allow-list: a model type is in it once tests compare it with transformers, and a field of its configuration may have
the values with which both compute the same. What neither transformers nor Megatron-Bridge reads may be there too.
Differences that messages name are of log-probs, the largest over tiny random models in float32 (where both agree, the
rounding is 1e-6). Imports no torch, and transformers only to read a configuration.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from rl_core.errors import ConfigError
from rl_core.rank_kit.model_shapes import read_config
from rl_megatron.checks.megatron_fields import fields_read_by_bridge
from rl_megatron.checks.model_checks import (
    Check,
    as_json,
    given,
    latent_heads,
    latent_yarn,
    layers_are_alike,
    llama3,
    rotary,
    sigmoid_router,
    softmax_router,
    unscaled,
)


@attrs.frozen(kw_only=True)
class Fixed:
    """A field that may have some values only."""

    values: tuple[Any, ...]
    """The first one is named to the user; None stands for an absent field."""
    reason: str
    """Against others."""


@attrs.frozen(kw_only=True)
class ModelType:
    """A type of models that is accepted."""

    architecture: str
    """Class of transformers by which Megatron-Bridge chooses how it converts."""
    rotary: Mapping[str, Check]
    """Accepted values of `rope_parameters.rope_type`, each with a check of what stands beside it."""
    fixed: Mapping[str, Fixed]
    """Beside those of every type."""
    free: frozenset[str]
    """Fields that may have any value, or that one of `checks` looks at. Of the others, those of transformers' class may
    have their default only, and those that Megatron-Bridge alone reads may not be there."""
    checks: tuple[Check, ...] = ()
    """Of fields that are right or wrong together."""


# --- every type -----------------------------------------------------------------------------------------------------

_NO_BIASES = Fixed(
    values=(False, None),
    reason="Megatron-Bridge 0.3.1 does not convert these biases (log-probs off by up to 2.6, or a failure to load)",
)
EVERY_TYPE = {
    "hidden_act": Fixed(values=("silu",), reason="kernels of GPUs approximate others, or lack them"),
    "use_sliding_window": Fixed(
        values=(False, None),
        reason="Megatron-Bridge 0.3.1 does not convert sliding windows (log-probs off by up to 2.3)",
    ),
    "mlp_bias": _NO_BIASES,
    "partial_rotary_factor": Fixed(
        values=(1.0, None), reason="Megatron-Bridge 0.3.1 reads it, transformers does not (log-probs off by up to 1.0)"
    ),
    "is_causal": Fixed(
        values=(True, None), reason="Megatron attends to earlier tokens only (log-probs off by up to 2.0)"
    ),
    "quantization_config": Fixed(
        values=(None,), reason="Megatron-Bridge 0.3.1 loads weights without their scales (log-probs off by 1.3)"
    ),
    "transformers_weights": Fixed(values=(None,), reason="Megatron-Bridge 0.3.1 reads the usual files"),
}
"""Fields of models of every type."""
_SIZES = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "tie_word_embeddings",
        "rms_norm_eps",
    }
)
_WITHOUT_EFFECT = frozenset(
    {
        "attention_dropout",  # none in either backend
        "hidden_dropout",
        "initializer_range",
        "use_cache",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "sliding_window",  # without use_sliding_window
        "max_window_layers",
        "pretraining_tp",
        "output_router_logits",
        "router_aux_loss_coef",
        "aux_loss_alpha",  # megatron_config has its own coefficient
    }
)
_LOOKED_AT = frozenset({"layer_types", "rope_parameters"})
_FREE = _SIZES | _WITHOUT_EFFECT | _LOOKED_AT
_OF_LATENT_MODELS = frozenset(
    {
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "moe_intermediate_size",
        "num_experts_per_tok",
        "n_routed_experts",
        "n_shared_experts",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "first_k_dense_replace",
        "scoring_func",  # both always take sigmoid
        "num_mtp_layers",  # neither trains them
        "num_nextn_predict_layers",
    }
)

ACCEPTED: dict[str, ModelType] = {
    "llama": ModelType(
        architecture="LlamaForCausalLM",
        rotary={"default": unscaled, "llama3": llama3},
        fixed={"attention_bias": _NO_BIASES},
        free=_FREE,
    ),
    "qwen2": ModelType(
        architecture="Qwen2ForCausalLM",
        rotary={"default": unscaled},
        fixed={},
        free=_FREE | {"attention_bias"},  # it always has them
    ),
    "qwen3": ModelType(
        architecture="Qwen3ForCausalLM",
        rotary={"default": unscaled},
        fixed={"attention_bias": _NO_BIASES},
        free=_FREE | {"use_qk_norm"},  # it always normalises them
    ),
    "qwen3_moe": ModelType(
        architecture="Qwen3MoeForCausalLM",
        rotary={"default": unscaled},
        fixed={
            "attention_bias": _NO_BIASES,
            "mlp_only_layers": Fixed(values=([], None), reason="only some layers have experts"),
            "decoder_sparse_step": Fixed(values=(1,), reason="only some layers have experts"),
        },
        free=_FREE | {"use_qk_norm", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"},
        checks=(softmax_router,),
    ),
    "deepseek_v3": ModelType(
        architecture="DeepseekV3ForCausalLM",
        rotary={"default": unscaled, "yarn": latent_yarn},
        fixed={
            "attention_bias": _NO_BIASES,
            "rms_norm_eps": Fixed(
                values=(1e-6,),
                reason="transformers takes 1e-6 for the norms of latents whatever it says, Megatron what it says "
                "(log-probs off by 4e-5 with 1e-5, by 0.18 with 1e-2)",
            ),
            "rope_interleave": Fixed(values=(True,), reason="Megatron always interleaves (log-probs off by 0.75)"),
            "norm_topk_prob": Fixed(
                values=(True,), reason="Megatron always normalises sigmoid scores (log-probs off by 0.22)"
            ),
        },
        free=(_FREE - {"rms_norm_eps"}) | _OF_LATENT_MODELS,
        checks=(latent_heads, sigmoid_router),
    ),
}
"""By `model_type`."""
_NOT_BUILT = (
    "gemma3",
    "gemma3_text",
    "glm4_moe",
    "ministral3",
    "mistral",
    "mixtral",
    "nemotron",
    "nemotron_h",
    "olmoe",
    "qwen2_moe",
    "qwen3_next",
)
REFUSED = {
    "gemma": "Megatron computes otherwise than transformers (log-probs off by 4.2)",
    "gemma2": "Megatron computes otherwise than transformers (log-probs off by 3.4)",
    "gpt_oss": "Megatron computes otherwise than transformers (log-probs off by 0.85)",
    **dict.fromkeys(_NOT_BUILT, "Megatron-Bridge 0.3.1 cannot build"),
}
"""Types of which it is known why; no test compares any other with transformers."""
_REMEDY = "Set trainer.strategy=fsdp, which trains transformers' own model"


def _architecture(config: Any) -> str | None:
    expected = ACCEPTED[config.model_type].architecture
    if config.architectures != [expected]:
        return f"{given('architectures', config.architectures)}: Megatron-Bridge knows it by {as_json([expected])}"
    remote = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if remote is not None and str(remote).rpartition(".")[2] != expected:
        return f"{given('auto_map.AutoModelForCausalLM', remote)}: code of its own, which Megatron-Bridge does not know"
    return None


def _fixed(config: Any) -> str | None:
    for name, fixed in (EVERY_TYPE | dict(ACCEPTED[config.model_type].fixed)).items():
        value = getattr(config, name, None)
        if value not in fixed.values:
            return f"{given(name, value)} (accepted: {as_json(fixed.values[0])}): {fixed.reason}"
    return None


def _unknown(config: Any) -> str | None:
    """A field with an effect that nobody looked at: of transformers' class, or that Megatron-Bridge reads alone."""
    accepted = ACCEPTED[config.model_type]
    known = accepted.free | accepted.fixed.keys() | EVERY_TYPE.keys()
    own = own_fields(type(config))
    for name, default in own.items():
        if name not in known and getattr(config, name, default) != default:
            return f"{given(name, getattr(config, name))}: not known here what Megatron makes of it"
    of_bridge = fields_read_by_bridge() - known - own.keys() - _aliases(type(config))
    for name in sorted(of_bridge):
        if getattr(config, name, None) not in (None, False):
            return (
                f"{given(name, getattr(config, name))}: transformers does not read it, Megatron-Bridge 0.3.1 does; "
                "leave it out"
            )
    return None


def _rotary(config: Any) -> str | None:
    return rotary(config, ACCEPTED[config.model_type].rotary)


_CHECKS: tuple[Check, ...] = (layers_are_alike, _architecture, _fixed, _unknown, _rotary)


def own_fields(config_class: type) -> dict[str, Any]:
    """Fields that transformers' class of a type has beside those of every type, with their defaults."""
    from transformers import PretrainedConfig

    common = {field.name for field in dataclasses.fields(PretrainedConfig)}
    return {field.name: field.default for field in dataclasses.fields(config_class) if field.name not in common}


def _aliases(config_class: Any) -> set[str]:
    names = config_class.attribute_map
    return {*names.keys(), *names.values()}


# --- what callers ask -----------------------------------------------------------------------------------------------


def accepted_config(path: str | None, where: str) -> Any:
    """transformers' configuration of a model that is at hand: in a local directory, or in the cache of the hub.

    Args:
        path: directory or name.
        where: key path of the model, for messages.

    Returns:
        None where nothing is at hand: a recipe has yet to make the model, or a rank to fetch it.

    Raises:
        ConfigError: the configuration cannot be read, or the model is not accepted.
    """
    if path is None or (written := _written(path)) is None:
        return None
    _require_type(written.get("model_type"), path, where)
    from transformers import AutoConfig

    try:
        with _quiet():
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever its checks of fields raise
        raise ConfigError(f"{where}: transformers cannot read the configuration of {path}: {error}") from error
    require_accepted(config, path, where)
    return config


def require_accepted(config: Any, path: str | None, where: str) -> None:
    """Raises ConfigError for a model that Megatron would compute otherwise than transformers, or could not build.

    Args:
        config: transformers' configuration.
        path: of the model, for messages.
        where: key path of the model, for messages.
    """
    kind = config.model_type
    _require_type(kind, path, where)
    for check in (*_CHECKS, *ACCEPTED[kind].checks):
        if (complaint := check(config)) is not None:
            raise ConfigError(f"{where}: {path} is a {kind} model with {complaint}. {_REMEDY}")


def _require_type(kind: Any, path: str | None, where: str) -> None:
    if kind in ACCEPTED:
        return
    accepted = ", ".join(ACCEPTED)
    if kind is None:
        raise ConfigError(f"{where}: the config.json of {path} has no model_type; Megatron accepts {accepted}")
    reason = REFUSED.get(kind, "no test compares with transformers")
    raise ConfigError(
        f"{where}: {path} has model_type={as_json(kind)}, which {reason}; Megatron accepts {accepted}. {_REMEDY}"
    )


def _written(path: str) -> Mapping[str, Any] | None:
    """`config.json` of a local directory, or of a model that was fetched from the hub before."""
    if (local := read_config(path)) is not None:
        return local
    from transformers import PretrainedConfig

    try:
        with _quiet():
            found, _ = PretrainedConfig.get_config_dict(path, local_files_only=True)
    except OSError:
        return None
    return found or None  # it is empty for a directory without the file


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' warnings about fields: what matters of them is refused."""
    from transformers import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
