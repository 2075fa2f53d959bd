"""Gradients of supervised fine-tuning, DPO and reward models equal those of TRL's trainers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from rl_transformers.testing.models import make_checkpoint
from tests.supervised.trained import PAIRS, config_of, gradient

TOLERANCE = 1e-5
"""Relative, for the loss and for the L2 norm of the gradients' difference over all weights. It allows for float32
rounding, because sums are added in another order; measured: 6e-7."""


def sums(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Rows of sums, with prompts and answers of different lengths."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = rng.randrange(10 ** rng.randrange(1, 6)), rng.randrange(100)
        rows.append({"prompt": f"{a}+{b}=", "completion": str(a + b), "wrong": str(abs(a - b) + 1)})
    return rows


def training_arguments(directory: Path, num_rows: int) -> dict[str, Any]:
    return {
        "output_dir": str(directory),
        "per_device_train_batch_size": num_rows,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "disable_tqdm": True,
        "max_length": 512,
    }


def gradient_of_trl(trainer: Any) -> tuple[float, dict[str, Tensor]]:
    """The loss and gradient of TRL for the only batch, which contains all rows."""
    model = trainer.model.eval()
    (batch,) = trainer.get_train_dataloader()
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def require_equal(found: tuple[float, Mapping[str, Tensor]], expected: tuple[float, Mapping[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=TOLERANCE)
    theirs = expected[1]
    assert set(theirs) <= set(found[1])
    # TRL's head has no bias. The gradient of our bias is 0 up to rounding, because a pair's two slopes cancel.
    assert all(found[1][name].abs().max() < 1e-6 for name in set(found[1]) - set(theirs))
    difference = torch.stack([(found[1][name] - value).norm() for name, value in theirs.items()]).norm()
    norm = torch.stack([value.norm() for value in theirs.values()]).norm()
    assert norm > 1e-3
    assert difference <= TOLERANCE * norm, f"relative L2 {float(difference / norm):.1e}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), tie_word_embeddings=False, seed=1)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("reference"), tie_word_embeddings=False, seed=2)


CHAT = """\
{% for tool in tools or [] %}{{ tool.function.name }}, {% endfor %}
{%- for m in messages %}
    {{- '\\n' + m.role }}.
    {%- if m.role == 'assistant' %}
        {%- generation %}
        {{- m.content or '' }}
        {%- for call in m.tool_calls or [] %}
            {{- '*' + call.function.name }} {{ call.function.arguments | tojson }}*
        {%- endfor %}
        {{- eos_token }}
        {%- endgeneration %}
    {%- else %}{{ m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '\\n' }}assistant.{% endif %}"""
"""A template made of characters that the tokenizer knows. It writes nothing after the end of a turn, because TRL's DPO
would train on it."""
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "double")]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint(tmp_path_factory.mktemp("chat"), tie_word_embeddings=False, seed=1)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)
    return path


def conversations(count: int) -> list[dict[str, Any]]:
    """Conversations: a question, a tool call with its result in every second row, and a right and a wrong answer."""
    rows = []
    for number, row in enumerate(sums(count)):
        asked = [{"role": "system", "content": "add."}, {"role": "user", "content": row["prompt"]}]
        call = {"type": "function", "function": {"name": "add", "arguments": {"of": row["prompt"]}}}
        if number % 2:
            asked += [{"role": "assistant", "content": "wait, ", "tool_calls": [call]}]
            asked += [{"role": "tool", "content": row["completion"]}]
        answers = ({"role": "assistant", "content": row[name]} for name in ("completion", "wrong"))
        rows.append({"prompt": asked, **dict(zip(("right", "wrong"), answers, strict=True))})
    return rows


def loaded(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def test_supervised_fine_tuning_has_trls_gradient_and_one_extra_token_is_detected(model: Path, tmp_path: Path):
    rows = [{name: row[name] for name in ("prompt", "completion")} for row in sums(7)]
    trainer = SFTTrainer(
        loaded(model),
        SFTConfig(**training_arguments(tmp_path / "trl", len(rows))),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    expected = gradient_of_trl(trainer)
    require_equal(gradient(config_of(tmp_path, model, rows), tmp_path), expected)
    rows[3]["completion"] += "0"
    wrong = gradient(config_of(tmp_path / "wrong", model, rows), tmp_path / "wrong")
    with pytest.raises(AssertionError):
        require_equal(wrong, expected)


def of_chat(chat_model: Path, directory: Path, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Requires equal gradients of supervised fine-tuning: `ours` are the rows in our form, `theirs` in TRL's."""
    trainer = SFTTrainer(
        loaded(chat_model),
        SFTConfig(**training_arguments(directory / "trl", len(theirs)), assistant_only_loss=True),
        train_dataset=Dataset.from_list(theirs),
        processing_class=AutoTokenizer.from_pretrained(chat_model),
    )
    require_equal(gradient(config_of(directory, chat_model, ours), directory), gradient_of_trl(trainer))


