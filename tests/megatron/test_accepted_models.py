"""Models that Megatron would compute otherwise than transformers, or could not build, are refused before any rank
starts. What is accepted is computed alike, and what is refused by a measurement still is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from transformers import AutoConfig

from rl_core.cli.app import rl
from rl_core.errors import ConfigError
from rl_core.interfaces import ModelConfig, OptimizerConfig, Role, WorkerSpec
from rl_core.testing.backend import LIMITS, PRELOADED, TEMPERATURE, expected_scores
from rl_core.testing.cases import Variant, open_case
from rl_core.testing.models import make_checkpoint
from rl_megatron import MegatronOptions, megatron
from rl_megatron.backend import MegatronBackend
from rl_megatron.checks.accepted_models import ACCEPTED, EVERY_TYPE, REFUSED, own_fields
from tests.megatron.changed import UncheckedBackend

PRELOADED.update(dict.fromkeys(["rl_megatron.rank.worker", "tests.megatron.changed"]))
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
    """A `config.json` of an accepted type."""
    return {
        "model_type": model_type,
        "architectures": [ACCEPTED[model_type].architecture],
        **SIZES,
        **TYPES[model_type],
        **fields,
    }


def rope(theta: float = 50.0, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": theta, **parameters}}


@pytest.fixture
def model_of(tmp_path):
    def make(config: dict[str, Any], name: str = "model") -> str:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        return str(directory)

    return make


def spec_of(path: str, role: Role = "policy") -> WorkerSpec:
    return WorkerSpec(
        role=role,
        model=ModelConfig(path=path),
        optimizer=OptimizerConfig(),
        options=MegatronOptions(),
        bf16=False,
        gradient_checkpointing=False,
        use_sample_packing=True,
        logprobs_chunk_size=64,
        total_optimizer_steps=None,
        seed=0,
    )


def refusal(path: str, role: Role = "policy") -> str:
    with pytest.raises(ConfigError) as caught:
        megatron.validate(spec_of(path, role), 1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (config_of("qwen2", **rope(**YARN)), 'qwen2 model with rope_parameters.rope_type="yarn"'),
        (config_of("qwen3", **rope(**YARN)), 'qwen3 model with rope_parameters.rope_type="yarn"'),
        (config_of("qwen3_moe", **rope(**YARN)), 'qwen3_moe model with rope_parameters.rope_type="yarn"'),
        (config_of("llama", **rope(**YARN)), 'llama model with rope_parameters.rope_type="yarn"'),
        (config_of("qwen3", rope_scaling=YARN, rope_theta=50.0), 'rope_type="yarn" (rope_scaling.type in older files'),
        (config_of("qwen2", rope_scaling={"type": "yarn", "factor": 4.0}), 'rope_type="yarn"'),
        (config_of("qwen2", **rope(**LLAMA3)), 'rope_type="llama3"'),
        (config_of("qwen3", **rope(**LLAMA3)), "log-probs off by 0.031"),
        (config_of("qwen3_moe", **rope(**LLAMA3)), 'rope_type="llama3"'),
        (config_of("deepseek_v3", **rope(**LLAMA3)), 'rope_type="llama3"'),
        (config_of("llama", **rope(**{**LLAMA3, "low_freq_factor": 2.0})), "rope_parameters.low_freq_factor=2.0"),
        (
            config_of("llama", **rope(**{**LLAMA3, "original_max_position_embeddings": 4096})),
            "original_max_position_embeddings=4096",
        ),
        (config_of("llama", rope_scaling={"type": "linear", "factor": 2.0}), 'rope_type="linear"'),
        (config_of("llama", rope_scaling={"type": "dynamic", "factor": 2.0}), 'rope_type="dynamic"'),
        (
            config_of("qwen3", **rope(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4)),
            'rope_type="longrope"',
        ),
        (config_of("qwen3", **rope(rope_type="default", type="yarn")), 'rope_parameters.type="yarn" beside'),
        (config_of("qwen3", partial_rotary_factor=0.5), "partial_rotary_factor=0.5 (accepted: 1.0)"),
        (config_of("llama", **rope(rope_type="default", partial_rotary_factor=0.5)), "partial_rotary_factor=0.5"),
        (config_of("deepseek_v3", **rope(**YARN, attention_factor=1.5)), "attention_factor=1.5"),
        (config_of("deepseek_v3", **rope(**YARN, truncate=False)), "truncate=false"),
        (config_of("deepseek_v3", **rope(**YARN, mscale=0.7)), "mscale=0.7 and mscale_all_dim=null"),
        (config_of("deepseek_v3", rope_interleave=False), "rope_interleave=false (accepted: true)"),
        (config_of("deepseek_v3", rms_norm_eps=1e-5), "rms_norm_eps=1e-05 (accepted: 1e-06)"),
        (config_of("deepseek_v3", norm_topk_prob=False), "norm_topk_prob=false"),
        (config_of("deepseek_v3", n_group=4, topk_group=2), "n_group=4, topk_group=2, num_experts_per_tok=2"),
        (config_of("deepseek_v3", num_experts_per_tok=4), "sums the scores of a group's best 4 experts"),
        (config_of("deepseek_v3", num_experts_per_tok=1), "num_experts_per_tok=1"),
        (config_of("deepseek_v3", n_group=8), "8 experts are not 8 groups of 2 or more"),
        (config_of("deepseek_v3", n_group=None), "n_group=null"),
        (config_of("deepseek_v3", n_shared_experts=0), "n_shared_experts=0"),
        (config_of("deepseek_v3", routed_scaling_factor=0.0), "routed_scaling_factor=0.0"),
        (config_of("deepseek_v3", first_k_dense_replace=3), "first_k_dense_replace=3"),
        (config_of("deepseek_v3", num_key_value_heads=2), "num_key_value_heads=2"),
        (config_of("deepseek_v3", head_dim=16), "head_dim=16"),
        (config_of("qwen3_moe", norm_topk_prob=False), "set trainer.policy.megatron_config.transformer_config_kwargs."),
        (config_of("qwen3_moe", num_experts_per_tok=1), "num_experts_per_tok=1 and norm_topk_prob=true"),
        (config_of("qwen3_moe", num_experts=0), "num_experts=0"),
        (config_of("qwen3_moe", mlp_only_layers=[0]), "mlp_only_layers=[0] (accepted: []): only some layers have"),
        (config_of("qwen3_moe", decoder_sparse_step=2), "decoder_sparse_step=2"),
        (config_of("qwen3_moe", routed_scaling_factor=2.0), "routed_scaling_factor=2.0: transformers does not read it"),
        (config_of("qwen3_moe", scoring_func="sigmoid"), 'scoring_func="sigmoid"'),
        (config_of("qwen3", attention_bias=True), "attention_bias=true (accepted: false)"),
        (config_of("llama", attention_bias=True), "attention_bias=true"),
        (config_of("llama", mlp_bias=True), "mlp_bias=true"),
        (config_of("llama", use_qk_norm=True), "use_qk_norm=true"),
        (config_of("qwen3", num_experts=8), "num_experts=8"),
        (config_of("qwen2", use_sliding_window=True), "use_sliding_window=true"),
        (config_of("qwen3", layer_types=["full_attention", "sliding_attention"]), 'layer_types="sliding_attention"'),
        (config_of("llama", hidden_act="gelu"), 'hidden_act="gelu" (accepted: "silu")'),
        (config_of("llama", is_causal=False), "is_causal=false"),
        (config_of("llama", per_layer_config={"1": {"rms_norm_eps": 0.1}}), "per_layer_config"),
        (config_of("deepseek_v3", quantization_config={"quant_method": "fp8"}), "quantization_config="),
        (config_of("qwen3", architectures=["Qwen2ForCausalLM"]), 'architectures=["Qwen2ForCausalLM"]'),
        (config_of("qwen3", architectures=None), "architectures=null"),
        (config_of("qwen3", auto_map={"AutoModelForCausalLM": "own.MyQwen"}), "auto_map.AutoModelForCausalLM="),
    ],
)
def test_a_model_that_would_be_computed_otherwise_is_refused(model_of, config, complaint):
    message = refusal(model_of(config))
    assert message.startswith("trainer.policy.model.path: ")
    assert f"{config['model_type']} model with " in message
    assert complaint in message
    assert "trainer.strategy=fsdp" in message


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gemma", "log-probs off by 4.2"),
        ("gemma2", "log-probs off by 3.4"),
        ("gpt_oss", "log-probs off by 0.85"),
        ("mistral", "cannot build"),
        ("mixtral", "cannot build"),
        ("olmoe", "cannot build"),
        ("qwen2_moe", "cannot build"),
        ("glm4_moe", "cannot build"),
        ("gemma3", "cannot build"),
        ("ministral3", "cannot build"),
        ("qwen3_next", "cannot build"),
        ("nemotron", "cannot build"),
        ("granite", "no test compares with transformers"),
        ("deepseek_v2", "no test compares with transformers"),
        ("a_model_of_tomorrow", "no test compares with transformers"),
    ],
)
@pytest.mark.parametrize("role", ["policy", "reference", "critic"])
def test_a_type_of_models_that_is_not_compared_with_transformers_is_refused(model_of, model_type, reason, role):
    """Its configuration need not even be one that transformers reads."""
    message = refusal(model_of({"model_type": model_type}), role)
    section = {"policy": "policy", "reference": "ref", "critic": "critic"}[role]
    assert message.startswith(f"trainer.{section}.model.path: ")
    assert f'model_type="{model_type}", which ' in message
    assert reason in message
    assert "trainer.strategy=fsdp" in message


def test_a_configuration_that_transformers_cannot_read_is_refused(model_of):
    assert "has no model_type" in refusal(model_of({"num_hidden_layers": 2}))
    message = refusal(model_of(config_of("qwen3", hidden_size="large"), "large"))
    assert "transformers cannot read the configuration" in message
    assert "hidden_size" in message


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


@pytest.mark.parametrize("name", REAL_MODELS)
def test_fields_of_published_models_are_accepted(model_of, name):
    megatron.validate(spec_of(model_of(REAL_MODELS[name])), 1)


@pytest.mark.parametrize("model_type", ACCEPTED)
def test_all_fields_of_an_accepted_type_are_known(model_of, model_type):
    """One that a newer transformers adds is looked at before it may differ from its default."""
    accepted = ACCEPTED[model_type]
    config = AutoConfig.from_pretrained(model_of(config_of(model_type)))
    assert own_fields(type(config)).keys() <= accepted.free | accepted.fixed.keys() | EVERY_TYPE.keys()
    assert not accepted.free & accepted.fixed.keys()
    assert model_type not in REFUSED


def dry_run(*overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`rl train quickstart --dry-run` with Megatron."""
    rl_command = str(Path(sys.executable).with_name("rl"))
    return subprocess.run(
        [rl_command, "train", "quickstart", "trainer.strategy=megatron", *overrides, "--dry-run"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.slow
def test_a_dry_run_refuses_with_one_message_and_no_traceback(tmp_path):
    path = make_checkpoint(tmp_path / "model", **rope(**YARN))
    result = dry_run(f"trainer.policy.model.path={path}")
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: trainer.policy.model.path: ")
    assert 'is a qwen3 model with rope_parameters.rope_type="yarn"' in line


@pytest.mark.slow
def test_a_model_in_the_cache_of_the_hub_is_checked_too(tmp_path):
    repository = tmp_path / "hub" / "models--some--model"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    result = dry_run("trainer.policy.model.path=some/model", HF_HOME=str(tmp_path))
    assert result.returncode == 2, result.stderr
    assert 'some/model has model_type="mistral", which Megatron-Bridge 0.3.1 cannot build' in result.stderr


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("ref", ["trainer.algorithm.use_kl_loss=true"]),
        ("critic", ["trainer.algorithm.advantage_estimator=gae", "trainer.critic_mini_batch_size=64"]),
    ],
)
def test_the_other_models_of_a_run_are_checked_too(section, changes, tmp_path):
    """The policy's is not made yet."""
    path = make_checkpoint(tmp_path / "model", **LATENT, rope_interleave=False)
    overrides = ["trainer.strategy=megatron", *changes, f"trainer.{section}.model.path={path}"]
    result = CliRunner().invoke(rl, ["train", "quickstart", *overrides, "--dry-run"], obj={"traceback": False})
    assert isinstance(result.exception, ConfigError), result.output
    assert str(result.exception).startswith(f"trainer.{section}.model.path: ")
    assert "rope_interleave=false" in str(result.exception)


