"""Models that are refused without a proof before any rank starts, and models on which a run's checks start a proof.
Ranks compute accepted models as transformers does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rl_core.cli.app import rl
from rl_core.errors import ConfigError
from rl_core.interfaces import Role
from rl_megatron import MegatronOptions, megatron
from rl_megatron.backend import MegatronBackend
from rl_transformers.proof import model_proof
from rl_transformers.testing.backend import LIMITS, PRELOADED, TEMPERATURE, expected_scores
from rl_transformers.testing.cases import Variant, open_case
from rl_transformers.testing.models import make_checkpoint
from tests.megatron.models import LATENT, LLAMA3, YARN, config_of, rope
from tests.megatron.proving import spec_of

PRELOADED["rl_megatron.rank.worker"] = None


@pytest.fixture
def model_of(tmp_path):
    def make(config: dict[str, Any], name: str = "model") -> str:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        return str(directory)

    return make


def refusal(path: str, role: Role = "policy") -> str:
    with pytest.raises(ConfigError) as caught:
        megatron.validate(spec_of(path, role=role), 1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (config_of("llama", hidden_act="gelu"), 'hidden_act="gelu" (accepted: "silu")'),
        (config_of("deepseek_v3", quantization_config={"quant_method": "fp8"}), "quantization_config="),
        (config_of("qwen3", transformers_weights="other.safetensors"), "transformers_weights="),
    ],
)
def test_differences_that_a_small_copy_cannot_show_are_refused(model_of, config, complaint):
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
        ("mixtral", "cannot build"),
        ("olmoe", "cannot build"),
        ("qwen2_moe", "cannot build"),
        ("glm4_moe", "cannot build"),
        ("gemma3", "cannot build"),
        ("ministral3", "cannot build"),
        ("qwen3_next", "cannot build"),
        ("nemotron", "cannot build"),
    ],
)
@pytest.mark.parametrize("role", ["policy", "reference", "critic"])
def test_model_types_with_known_faults_are_refused_without_a_proof(model_of, model_type, reason, role):
    """The refusal needs only the model type, even if transformers cannot read the configuration."""
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


def dry_run(*overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `rl train quickstart --dry-run` with Megatron."""
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
def test_a_dry_run_refuses_a_wrong_model_with_one_message_and_no_traceback(tmp_path):
    path = make_checkpoint(tmp_path / "model", is_causal=False)
    result = dry_run(f"trainer.policy.model.path={path}")
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    said, line = result.stderr.splitlines()
    assert "comparing a small copy of " in said
    assert line.startswith("error: trainer.policy.model.path: megatron does not compute ")
    assert "(qwen3) as transformers does: log-probs of a small copy of it differ by " in line
    assert "trainer.strategy=fsdp" in line


@pytest.mark.slow
def test_a_model_in_the_cache_of_the_hub_is_checked_too(tmp_path):
    repository = tmp_path / "hub" / "models--some--model"
    snapshot = repository / "snapshots" / ("a" * 40)
    make_checkpoint(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    result = dry_run("trainer.policy.model.path=some/model", HF_HOME=str(tmp_path))
    assert result.returncode == 2, result.stderr
    assert 'some/model has model_type="mixtral", which Megatron-Bridge 0.3.1 cannot build' in result.stderr


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("ref", ["trainer.algorithm.use_kl_loss=true"]),
        ("critic", ["trainer.algorithm.advantage_estimator=gae", "trainer.critic_mini_batch_size=64"]),
    ],
)
def test_the_other_models_of_a_run_are_checked_too(section, changes, tmp_path, monkeypatch):
    """Runs in an empty directory, because a quick start may have created the policy's model in the current one."""
    monkeypatch.chdir(tmp_path)
    path = make_checkpoint(tmp_path / "model", **LATENT, rope_interleave=False)
    overrides = ["trainer.strategy=megatron", *changes, f"trainer.{section}.model.path={path}"]
    result = CliRunner().invoke(rl, ["train", "quickstart", *overrides, "--dry-run"], obj={"traceback": False})
    assert isinstance(result.exception, ConfigError), result.output
    assert str(result.exception).startswith(f"trainer.{section}.model.path: ")
    assert "(deepseek_v3) as transformers does" in str(result.exception)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("train", "later      trainer.policy.model.path: the model will be compared with transformers at the start ("),
        ("plan", "not proved yet: a run compares the model with transformers first ("),
    ],
)
def test_without_a_proof_a_dry_run_and_a_plan_announce_the_proof_at_the_start(command, said, tmp_path, monkeypatch):
    monkeypatch.setattr(model_proof, "_proved_here", set())
    monkeypatch.setenv(model_proof.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(MegatronBackend, "proof_obstacle", lambda self: "this is a laptop")
    path = make_checkpoint(tmp_path / "model")
    overrides = ["trainer.strategy=megatron", f"trainer.policy.model.path={path}"]
    arguments = [command, "quickstart", *overrides, *(["--dry-run"] if command == "train" else [])]
    result = CliRunner().invoke(rl, arguments, obj={"traceback": False})
    assert result.exit_code == 0, result.output
    assert said in result.output
    assert "this is a laptop" in result.output


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
        {**LATENT, "n_group": 4, "topk_group": 2},
        {**LATENT, "rms_norm_eps": 1e-2},
        {**LATENT, **rope(**YARN, attention_factor=1.5)},
        {"family": "qwen3", **rope(**YARN)},
        {"family": "llama", **rope(**YARN)},
        {"family": "qwen3_moe", "norm_topk_prob": False, **rope(1e6, **LLAMA3)},
    ],
)
def test_accepted_models_are_computed_as_in_transformers(checkpoint, tmp_path):
    with open_case(megatron, MegatronOptions(), Variant(checkpoint=checkpoint), tmp_path, timeout_s=120) as case:
        found_T = case.start().forward(case.batch, LIMITS, temperature=TEMPERATURE)["logprobs"]
        expected_T = expected_scores(case.reference, case.batch)["logprobs"]
    assert (found_T - expected_T).abs().max() < 2e-5
