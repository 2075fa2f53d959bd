"""Commands that users bring resolve as they stand, in the dry run and as a plan, or say why not."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rl_core import config as configuration
from rl_core.cli.planning import show_plan
from rl_core.cli.runs import describe
from rl_core.config import ConfigWarning
from rl_core.errors import RLError
from rl_examples.gsm8k_data import write_tiny_data
from rl_examples.tiny_model import write_tiny_chat_model
from tests.carrying_over.commands import BASE, FRAGMENTS, SCRIPT, Fragment

_EXPERTS = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
FIELDS = {
    "experts": {
        **_SIZES,
        **_EXPERTS,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "latent experts": {
        **_SIZES,
        **_EXPERTS,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 27,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
}
"""Fields of config.json, in small: unequal stages and latent attention as a model of 27 layers has them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and models without weights."""
    root = tmp_path_factory.mktemp("carried")
    for split in ("train", "validation"):
        write_tiny_data(root / f"{split}.parquet", split=split)
    write_tiny_chat_model(root / "dense", seed=0)
    (root / "dense" / "model.safetensors").unlink()
    tokenizer = AutoTokenizer.from_pretrained(root / "dense")
    for name, fields in FIELDS.items():
        tokenizer.save_pretrained(root / name)
        sizes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
        (root / name / "config.json").write_text(json.dumps({**fields, **sizes}))
    return root


def overrides_of(fragment: Fragment, folder: Path) -> list[str]:
    """As a shell would hand them over. Eight rows are few: they are gone through as often as the batch needs."""
    text = " ".join((*fragment.base, *fragment.keys)).replace("$DATA", shlex.quote(str(folder)))
    words = shlex.split(text.replace("$MODEL", str(folder / fragment.model)))
    return [*words, "trainer.max_training_steps=2"]


@pytest.mark.slow
@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda fragment: fragment.name)
def test_a_command_resolves_and_prints_its_plan(
    fragment: Fragment,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if fragment.refused is not None:
            with pytest.raises(RLError, match=fragment.refused):
                describe(configuration.load(fragment.recipe, overrides_of(fragment, folder)))
            return
        loaded = configuration.load(fragment.recipe, overrides_of(fragment, folder))
        assert describe(loaded) == 0
        show_plan(loaded)
    said = [str(warning.message) for warning in caught if warning.category is ConfigWarning]
    for part in fragment.says:
        assert any(part in text for text in said), (part, said)
    printed = capsys.readouterr().out
    assert "nothing was started (--dry-run)" in printed
    assert re.search(r"policy: .*; \d+ micro-batches of \d+ tokens", printed)
    assert list(tmp_path.iterdir()) == []


def test_every_fragment_says_what_becomes_of_what_it_drops():
    """What has no meaning here any more is in a test with its reason, not silently gone."""
    dropped = {"generator.batched=true", "generator.async_engine=true", "trainer.flash_attn=false"}
    given = {key for fragment in FRAGMENTS for key in (*fragment.base, *fragment.keys)}
    assert dropped <= given
    said = " ".join(part for fragment in FRAGMENTS for part in fragment.says)
    assert all(key.partition("=")[0] in said or "attention" in said for key in dropped)
    assert set(BASE) < set(SCRIPT)
