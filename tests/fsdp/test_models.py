"""Architectures that are scored correctly, and architectures and settings that are refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.batch import Batch
from rl_core.errors import CheckpointError, ConfigError
from rl_core.interfaces import LoraConfig, LossSpec, ModelConfig, OptimizerConfig, RankInfo, WorkerSpec
from rl_fsdp import fsdp
from rl_fsdp.worker import FsdpWorker
from rl_transformers.rank.token_scorer import require_structure
from rl_transformers.testing.backend import make_batch, weights
from rl_transformers.testing.models import FAMILIES, Family, make_checkpoint
from rl_transformers.testing.reference_worker import ReferenceWorker
from tests.fsdp.conftest import StartWorker, spec_of
from tests.model_families import NOT_PACKED, TINY, UNUSUAL, random_model

PLAN = [[5, 0, 3], [1, 6], [4, 2, 7]]


def require_reference_scores(path: Path, **fields: Any) -> None:
    """Requires that scores and gradients equal those of plain transformers."""
    spec = spec_of(path, **fields)
    reference, worker = ReferenceWorker(spec), FsdpWorker(spec, RankInfo())
    batch = make_batch(reference)
    expected = reference.forward(batch, PLAN, temperature=0.8)
    for name, values_T in worker.forward(batch, PLAN, temperature=0.8).items():
        torch.testing.assert_close(values_T, expected[name], rtol=0, atol=1e-5)
    for actor in (worker, reference):
        actor.forward_backward(batch, PLAN, LossSpec(name="ppo_clip", kl_coef=0.1), temperature=0.8)
    gradients = [actor.gradients() for actor in (worker, reference)]
    names = sorted(gradients[0])
    assert names == sorted(gradients[1])
    actual, expected = (torch.cat([of[name].flatten() for name in names]) for of in gradients)
    assert (actual - expected).norm() <= 5e-6 * expected.norm()


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_the_suite_are_scored_as_by_transformers(family: Family, packing: bool, tmp_path: Path):
    require_reference_scores(make_checkpoint(tmp_path, family=family), use_sample_packing=packing)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(("family", "config"), UNUSUAL, ids=lambda value: value if isinstance(value, str) else "")
def test_families_with_unusual_settings_are_scored_as_by_transformers_or_refused_before_the_run(
    family: str, config: dict[str, Any], packing: bool, tmp_path: Path
):
    path = random_model(tmp_path, family, **config)
    verdict = require_same_verdicts(spec_of(path, use_sample_packing=packing))
    assert (verdict is not None) == (packing and family in NOT_PACKED)
    if verdict is None:
        require_reference_scores(path, use_sample_packing=packing)


def test_the_balancing_loss_of_transformers_is_not_added(tmp_path: Path):
    """The reference has no balancing loss: it computes the loss from log-probs, without labels."""
    config = {"output_router_logits": True, "router_aux_loss_coef": 10.0}
    require_reference_scores(make_checkpoint(tmp_path, family="qwen3_moe", **config))


def test_a_model_whose_files_lack_a_weight_is_refused(tmp_path: Path):
    """transformers would fill the output layer with random values."""
    path = make_checkpoint(tmp_path, tie_word_embeddings=False)
    weights = load_file(path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"has no weights for 1 parameters .* lm_head\.weight; expected a complete"):
        fsdp.create_worker(spec_of(path), RankInfo())
    fsdp.create_worker(spec_of(path, role="critic"), RankInfo())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "unknown"}, r"^trainer\.policy\.model\.path: transformers cannot read the configuration of "),
        ({"hidden_size": "wide"}, r"^trainer\.policy\.model\.path: transformers cannot read the configuration of "),
        ({"intermediate_size": 128}, r"^trainer\.policy\.model\.path: .* cannot be loaded as a causal language model"),
    ],
)
def test_a_configuration_that_cannot_be_loaded_is_refused(fields: dict[str, Any], message: str, tmp_path: Path):
    path = make_checkpoint(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(ConfigError, match=message):
        fsdp.create_worker(spec_of(path), RankInfo())


@pytest.mark.parametrize("packing", [True, False])
def test_a_model_with_a_vision_part_is_trained_on_text(packing: bool, tmp_path: Path):
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("gemma3", text_config={**TINY, "sliding_window": 8}, vision_config=vision)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    worker = FsdpWorker(spec_of(tmp_path, use_sample_packing=packing), RankInfo())
    sequences = [{"tokens": torch.arange(1, n), "loss_mask": torch.arange(1, n) > 1} for n in (13, 4)]
    batch = Batch.from_sequences([{**row, "loss_weights": row["loss_mask"].float()} for row in sequences])
    tokens_T = batch["tokens"][:12]
    with torch.no_grad():
        logits_TV = AutoModelForCausalLM.from_pretrained(tmp_path).eval()(input_ids=tokens_T[None]).logits[0]
    expected_T = logits_TV.log_softmax(-1)[:-1].gather(1, tokens_T[1:, None]).squeeze(1)
    found_T = worker.forward(batch, [[0, 1]], temperature=1.0)["logprobs"][1:12]
    torch.testing.assert_close(found_T, expected_T, rtol=0, atol=1e-5)
    worker.forward_backward(batch, [[0, 1]], LossSpec(name="cross_entropy"), temperature=1.0)
    assert not worker.optim_step().skipped


@pytest.mark.parametrize("role", ["policy", "critic"])
@pytest.mark.parametrize(
    ("family", "config", "fields"),
    [
        ("gemma2", {"final_logit_softcapping": None}, {}),
        ("gemma2", {"final_logit_softcapping": None}, {"use_sample_packing": False}),
        ("gemma2", {}, {"use_sample_packing": False}),
        ("qwen3_5_text", {"layer_types": ["linear_attention", "full_attention"]}, {}),
        ("qwen3_5_text", {"layer_types": ["linear_attention", "full_attention"]}, {"use_sample_packing": False}),
        ("mistral", {"sliding_window": 8}, {}),
        ("gpt_oss", {"num_local_experts": 4}, {}),
        ("gpt_oss", {"num_local_experts": 4}, {"use_sample_packing": False}),
        ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}, {}),
        ("bloom", {"n_layer": 2, "n_head": 4}, {}),
        ("stablelm", {}, {}),
        ("modernbert-decoder", {}, {"use_sample_packing": False}),
        ("recurrent_gemma", {}, {"use_sample_packing": False}),
        ("llama4_text", {"num_local_experts": 2, "num_experts_per_tok": 1}, {"use_sample_packing": False}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, {}),
        ("qwen3", {}, {"lora": LoraConfig(rank=2, target_modules=("qproj",))}),
        ("qwen3", {}, {"lora": LoraConfig(rank=2, target_modules=("q_proj",))}),
    ],
)
def test_a_model_is_refused_without_its_weights_as_it_is_with_them(
    family: str, config: dict[str, Any], fields: dict[str, Any], role: str, tmp_path: Path
):
    """The dry run and the plan check a structure on `meta` and a small copy; the start checks the loaded model."""
    path = random_model(tmp_path, family, **config)
    model = ModelConfig(path=str(path), lora=fields.get("lora", LoraConfig()))
    packing = fields.get("use_sample_packing", True)
    require_same_verdicts(spec_of(path, role=role, model=model, use_sample_packing=packing))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3", "mistral3"])
def test_a_model_that_is_no_causal_language_model_is_refused_without_its_weights(family: str, tmp_path: Path):
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    verdict = require_same_verdicts(spec_of(tmp_path))
    assert verdict is not None
    assert "cannot be loaded as a causal language model: Unrecognized configuration class" in verdict


def require_same_verdicts(spec: WorkerSpec) -> str | None:
    """Requires that the dry run accepts or refuses a model as the start does, and returns the error. Sizes of
    differences may differ."""
    path, verdicts = str(spec.model.path), []
    for check in (
        lambda: require_structure(spec, AutoConfig.from_pretrained(path)),
        lambda: fsdp.create_worker(spec, RankInfo()),
    ):
        try:
            check()
            verdicts.append(None)
        except ConfigError as error:
            verdicts.append(re.sub(r"\d\.\de[+-]\d\d \(relative\)", "", str(error)))
    assert verdicts[0] == verdicts[1]
    return verdicts[0]


def test_a_small_fault_of_a_models_code_is_refused_in_bfloat16_too(tmp_path: Path):
    """On the model itself, bfloat16 hides what XGLM's packed sequences see of each other (0.4 %)."""
    path = random_model(tmp_path, "xglm", d_model=32, attention_heads=4, num_layers=2, ffn_dim=64, init_std=0.1)
    with pytest.raises(ConfigError, match=r"XGLMForCausalLM in training differ .* below 0\.001; .*packing=false"):
        fsdp.create_worker(spec_of(path, bf16=True), RankInfo())
    fsdp.create_worker(spec_of(path, bf16=True, use_sample_packing=False), RankInfo())


