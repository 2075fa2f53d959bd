"""Tiny random models of many families, without tokenizers, for the tests of backends and engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

TINY: dict[str, Any] = {
    "vocab_size": 47,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 0,
}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
_MULTIPLIERS = {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GROUPED = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_HALF_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_ALTERNATING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}

UNUSUAL: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", _GPT),
    ("gpt_neox", {"num_key_value_heads": 4}),
    ("mistral", {"sliding_window": 8}),
    ("mixtral", {"num_local_experts": 4, "sliding_window": 8}),
    ("phi3", {"rope_parameters": _HALF_ROTARY, "sliding_window": 8}),
    ("olmo", {"clip_qkv": 0.1}),
    ("olmo2", {}),
    ("glm4", {}),
    ("glm4_moe", {**_EXPERTS, **_GROUPED, "use_qk_norm": True}),
    ("granite", {**_MULTIPLIERS, "logits_scaling": 4.0}),
    ("granitemoe", {**_MULTIPLIERS, "logits_scaling": 4.0, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("starcoder2", {"sliding_window": 8}),
    ("falcon", {"alibi": True, "head_dim": None}),
    ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    ("smollm3", {"no_rope_layers": [1, 0]}),
    ("cohere", {"logit_scale": 0.25}),
    ("cohere2", {**_ALTERNATING, "logit_scale": 0.25}),
    ("gemma3_text", _ALTERNATING),
    ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    ("qwen3_moe", {**_EXPERTS, "num_experts": 4, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2}),
]
"""Families whose code or settings differ from Qwen's and Llama's, and fields that make the difference matter."""
NOT_PACKED = {"falcon", "stablelm", "gpt_oss"}
"""Those whose packed sequences are refused."""


def random_model(directory: Path, family: str, **config: Any) -> Path:
    """Writes a checkpoint of any model family. A field of `config` that is None is left out."""
    torch.manual_seed(0)
    fields = {name: value for name, value in {**TINY, **config}.items() if value is not None or name not in TINY}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields)).save_pretrained(directory)
    return directory