def log_prob_error(backend: MegatronBackend, checkpoint: dict[str, Any], tmp_path: Path) -> float:
    """The largest difference from transformers."""
    with open_case(backend, MegatronOptions(), Variant(checkpoint=checkpoint), tmp_path, timeout_s=120) as case:
        found = case.start().forward(case.batch, LIMITS, temperature=TEMPERATURE)["logprobs"]
        expected = expected_scores(case.reference, case.batch)["logprobs"]
    return float((found - expected).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize(
    "checkpoint",
    [
        {"family": "llama", "rms_norm_eps": 1e-2, **rope(1e6, **{**LLAMA3, "factor": 32.0})},
        {"family": "qwen2", "head_dim": 16, "sliding_window": 4, "max_window_layers": 0},
        {"family": "qwen3_moe", "num_experts_per_tok": 8, "num_key_value_heads": 1},
        {**LATENT, **rope(**YARN, mscale=0.7, mscale_all_dim=1.0, beta_fast=8, beta_slow=2)},
        {**LATENT, **rope(**YARN), "v_head_dim": 16, "q_lora_rank": None},
        {**LATENT, "first_k_dense_replace": 2},
        {**LATENT, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 5, "n_routed_experts": 16},
        {**LATENT, "n_group": 4, "topk_group": 4, "num_experts_per_tok": 3, "n_shared_experts": 2},
    ],
)
def test_what_is_accepted_is_computed_as_transformers_does(checkpoint, tmp_path):
    assert log_prob_error(megatron, checkpoint, tmp_path) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "checkpoint",
    [
        {"family": "qwen3", **rope(**YARN)},
        {"family": "llama", **rope(**YARN)},
        {"family": "qwen3_moe", **rope(1e6, **LLAMA3)},
        {"family": "qwen3", "partial_rotary_factor": 0.5},
        {"family": "qwen3", "attention_bias": True},
        {"family": "qwen3", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
        {"family": "llama", "is_causal": False},
        {"family": "qwen3_moe", "routed_scaling_factor": 2.0},
        {**LATENT, **rope(**YARN, attention_factor=1.5)},
        {**LATENT, "rope_interleave": False},
        {**LATENT, "rms_norm_eps": 1e-2},
        {**LATENT, "norm_topk_prob": False},
        {**LATENT, "num_experts_per_tok": 1, "n_group": 1},
        {**LATENT, "n_group": 4, "topk_group": 2},
    ],
)
def test_what_is_refused_is_still_computed_otherwise(checkpoint, tmp_path):
    assert log_prob_error(UncheckedBackend(), checkpoint, tmp_path) > 1e-3