def test_a_model_that_caps_its_logits_is_refused(tmp_path: Path):
    path = random_model(tmp_path, "gemma2", final_logit_softcapping=5.0)
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        fsdp.create_worker(spec_of(path), RankInfo())


def test_a_model_that_looks_across_packed_sequences_is_refused_packed_and_runs_unpacked(tmp_path: Path):
    path = random_model(tmp_path, "bloom", n_layer=2, n_head=4)  # BLOOM's attention code ignores the sequences' bounds
    with pytest.raises(ConfigError, match="use_sample_packing=false"):
        fsdp.create_worker(spec_of(path), RankInfo())
    require_reference_scores(path, use_sample_packing=False)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (
            "qwen2_moe",
            {"num_experts": 4, "moe_intermediate_size": 16, "use_sliding_window": True, "max_window_layers": 2},
        ),
        ("phimoe", {"num_local_experts": 4}),
    ],
)
def test_packing_is_refused_if_a_sliding_window_exists_only_in_the_mask(
    tmp_path: Path, kind: str, options: dict[str, Any]
):
    """The window is longer than the two sequences on which a model is checked when it is loaded, so the scores of that
    check cannot show that packing drops the window."""
    path = random_model(tmp_path, kind, num_experts_per_tok=2, sliding_window=64, **options)
    message = r"uses sliding_attention only through a mask, .*=false and sequence_parallel_size=1$"
    with pytest.raises(ConfigError, match=message):
        fsdp.create_worker(spec_of(path), RankInfo())
    fsdp.create_worker(spec_of(path, use_sample_packing=False), RankInfo())


