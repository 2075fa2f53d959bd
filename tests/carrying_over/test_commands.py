"""Commands that users copy from another trainer load in the dry run and in the plan, or fail with an error that says
why.
"""

from __future__ import annotations

import json
import re
import shlex
import warnings
from collections.abc import Iterator
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
from rl_transformers.testing.ranks import PRELOADED
from tests.carrying_over.commands import BASE, FRAGMENTS, SCRIPT, SCRIPTS, Fragment, Script
from tools.key_table import PAGE

PRELOADED["rl_megatron.rank.worker"] = None
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
"""Small values of config.json for models with experts. The second has latent attention, and 27 layers that do not
divide evenly into pipeline stages.
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and with models that have no weights."""
    root = tmp_path_factory.mktemp("carried")
    for split in ("train", "validation"):
        write_tiny_data(root / f"{split}.parquet", split=split)
    row = {"prompt": "Who wrote Emma? Search with <search> words </search>.", "answer": "Jane Austen"}
    (root / "search.jsonl").write_text(f"{json.dumps(row)}\n")
    (root / "documents.jsonl").write_text(json.dumps({"title": "Emma", "text": "A novel by Jane Austen."}))
    write_tiny_chat_model(root / "dense", seed=0)
    (root / "dense" / "model.safetensors").unlink()
    tokenizer = AutoTokenizer.from_pretrained(root / "dense")
    for name, fields in FIELDS.items():
        tokenizer.save_pretrained(root / name)
        sizes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
        (root / name / "config.json").write_text(json.dumps({**fields, **sizes}))
    return root


def words_of(texts: tuple[str, ...], folder: Path, model: str) -> list[str]:
    """The command's words as a shell would split them. Adds a limit of two steps: the rows are too few for a batch."""
    text = " ".join(texts).replace("$DATA", shlex.quote(str(folder)))
    return [*shlex.split(text.replace("$MODEL", str(folder / model))), "trainer.max_training_steps=2"]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """The configuration's warnings, in order. Fails if the test writes into the working directory."""
    monkeypatch.chdir(tmp_path)
    texts: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", ConfigWarning)
        warnings.showwarning = lambda message, *_: texts.append(str(message))
        yield texts
    assert list(tmp_path.iterdir()) == []


def require_dry_run_and_plan(recipe: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the dry run and the plan print together."""
    loaded = configuration.load(recipe, words)
    assert describe(loaded) == 0
    show_plan(loaded)
    printed = capsys.readouterr().out
    assert "nothing was started (--dry-run)" in printed
    assert re.search(r"policy: .*; \d+ micro-batches of \d+ tokens", printed)
    return printed


@pytest.mark.slow
@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda fragment: fragment.name)
def test_a_command_prints_its_plan_or_is_refused_with_the_reason(
    fragment: Fragment, folder: Path, said: list[str], capsys: pytest.CaptureFixture[str]
):
    words = words_of((*fragment.base, *fragment.keys), folder, fragment.model)
    if fragment.refused is not None:
        with pytest.raises(RLError, match=fragment.refused):
            describe(configuration.load("gsm8k", words))
        return
    require_dry_run_and_plan("gsm8k", words, capsys)
    for part in fragment.says:
        assert any(part in text for text in said), (part, said)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_recipe_of_each_script_prints_its_plan(
    script: Script, folder: Path, said: list[str], capsys: pytest.CaptureFixture[str]
):
    rows = (f"data.train_data=[$DATA/{script.rows}]", f"data.val_data=[$DATA/{script.rows}]")
    words = words_of((*rows, *script.keys, *script.appended), folder, "dense")
    printed = require_dry_run_and_plan(script.recipe, words, capsys)
    assert any(script.plan in line for line in printed.splitlines() if line.startswith("policy: ")), printed
    for part in script.says:
        assert any(part in text for text in said), (part, said)


def test_the_page_names_the_recipe_of_each_script():
    table = PAGE.read_text().partition("## Commands")[2].partition("## Data")[0]
    rows = [f"| {script.name} | `{script.command}` |" for script in SCRIPTS]
    assert [row for row in rows if row not in table.splitlines()] == []


def test_the_warnings_of_three_keys_without_effect_are_checked():
    """Each of these keys must be in a fragment, and its warning in a fragment's `says`."""
    dropped = {"generator.batched=true", "generator.async_engine=true", "trainer.flash_attn=false"}
    given = {key for fragment in FRAGMENTS for key in (*fragment.base, *fragment.keys)}
    assert dropped <= given
    said = " ".join(part for fragment in FRAGMENTS for part in fragment.says)
    assert [key for key in dropped if f"{key.partition('=')[0]}: has no effect" not in said] == []
    assert set(BASE) < set(SCRIPT)
