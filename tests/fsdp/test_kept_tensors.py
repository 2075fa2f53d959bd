"""Every tensor of a checkpoint is trained, or is in the saved model unchanged, or the run is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.batch import Batch
from rl_core.errors import ConfigError
from rl_core.interfaces import LoraConfig, LossSpec, ModelConfig, OptimizerConfig, RankInfo
from rl_fsdp.worker import FsdpWorker
from rl_transformers.kept_tensors import require_whole_export
from rl_transformers.testing.models import character_tokenizer, make_checkpoint
from tests.fsdp.conftest import spec_of
from tests.model_families import TINY

VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_VISION = {**VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TOKENS = torch.arange(1, 13)


def vision_language_checkpoint(directory: Path, kind: str, vision: dict[str, Any], **text: Any) -> dict[str, Tensor]:
    """Writes a random checkpoint with the class of transformers that has all parts; returns its tensors."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, text_config={**TINY, **text}, vision_config=vision)
    whole = next(
        getattr(transformers, name)
        for name in dir(transformers)
        if name.lower().replace("_", "") == f"{kind.replace('_', '')}forconditionalgeneration"
    )
    whole(config).save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text('{"size": 7}')
    return load_file(directory / "model.safetensors")


def trained_and_saved(path: Path, to: Path, **fields: Any) -> dict[str, Tensor]:
    worker = FsdpWorker(spec_of(path, **{"optimizer": OptimizerConfig(lr=1e-2), **fields}), RankInfo())
    mask_T = TOKENS > 1
    batch = Batch.from_sequences([{"tokens": TOKENS, "loss_mask": mask_T, "loss_weights": mask_T.float()}])
    worker.forward_backward(batch, [[0]], LossSpec(name="cross_entropy"), temperature=1.0)
    assert not worker.optim_step().skipped
    worker.save_model(to)
    return load_file(to / "model.safetensors")


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=2, target_modules=("q_proj", "o_proj"))])
@pytest.mark.parametrize(
    ("kind", "text"), [("qwen3_5", {}), ("qwen3_5_moe", EXPERTS)], ids=lambda value: str(value)[:12]
)
def test_a_vision_tower_that_training_does_not_load_is_saved_unchanged(
    kind: str, text: dict[str, Any], lora: LoraConfig, tmp_path: Path
):
    source, saved = tmp_path / "source", tmp_path / "saved"
    before = vision_language_checkpoint(source, kind, QWEN_VISION, layer_types=["full_attention"] * 2, **text)
    require_whole_export(AutoConfig.from_pretrained(source), str(source), "a")
    before["mtp.layers.0.mlp.up_proj.weight"] = torch.randn(3, 4).bfloat16()
    save_file(before, source / "model.safetensors", {"format": "pt"})
    after = trained_and_saved(source, saved, model=ModelConfig(path=str(source), lora=lora))
    assert after.keys() == before.keys()
    untrained = {name for name in before if name.startswith(("model.visual.", "mtp."))}
    assert len(untrained) == 22
    for name in before:
        assert after[name].dtype == before[name].dtype
        if name in untrained:
            assert torch.equal(after[name], before[name])
    assert any(not torch.equal(after[name], before[name]) for name in before)
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == json.loads((source / "config.json").read_text())["architectures"]
    assert (saved / "preprocessor_config.json").read_text() == '{"size": 7}'

    whole = getattr(transformers, config["architectures"][0]).from_pretrained(saved).eval()
    text_model = AutoModelForCausalLM.from_pretrained(saved).eval()
    with torch.no_grad():
        logits = [model(input_ids=TOKENS[None]).logits for model in (whole, text_model)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)
    expected = FsdpWorker(spec_of(saved), RankInfo())  # training can continue from it
    assert expected.scorer.kept.files.keys() == untrained


def test_a_vision_tower_that_is_loaded_needs_no_copy(tmp_path: Path):
    before = vision_language_checkpoint(tmp_path / "source", "gemma3", VISION, sliding_window=8)
    require_whole_export(AutoConfig.from_pretrained(tmp_path / "source"), str(tmp_path / "source"), "a")
    after = trained_and_saved(tmp_path / "source", tmp_path / "saved", use_sample_packing=False)
    assert after.keys() == before.keys()
    assert (tmp_path / "saved" / "preprocessor_config.json").exists()


def test_a_text_model_whose_tensors_are_renamed_is_refused_before_it_is_loaded(tmp_path: Path):
    fields = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 32}
    vision_language_checkpoint(tmp_path, "llama4", VISION, **fields)
    message = r"^a: .* combines several models, .*Llama4ForCausalLM.* under other names.*save the text model alone"
    with pytest.raises(ConfigError, match=message):
        require_whole_export(AutoConfig.from_pretrained(tmp_path), str(tmp_path), "a")
    with pytest.raises(ConfigError, match="combines several models"):
        FsdpWorker(spec_of(tmp_path, use_sample_packing=False), RankInfo())


@pytest.mark.parametrize("is_tied", [True, False])
def test_heads_for_several_tokens_and_old_buffers_are_saved_unchanged(is_tied: bool, tmp_path: Path):
    source = make_checkpoint(tmp_path / "source", family="llama", tie_word_embeddings=is_tied)
    before = load_file(source / "model.safetensors")
    extra = {
        "mtp.fc.weight": torch.randn(2, 2),
        "model.layers.2.self_attn.q_proj.weight": torch.randn(3, 3),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.randn(4).bfloat16(),
    }
    if is_tied:
        before["lm_head.weight"] = before["model.embed_tokens.weight"].clone()
    save_file({**before, **extra}, source / "model.safetensors", {"format": "pt"})
    after = trained_and_saved(source, tmp_path / "saved")
    assert after.keys() - {"lm_head.weight"} == (before.keys() | extra.keys()) - {"lm_head.weight"}
    assert ("lm_head.weight" in after) == (not is_tied)  # a stale copy would untie the trained weight
    assert all(torch.equal(after[name], tensor) for name, tensor in extra.items())


def test_unread_tensors_in_another_format_are_refused(tmp_path: Path):
    path = make_checkpoint(tmp_path)
    weights = load_file(path / "model.safetensors")
    torch.save({**weights, "mtp.fc.weight": torch.ones(2)}, path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"does not read 1 tensors of .*mtp\.fc\.weight.*save_pretrained"):
        FsdpWorker(spec_of(path), RankInfo())


def test_names_of_checkpoints_that_transformers_converts_count_as_read(tmp_path: Path):
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": 47}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **gpt2)).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    short = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}  # as in OpenAI's checkpoint
    save_file(short, tmp_path / "model.safetensors", {"format": "pt"})
    assert not FsdpWorker(spec_of(tmp_path), RankInfo()).scorer.kept.files
    moe = make_checkpoint(tmp_path / "moe", family="mixtral")
    assert not FsdpWorker(spec_of(moe), RankInfo()).scorer.kept.files
