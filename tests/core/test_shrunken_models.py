"""The small copy of a model's configuration keeps the fields that decide how the model is computed."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rl_core.errors import ConfigError
from rl_transformers.proof.shrunken_models import MANY_TOKENS, shrunken

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "layer_types": ["full_attention"] * 36,
    "eos_token_id": 151645,
}
V3 = {
    **QWEN3,
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "head_dim": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "kv_lora_rank": 512,
    "n_routed_experts": 256,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "layer_types": None,
}


def small(**changes: Any) -> dict[str, Any]:
    return shrunken({**QWEN3, **changes}, "here")


def test_fields_that_are_not_sizes_are_kept_except_quantization_and_token_ids():
    found = small(some_new_field="kept", quantization_config={"bits": 4})
    for name in ("model_type", "architectures", "head_dim", "rms_norm_eps", "tie_word_embeddings", "some_new_field"):
        assert found[name] == {**QWEN3, "some_new_field": "kept"}[name]
    assert found["rope_parameters"] == QWEN3["rope_parameters"]
    assert found["max_position_embeddings"] == QWEN3["max_position_embeddings"]
    assert "quantization_config" not in found
    assert found["eos_token_id"] < found["vocab_size"]


def test_a_model_with_one_kind_of_layer_shrinks_to_two_layers_and_small_sizes():
    found = small()
    assert found["num_hidden_layers"] == len(found["layer_types"]) == 2
    assert found["hidden_size"] == found["num_attention_heads"] * 128 == 512
    assert found["vocab_size"] < 100
    assert found["intermediate_size"] < 100


@given(
    groups=st.integers(1, 12),
    per_group=st.integers(1, 12),
    size=st.sampled_from([8, 64, 128]),
    per_head=st.sampled_from([None, 20, 100]),
    remainder=st.integers(0, 5),
)
def test_shrunken_head_counts_keep_their_divisibility(groups, per_group, size, per_head, remainder):
    heads = groups * per_group
    hidden = heads * (per_head or size) + min(remainder, heads - 1)
    found = small(num_attention_heads=heads, num_key_value_heads=groups, head_dim=size, hidden_size=hidden)
    few, few_groups = found["num_attention_heads"], found["num_key_value_heads"]
    assert few % few_groups == 0
    assert (few == few_groups, few_groups == 1) == (heads == groups, groups == 1)
    assert (few % 2, few_groups % 2) == (heads % 2, groups % 2) or few == heads
    assert (found["hidden_size"] // few == size) == (hidden // heads == size)
    assert found["hidden_size"] % few == 0 or hidden % heads


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"layer_types": ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 30},
            {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        ),
        ({"first_k_dense_replace": 3}, {"num_hidden_layers": 3, "first_k_dense_replace": 2}),
        ({"first_k_dense_replace": 0}, {"num_hidden_layers": 2, "first_k_dense_replace": 0}),
        ({"first_k_dense_replace": 36}, {"num_hidden_layers": 2, "first_k_dense_replace": 2}),
        ({"first_k_dense_replace": 40}, {"num_hidden_layers": 2, "first_k_dense_replace": 6}),
        ({"max_window_layers": 35}, {"num_hidden_layers": 3, "max_window_layers": 2}),
        ({"mlp_only_layers": [20]}, {"num_hidden_layers": 3, "mlp_only_layers": [2]}),
        ({"mlp_only_layers": []}, {"num_hidden_layers": 2, "mlp_only_layers": []}),
        ({"decoder_sparse_step": 2}, {"num_hidden_layers": 3, "decoder_sparse_step": 2}),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [4]}, {"num_hidden_layers": 5, "mlp_only_layers": [4]}),
        ({"per_layer_config": {"7": {"rms_norm_eps": 1.0}}}, {"per_layer_config": {"2": {"rms_norm_eps": 1.0}}}),
    ],
)
def test_every_kind_of_layer_is_kept(fields, expected):
    found = small(**fields)
    assert {name: found[name] for name in expected} == expected


def test_windows_are_shorter_than_a_test_sequence():
    assert small(sliding_window=4096)["sliding_window"] < MANY_TOKENS
    assert small(sliding_window=None)["sliding_window"] is None


@pytest.mark.parametrize("kind", ["yarn", "llama3", "linear"])
def test_rope_parameters_that_do_not_depend_on_length_are_kept(kind):
    rope = {"rope_type": kind, "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
    assert small(rope_parameters=rope)["rope_parameters"] == rope


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "unknown_kind"])
def test_length_dependent_or_unknown_rope_scaling_starts_within_a_test_sequence(kind):
    rope = {"rope_type": kind, "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4096}
    found = small(rope_parameters=rope, max_position_embeddings=131072)
    original = found["rope_parameters"]["original_max_position_embeddings"]
    assert original < MANY_TOKENS
    assert found["max_position_embeddings"] == 32 * original
    alone = small(rope_parameters={"rope_type": kind, "rope_theta": 1e6, "factor": 4.0})
    assert alone["max_position_embeddings"] < MANY_TOKENS


def test_fewer_experts_keep_their_groups_and_the_numbers_of_chosen_experts_and_groups():
    found = shrunken(V3, "here")
    for name in ("num_experts_per_tok", "n_group", "topk_group", "qk_nope_head_dim", "qk_rope_head_dim"):
        assert found[name] == V3[name]
    assert found["n_routed_experts"] % found["n_group"] == 0
    assert found["n_routed_experts"] // found["n_group"] * found["topk_group"] > found["num_experts_per_tok"]
    assert found["n_routed_experts"] < 40
    assert shrunken({**V3, "n_group": None, "topk_group": None}, "here")["n_routed_experts"] == 13
    assert shrunken({**V3, "n_routed_experts": 255}, "here")["n_routed_experts"] % 8 == 1


def test_configurations_of_several_models_or_without_sizes_are_refused():
    with pytest.raises(ConfigError, match=r"here: .* combines several models"):
        small(text_config={}, vision_config={})
    with pytest.raises(ConfigError, match="here: its configuration has no hidden_size"):
        small(hidden_size=None)
