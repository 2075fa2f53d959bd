"""Model families: Megatron computes the same as transformers, and exports the weights that it loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_core.errors import ConfigError
from rl_core.interfaces import ModelConfig, Worker
from rl_megatron import MegatronOptions, megatron
from rl_transformers.testing.backend import LIMITS, PRELOADED, TEMPERATURE, backward, expected_scores, weights
from rl_transformers.testing.cases import LOSS, Variant, open_case
from rl_transformers.testing.models import make_checkpoint
from rl_transformers.testing.rank_process import SuiteHost
from rl_transformers.testing.reference_worker import ReferenceWorker
from tests.forced_numbers import gradient_error
from tests.megatron.probes import probed

PRELOADED["rl_megatron.rank.worker"] = None
ROPE = {"rope_type": "default", "rope_theta": 50.0}
MOONLIGHT = {
    "family": "deepseek_v3",
    "num_hidden_layers": 27,
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.446,
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "qwen2": {"family": "qwen2"},
    "qwen3, another rotary base": {"rope_parameters": ROPE},
    "qwen3, vocabulary that two ranks cannot halve": {"vocab_size": 51},
    "llama": {"family": "llama", "tie_word_embeddings": False},
    "llama 3 rotary scaling": {
        "family": "llama",
        "max_position_embeddings": 16384,
        "rope_parameters": {
            "rope_type": "llama3",
            # Of a head's four frequencies, two are unscaled, one is partly scaled, and one is fully scaled.
            "rope_theta": 1e6,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen3, yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 50.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "attention_factor": 1.3,
        }
    },
    "qwen3, linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "qwen3_moe": {"family": "qwen3_moe", "tie_word_embeddings": False},
    "deepseek_v3": {"family": "deepseek_v3", "tie_word_embeddings": False},
    "deepseek_v3, groups by their best two, latent eps": {
        "family": "deepseek_v3",
        "tie_word_embeddings": False,
        "n_group": 4,
        "topk_group": 2,
        "rms_norm_eps": 1e-4,
    },
    "deepseek_v3, yarn": {
        "family": "deepseek_v3",
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 50.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "moonlight": {**MOONLIGHT, "tie_word_embeddings": False},
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_scores_and_weights_are_those_of_transformers_on_two_ranks(name: str, tmp_path: Path):
    options = MegatronOptions(tensor_model_parallel_size=2)
    with open_case(
        megatron, options, Variant(world_size=2, checkpoint=CHECKPOINTS[name]), tmp_path, timeout_s=120
    ) as case:
        group = case.start()
        found = group.forward(case.batch, LIMITS, temperature=TEMPERATURE)
        for score, expected_T in expected_scores(case.reference, case.batch).items():
            # Rounding of float32 sums over 27 layers is about 5e-6.
            torch.testing.assert_close(found[score], expected_T, rtol=0, atol=3e-5, msg=score)
        exported, expected = group.weights(), weights(case.reference)
        assert set(exported) == set(expected)
        assert all(exported[n].equal(weight) for n, weight in expected.items())
        group.call(Worker.save_model, tmp_path / "saved")
        saved = ReferenceWorker(attrs.evolve(case.spec, model=ModelConfig(path=str(tmp_path / "saved"))))
        for n, buffer in case.reference.model.named_buffers():
            assert saved.model.get_buffer(n).equal(buffer), n


def test_bfloat16_keeps_float32_sums_and_scores_as_transformers_does(tmp_path: Path):
    with open_case(
        megatron, MegatronOptions(), Variant(checkpoint={}, spec={"bf16": True}), tmp_path, timeout_s=120
    ) as case:
        group = case.start()
        found = group.forward(case.batch, LIMITS, temperature=TEMPERATURE)["logprobs"]
        expected = expected_scores(case.reference, case.batch)["logprobs"]
        # bfloat16 has 8 significant bits, so logits of about 4 have errors of about 0.02.
        assert (found - expected).abs().max() < 0.3
        losses = []
        for _ in range(6):
            metrics = group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)
            losses.append(metrics["loss"][0])
            group.optim_step()
        assert losses[-1] < losses[0]
        assert {tensor.dtype for tensor in group.weights().values()} == {torch.bfloat16}
        group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)
        first = group.gradients()
        assert {tensor.dtype for tensor in first.values()} == {torch.float32}
        group.optim_step()
        group.call(Worker.save_model, tmp_path / "saved")
        saved = ReferenceWorker(attrs.evolve(case.spec, model=ModelConfig(path=str(tmp_path / "saved"))))
        assert all(weight.bfloat16().equal(group.weights()[name]) for name, weight in weights(saved).items())
        # Reading the gradients of a step must not change the gradients of the next step.
        group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)
        backward(saved, case.batch, LOSS)
        assert gradient_error(group.gradients(), saved.gradients()) < 0.05  # bfloat16; measured: 0.015
        assert gradient_error(first, saved.gradients()) > 0.5, "a gradient of the previous step would pass"


@pytest.mark.parametrize("name", ["qwen3, yarn", "deepseek_v3, yarn"])
def test_scaled_rotary_embeddings_equal_those_of_transformers_on_split_sequences(name, tmp_path: Path):
    options = MegatronOptions(context_parallel_size=2)
    variant = Variant(world_size=2, checkpoint=CHECKPOINTS[name])
    with open_case(megatron, options, variant, tmp_path, timeout_s=120) as case:
        found = case.start().forward(case.batch, LIMITS, temperature=TEMPERATURE)["logprobs"]
        expected = expected_scores(case.reference, case.batch)["logprobs"]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_rank_runs_the_proof_that_the_controller_could_not(tmp_path: Path):
    with open_case(megatron, MegatronOptions(), Variant(), tmp_path, timeout_s=120) as case:
        path = make_checkpoint(tmp_path / "dynamic", rope_parameters={**ROPE, "rope_type": "dynamic", "factor": 2.0})
        spec = attrs.evolve(case.spec, model=ModelConfig(path=str(path)), is_proved=False)
        with pytest.raises(ConfigError, match="as transformers does: log-probs of a small copy"):
            case.start(spec)


def test_the_name_of_an_attention_backend_becomes_megatrons_enum_member(tmp_path: Path):
    options = MegatronOptions(transformer_config_kwargs={"attention_backend": "auto"})
    with open_case(probed, options, Variant(), tmp_path, timeout_s=120) as case:
        assert case.start().call(SuiteHost.ask, "attention_backend") == ["auto"]


@pytest.mark.parametrize("more", [-1, 1])
def test_a_vocabulary_of_another_size_than_the_weights_is_refused(more: int, tmp_path: Path):
    with open_case(probed, MegatronOptions(), Variant(), tmp_path, timeout_s=120) as case:
        path = make_checkpoint(tmp_path / "resized")
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + more}))
        with pytest.raises(ConfigError, match=r"embed_tokens\.weight of .*resized has \d+ rows, but vocab_size"):
            case.start(attrs.evolve(case.spec, model=ModelConfig(path=str(path))))


def test_a_checkpoint_in_another_format_is_refused(tmp_path: Path):
    with open_case(megatron, MegatronOptions(), Variant(), tmp_path, timeout_s=120) as case:
        path = make_checkpoint(tmp_path / "old")
        (path / "model.safetensors").rename(path / "pytorch_model.bin")
        with pytest.raises(ConfigError, match=r"old has no \.safetensors file, .* save it again"):
            case.start(attrs.evolve(case.spec, model=ModelConfig(path=str(path))))


@pytest.mark.parametrize("missing", ["model.layers.0.self_attn.q_norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_a_checkpoint_that_lacks_a_weight_is_refused(missing: str, tmp_path: Path):
    with open_case(megatron, MegatronOptions(), Variant(), tmp_path, timeout_s=120) as case:
        path = make_checkpoint(tmp_path / "lacking")
        file = path / "model.safetensors"
        weights_of_file = load_file(file)
        del weights_of_file[missing]
        save_file(weights_of_file, file, metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=r"lacking has no weight for Megatron's decoder\.layers\.\d"):
            case.start(attrs.evolve(case.spec, model=ModelConfig(path=str(path))))