@pytest.mark.parametrize(
    ("kind", "layers", "options"),
    [
        ("lfm2", "conv", {"layer_types": ["conv", "full_attention"]}),
        ("jamba", "linear_attention", {"num_experts": 2, "num_experts_per_tok": 1}),
    ],
)
def test_layers_that_mix_packed_sequences_even_slightly_are_refused(
    kind: str, layers: str, options: dict[str, Any], tmp_path: Path
):
    """With weights this small, the mixing changes scores by less than the check of scores allows in bfloat16."""
    path = random_model(tmp_path, kind, initializer_range=0.02, **options)
    with pytest.raises(ConfigError, match=rf"layers of the kind {layers}, .*use_sample_packing=false"):
        fsdp.create_worker(spec_of(path, bf16=True), RankInfo())
    fsdp.create_worker(spec_of(path, bf16=True, use_sample_packing=False), RankInfo())


def test_a_model_whose_base_model_attribute_is_the_whole_model_is_refused(tmp_path: Path):
    path = random_model(tmp_path, "llama4_text", num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(ConfigError, match=r"cannot run with the inputs of training .* this backend cannot train it"):
        fsdp.create_worker(spec_of(path, use_sample_packing=False), RankInfo())


def test_a_model_whose_own_code_cannot_run_is_refused(tmp_path: Path):
    """Latent attention has no groups of heads, but DeepSeek's configuration can have them."""
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
    path = random_model(tmp_path, "deepseek_v3", **sizes, **experts, num_experts_per_tok=2, num_key_value_heads=2)
    with pytest.raises(ConfigError, match=r"cannot run with the inputs of training \(The size of tensor a"):
        fsdp.create_worker(spec_of(path), RankInfo())


def test_sequences_that_would_change_the_frequencies_of_others_are_refused(tmp_path: Path):
    short, long = [1.0] * 4, [1.0, 2.0, 4.0, 8.0]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 8.0}
    path = random_model(tmp_path, "llama", rope_parameters={**rope, "short_factor": short, "long_factor": long})
    worker = FsdpWorker(spec_of(path), RankInfo())
    batch = Batch.from_sequences([{"tokens": [n % 40 + 1 for n in range(length)]} for length in (20, 32, 33)])

    def logprobs(plan: list[list[int]]) -> torch.Tensor:
        return worker.forward(batch, plan, temperature=1.0)["logprobs"]

    with pytest.raises(ConfigError, match=r"33 tokens; with rope_type=longrope, .* more than 32 tokens changes"):
        logprobs([[0, 1, 2]])
    apart = logprobs([[0], [1], [2]])
    torch.testing.assert_close(logprobs([[0, 1], [2]]), apart, rtol=0, atol=1e-5)


