"""Token ids beyond the model's vocabulary are named, with their row, before a run and in its dry run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_core.config import from_mapping
from rl_core.errors import DataError
from rl_core.trainer.before.preflight import preflight
from rl_transformers.testing.models import character_tokenizer, make_checkpoint

CHAT = "{% for m in messages %}{{ m.role }}{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}a{% endif %}"
PLAIN = {"prompt": "1+1=", "completion": "2", "chosen": "2", "rejected": "3"}
NUM_PLAIN = 100
"""Enough rows that a dry run does not encode all of them only because they are few."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    tokenizer = character_tokenizer()
    path = make_checkpoint(directory / "model")
    tokenizer.add_tokens(["<extra>"])
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)
    return path


def dry_run(directory: Path, model: Path, row: dict[str, Any], **keys: Any) -> None:
    rows = [PLAIN if "input_ids" not in row else {"input_ids": [1, 2, 3, 4]}] * NUM_PLAIN
    lengths = [len(str(other)) for other in rows]
    assert min(lengths) <= len(str(PLAIN))
    rows[NUM_PLAIN // 2] = row
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "data.train_data": [str(directory / "rows.jsonl")],
        "trainer.policy.model.path": str(model),
        "trainer.run_dir": str(directory / "run"),
        "trainer.train_batch_size": 2,
        "trainer.policy_mini_batch_size": 2,
        "trainer.bf16": False,
        "generator.inference_engine.backend": "local",
        "trainer.max_prompt_length": 64,
        "generator.sampling_params.max_generate_length": 16,
    }
    preflight(from_mapping({**settings, **keys}))


SUPERVISED = {
    "generator.type": "dataset",
    "generator.n_samples_per_prompt": 1,
    "trainer.algorithm.policy_loss_type": "cross_entropy",
}
PAIRS = {
    "generator.type": "dataset",
    "generator.responses": "pair",
    "generator.n_samples_per_prompt": 2,
    "generator.eval_n_samples_per_prompt": 2,
    "trainer.algorithm.policy_loss_type": "dpo",
    "trainer.algorithm.loss_reduction": "prompt_token_sum",
}
PROMPTS = {"environment.reward_functions": [f"{__name__}:reward"], "generator.n_samples_per_prompt": 2}


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [0.0 for _ in completions]


CASES = [
    (SUPERVISED, {"prompt": "1+1=", "completion": "<extra>"}),
    (SUPERVISED, {"prompt": "1+<extra>", "completion": "2"}),
    (SUPERVISED, {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "<extra>"}]}),
    (PAIRS, {"prompt": "1+1=", "chosen": "2", "rejected": "<extra>"}),
    (PROMPTS, {"prompt": "1+<extra>="}),
    (PROMPTS, {"prompt": [{"role": "user", "content": "<extra>"}]}),
]


@pytest.mark.parametrize(("keys", "row"), CASES)
def test_a_dry_run_names_the_row_with_a_token_without_an_embedding(
    tmp_path: Path, model: Path, keys: dict[str, Any], row: dict[str, Any]
):
    number = len(character_tokenizer())
    problem = rf"rows\.jsonl:51: token {number} \('<extra>'\) is beyond the model's vocabulary \(0…{number - 1}\)"
    with pytest.raises(DataError, match=problem):
        dry_run(tmp_path, model, row, **keys)
    dry_run(tmp_path, model, json.loads(json.dumps(row).replace("<extra>", "9")), **keys)


def test_a_dry_run_names_the_row_whose_own_ids_are_too_high(tmp_path: Path, model: Path):
    with pytest.raises(DataError, match=r"rows\.jsonl:51: token 300 .* beyond the model's vocabulary"):
        dry_run(tmp_path, model, {"input_ids": [1, 2, 300, 3]}, **SUPERVISED)
    dry_run(tmp_path, model, {"input_ids": [1, 2, 30, 3]}, **SUPERVISED)


def test_a_model_with_more_embeddings_than_its_tokenizer_has_tokens_is_accepted(tmp_path: Path):
    model = make_checkpoint(tmp_path / "padded", vocab_size=320)
    dry_run(tmp_path, model, {"input_ids": [1, 2, 300, 3]}, **SUPERVISED)
