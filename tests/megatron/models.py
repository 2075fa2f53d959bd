"""Configurations of tiny models: one of each type, and others with the additional fields of published models."""

from __future__ import annotations

from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ARCHITECTURES

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
TYPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "mistral": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {**EXPERTS, "num_experts": 8, "norm_topk_prob": True},
    "deepseek_v3": {
        **EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "deepseek_v2": {
        **EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
LATENT: dict[str, Any] = {"family": "deepseek_v3", **UNTIED}


def config_of(model_type: str, **fields: Any) -> dict[str, Any]:
    """The `config.json` of a tiny model of an accepted type. `fields` replace or add fields."""
    return {
        "model_type": model_type,
        "architectures": [ARCHITECTURES[model_type]],
        **SIZES,
        **TYPES[model_type],
        **fields,
    }


def rope(theta: float = 50.0, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": theta, **parameters}}


REAL_MODELS = {
    "Llama-3.1-8B": config_of(
        "llama",
        rope_scaling=LLAMA3,
        rope_theta=500000.0,
        pretraining_tp=1,
        mlp_bias=False,
        attention_bias=False,
        torch_dtype="bfloat16",
    ),
    "SmolLM2-135M": config_of("llama", is_llama_config=True, rope_interleaved=False, rope_scaling=None),
    "Qwen2.5-7B": config_of(
        "qwen2", use_mrope=False, use_sliding_window=False, sliding_window=131072, max_window_layers=28, rope_theta=1e6
    ),
    "Qwen3-8B": config_of("qwen3", max_window_layers=36, rope_scaling=None, rope_theta=1000000, sliding_window=None),
    "Qwen3-Coder-30B-A3B": config_of(
        "qwen3_moe", use_qk_norm=True, qkv_bias=False, shared_expert_intermediate_size=0, rope_theta=1e7
    ),
    "DeepSeek-V3, without quantisation": config_of(
        "deepseek_v3",
        auto_map={"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
        rope_scaling={
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        rope_theta=10000,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        aux_loss_alpha=0.001,
        ep_size=1,
        moe_layer_freq=1,
        num_nextn_predict_layers=1,
        seq_aux=True,
    ),
}