def test_a_model_without_attention_is_refused_packed_and_runs_unpacked(tmp_path: Path):
    path = random_model(tmp_path, "mamba", state_size=4, num_hidden_layers=1)
    with pytest.raises(ConfigError, match="use_sample_packing=false"):
        fsdp.create_worker(spec_of(path), RankInfo())
    fsdp.create_worker(spec_of(path, use_sample_packing=False), RankInfo())


def test_bfloat16_keeps_trained_weights_in_float32_and_sends_bfloat16(start_worker: StartWorker):
    worker, exact = start_worker(bf16=True), start_worker()
    batch = make_batch(ReferenceWorker(exact.spec))
    assert {p.dtype for p in worker.scorer.parameters()} == {torch.float32}
    assert {w.dtype for w in weights(worker).values()} == {torch.bfloat16}
    scores, expected = (w.forward(batch, PLAN, temperature=1.0)["logprobs"] for w in (worker, exact))
    # bfloat16 has 8 significant bits. Over two layers the measured error is 2e-2; with a wrong token order it is 1.
    assert 1e-5 < (scores - expected).abs().max() < 0.1
    frozen = start_worker(bf16=True, role="reference", optimizer=None)
    assert {p.dtype for p in frozen.scorer.parameters()} == {torch.bfloat16}


def test_gradient_checkpointing_recomputes_every_layer(start_worker: StartWorker):
    calls = []
    worker = start_worker(gradient_checkpointing=True)
    for layer in worker.scorer.model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    batch = make_batch(ReferenceWorker(worker.spec))
    worker.forward_backward(batch, [range(8)], LossSpec(name="cross_entropy"), temperature=1.0)
    assert len(calls) == 4, "each of the two layers must run in the forward pass and again in the backward pass"


def test_no_mask_over_the_stream_is_built(start_worker: StartWorker):
    worker = start_worker()
    seen = []
    for layer in worker.scorer.model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _module, _args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
        )
    worker.forward(make_batch(ReferenceWorker(worker.spec)), PLAN, temperature=1.0)
    assert seen == [None] * 6


def test_a_micro_batch_without_a_trained_token_adds_nothing(start_worker: StartWorker):
    worker = start_worker()
    batch = make_batch(ReferenceWorker(worker.spec))
    metrics = worker.forward_backward(batch, [[2], [4], [2, 4]], LossSpec(name="ppo_clip"), temperature=1.0)
    assert metrics["loss"] == (0.0, 1.0)
    assert not any(bool(gradient.any()) for gradient in worker.gradients().values())


def test_the_saved_configuration_names_the_dtype_of_the_weights(start_worker: StartWorker, tmp_path: Path):
    start_worker(bf16=True).save_model(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_a_checkpoint_of_another_model_is_refused(start_worker: StartWorker, tmp_path: Path):
    start_worker({"hidden_size": 64}).save_state(tmp_path)
    with pytest.raises(CheckpointError, match="belongs to another model"):
        start_worker().load_state(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"role": "critic", "model": ModelConfig()}, "trainer.critic.model.path"),
        ({"model": ModelConfig(path="x", lora=LoraConfig(rank=8, dropout=0.1))}, "trainer.policy.model.lora.dropout"),
        ({"model": ModelConfig()}, "trainer.policy.model.path"),
        ({"logprobs_chunk_size": 0}, r"^trainer\.logprobs_chunk_size"),
        ({"optimizer": OptimizerConfig(scheduler="cosine")}, "length of the run"),
        ({"optimizer": OptimizerConfig(num_warmup_steps=-1)}, "0 or more"),
    ],
)
def test_untrainable_settings_are_a_configuration_error(fields: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        fsdp.validate(spec_of("x", **fields), 1)


def test_the_entry_point_imports_no_torch():
    code = "import sys, rl_fsdp.backend as b; b.fsdp.validate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