def test_supervised_fine_tuning_on_conversations_with_tools_has_trls_gradient(chat_model: Path, tmp_path: Path):
    rows = [{"messages": [*row["prompt"], row["right"]], "tools": TOOLS} for row in conversations(7)]
    of_chat(chat_model, tmp_path, rows, rows)


def test_the_comparison_detects_schemas_that_the_model_does_not_see(chat_model: Path, tmp_path: Path):
    rows = [{"messages": [*row["prompt"], row["right"]], "tools": TOOLS} for row in conversations(7)]
    without = [{"messages": row["messages"]} for row in rows]
    with pytest.raises(AssertionError):
        of_chat(chat_model, tmp_path, without, rows)


def of_pairs(
    model: Path, reference: Path, directory: Path, rows: list[dict[str, Any]], theirs: Mapping[str, Any], **ours: Any
) -> None:
    """Requires equal gradients of DPO: `theirs` are TRL's settings, `ours` are parameters of our loss."""
    trainer = DPOTrainer(
        loaded(model),
        loaded(reference).eval(),
        DPOConfig(**training_arguments(directory / "trl", len(rows)), beta=0.3, **theirs),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    keys = {
        **PAIRS,
        "trainer.ref.model.path": str(reference),
        "trainer.algorithm.policy_loss_type": "dpo",
        "trainer.algorithm.policy_loss_params": {"dpo_beta": 0.3, **ours},
    }
    require_equal(gradient(config_of(directory, model, rows, **keys), directory), gradient_of_trl(trainer))


@pytest.mark.parametrize("dpo_type", ["sigmoid", "ipo"])
def test_direct_preference_optimisation_has_trls_gradient(dpo_type: str, model: Path, reference: Path, tmp_path: Path):
    rows = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": row["wrong"]} for row in sums(6)]
    of_pairs(model, reference, tmp_path, rows, {"loss_type": dpo_type}, dpo_type=dpo_type)


def test_direct_preference_optimisation_on_conversations_has_trls_gradient(
    chat_model: Path, reference: Path, tmp_path: Path
):
    rows = [
        {"prompt": row["prompt"], "chosen": [row["right"]], "rejected": [row["wrong"]], "tools": TOOLS}
        for row in conversations(6)
    ]
    of_pairs(chat_model, reference, tmp_path, rows, {"loss_type": "sigmoid"})


def test_label_smoothing_has_trls_gradient(model: Path, reference: Path, tmp_path: Path):
    """Compares with TRL's `aot`, because its `sigmoid` ignores label smoothing. `aot` sorts pairs, so this test has
    only one pair."""
    (row,) = sums(1)
    rows = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": row["wrong"]}]
    theirs = {"loss_type": "aot", "label_smoothing": 0.2}
    of_pairs(model, reference, tmp_path, rows, theirs, label_smoothing=0.2)
    with pytest.raises(AssertionError):
        of_pairs(model, reference, tmp_path / "wrong", rows, theirs, label_smoothing=0.1)


def test_a_reward_model_has_trls_gradient(model: Path, tmp_path: Path):
    rows = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": row["wrong"]} for row in sums(6)]
    torch.manual_seed(3)
    classifier = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=1, dtype=torch.float32, attn_implementation="eager"
    )
    trainer = RewardTrainer(
        classifier,
        RewardConfig(**training_arguments(tmp_path / "trl", len(rows))),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    with_head = tmp_path / "with_head"
    loaded(model).save_pretrained(with_head)
    AutoTokenizer.from_pretrained(model).save_pretrained(with_head)
    head = {"value_head.weight": classifier.score.weight.detach(), "value_head.bias": torch.zeros(1)}
    save_file(head, with_head / "value_head.safetensors", {"format": "pt"})
    keys = {**PAIRS, "generator.scored_at_end": True, "trainer.algorithm.policy_loss_type": "reward_model"}
    found = gradient(config_of(tmp_path, with_head, rows, **keys), tmp_path)
    loss, theirs = gradient_of_trl(trainer)
    renamed = {name.removeprefix("model."): value for name, value in theirs.items()}
    renamed["value_head.weight"] = renamed.pop("score.weight")
    require_equal(found, (loss, renamed))
