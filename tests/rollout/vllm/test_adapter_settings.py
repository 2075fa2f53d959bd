"""Settings of peft's adapters: vLLM serves what peft computes, or the adapter is refused."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_core.errors import ConfigError
from rl_rollout.vllm.adapter_settings import OF_TRAINING, READ, read_settings, require_read
from rl_transformers.testing.models import make_checkpoint

TOKENS = torch.arange(12)[None]
NAMES = ["q_proj", "down_proj"]
ALTERED: dict[str, Any] = {
    "alpha_pattern": {"q_proj": 32},
    "rank_pattern": {"q_proj": 2},
    "use_rslora": True,
    "use_dora": True,
    "lora_bias": True,
    "modules_to_save": ["lm_head"],
    "bias": "all",
    "trainable_token_indices": [1, 2],
    "layers_to_transform": [1],
    "layers_pattern": "layers",
    "exclude_modules": ["k_proj"],
    "lora_dropout": 0.1,
    "init_lora_weights": "pissa",
    "task_type": "CAUSAL_LM",
    "ensure_weight_tying": True,
    "revision": "main",
    "qalora_group_size": 4,
}
"""Another value than the default for each setting of peft that can be tried on a small model."""
CONFIGURED: dict[str, Any] = {
    "megatron_config": {"a": 1},
    "layer_replication": [(0, 2), (1, 2)],
    "target_parameters": ["experts.gate_up_proj"],
    "alora_invocation_tokens": [1],
    "use_qalora": True,
    "velora_config": {"a": 1},
    "monteclora_config": {"a": 1},
    "use_bdlora": {"a": 1},
    "arrow_config": {"a": 1},
    "kasa_config": {"a": 1},
    "corda_config": {"a": 1},
    "lora_ga_config": {"a": 1},
    "loftq_config": {"loftq_bits": 4},
    "a_setting_of_a_later_peft": 0.5,
}
"""Settings of special variants, which need data or other models: always refused."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("base"), family="qwen2", tie_word_embeddings=False))


def loaded(base: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()


def write_adapter(base: str, directory: Path, **altered: Any) -> Tensor:
    """Writes a random adapter; returns the logits that peft gives with it."""
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": NAMES, **altered})
    torch.manual_seed(0)
    model: Any = peft.get_peft_model(loaded(base), config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += torch.randn(weight.shape) * 0.1
        model.save_pretrained(directory)
        return model(input_ids=TOKENS).logits


def as_vllm_reads_it(base: str, directory: Path) -> Tensor:
    """Logits with W + s B A, where vLLM's own reader gives s."""
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors, model = load_file(directory / "adapter_model.safetensors"), loaded(base)
    factor = config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])
    with torch.no_grad():
        for name, matrix in tensors.items():
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            if name.endswith(".lora_A.weight") and f"{layer}.weight" in dict(model.named_parameters()):
                model.get_submodule(layer).weight += factor * tensors[name.replace("_A.", "_B.")] @ matrix
        return model(input_ids=TOKENS).logits


def is_refused(directory: Path) -> bool:
    try:
        require_read(read_settings(directory), load_file(directory / "adapter_model.safetensors").keys())
    except ConfigError:
        return True
    return False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["nothing", *ALTERED])
def test_an_adapter_is_accepted_only_if_vllm_gets_what_peft_computes(base: str, name: str, tmp_path: Path):
    altered = {name: ALTERED[name]} if name in ALTERED else {}
    if name == "layers_pattern":
        altered["layers_to_transform"] = [1]
    expected, found = write_adapter(base, tmp_path, **altered), as_vllm_reads_it(base, tmp_path)
    is_exact = expected.shape == found.shape and bool((expected - found).abs().max() < 1e-4)
    assert is_refused(tmp_path) == (not is_exact)


@pytest.mark.parametrize("name", CONFIGURED)
def test_special_variants_and_unknown_settings_are_refused(name: str):
    config = peft.LoraConfig(target_modules=NAMES).to_dict()
    require_read(config)
    with pytest.raises(ConfigError, match=rf"vLLM does not read the settings {name}=.*merge_and_unload"):
        require_read(config | {name: CONFIGURED[name]})


def test_every_setting_of_the_installed_peft_was_considered():
    other = {"r", "lora_alpha", "target_modules", "peft_type", "runtime_config", "peft_version"}
    considered = {*ALTERED, *CONFIGURED, *OF_TRAINING, *READ, *other}
    assert {field.name for field in fields(peft.LoraConfig)} <= considered


def test_the_installed_vllm_reads_the_settings_that_count_as_read():
    helper = pytest.importorskip("vllm.lora.peft_helper").PEFTHelper
    of_vllm = {"target_modules", "bias", "modules_to_save", "use_dora"}  # vLLM refuses other values than the default
    assert {f.name for f in fields(helper) if not f.name.startswith("vllm_")} == READ | of_vllm


def test_other_kinds_of_adapters_and_tensors_are_refused():
    config = peft.LoraConfig(target_modules=NAMES).to_dict()
    with pytest.raises(ConfigError, match="its peft_type is ADALORA, expected LORA"):
        require_read({**config, "peft_type": "ADALORA"})
    with pytest.raises(ConfigError, match=r"does not read its tensors base_model\.model\.lm_head\."):
        require_read(config, {"base_model.model.lm_head.base_layer.weight"})
    for start in ("olora", "pissa_niter_4", "corda", "loftq", "lora_ga", "mica"):
        with pytest.raises(ConfigError, match=f"its init_lora_weights is '{start}'"):
            require_read({**config, "init_lora_weights": start})
