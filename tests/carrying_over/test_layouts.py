"""Data in the layouts of other projects: small files, made here, and what is read from them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rl_core.config import from_mapping
from rl_core.errors import DataError
from rl_core.trainer.data import read_rows
from rl_rollout.chat import TokenCodec
from rl_rollout.supervised_tokens import RowEncoder
from tests.rollout.chat_templates import tokenizer_of


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def written(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read(file: Path, **data: Any) -> list[Mapping[str, Any]]:
    """The rows as a run with these keys of `data` reads them."""
    from rl_core.trainer.run import _rows

    config = from_mapping({"data.train_data": [str(file)], **{f"data.{name}": value for name, value in data.items()}})
    return [row.row for row in _rows(config, "data.train_data")]


def trained(row: Mapping[str, Any], name: str = "tool_chatml", *, is_pair: bool = False) -> list[tuple[str, list[str]]]:
    """For each sequence of a row: the text before the first trained token, and the trained texts."""
    tokenizer = tokenizer_of(name)
    encoder = RowEncoder(
        TokenCodec(tokenizer, chat_template_kwargs={}),
        response_key="completion",
        trained_roles=["assistant"],
        trained_turns="all",
        scored_at_end=False,
    )
    found = []
    for sequence in encoder.pair(row) if is_pair else (encoder.response(row),):
        parts: list[list[int]] = []
        for position, token in enumerate(sequence.tokens):
            if sequence.trained[position]:
                if not sequence.trained[position - 1]:
                    parts.append([])
                parts[-1].append(token)
        texts = [tokenizer.decode(part) for part in parts]
        found.append((tokenizer.decode(sequence.tokens[: sequence.prompt_length]), texts))
    return found


HEAD = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
ASKED = f"{HEAD}<|im_start|>user\n12+30?<|im_end|>\n<|im_start|>assistant\n"
PAIR = {"chosen": [user("12+30?"), assistant("42")], "rejected": [user("12+30?"), assistant("41")]}
PREFERENCES = {
    "trl_explicit.jsonl": {"prompt": [user("12+30?")], "chosen": [assistant("42")], "rejected": [assistant("41")]},
    "trl_implicit.parquet": PAIR,
    "ultrafeedback_binarized.parquet": {
        "prompt": "12+30?",
        "prompt_id": "c1f9",
        **PAIR,
        "messages": PAIR["chosen"],
        "score_chosen": 8.5,
        "score_rejected": 6.0,
    },
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences_have_the_prompt_once_and_both_responses(tmp_path: Path, name: str):
    (row,) = read(written(tmp_path / name, [PREFERENCES[name]]))
    assert trained(row, is_pair=True) == [(ASKED, ["42<|im_end|>"]), (ASKED, ["41<|im_end|>"])]


def test_texts_of_preferences_are_split_where_they_differ(tmp_path: Path):
    texts = {"chosen": "\n\nHuman: 12+30?\n\nAssistant: 42", "rejected": "\n\nHuman: 12+30?\n\nAssistant: 31"}
    (row,) = read(written(tmp_path / "hh_rlhf.jsonl", [texts]))
    before = "\n\nHuman: 12+30?\n\nAssistant:"
    assert trained(row, is_pair=True) == [(before, [" 42<|im_end|>"]), (before, [" 31<|im_end|>"])]


TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


def test_openais_tool_data_is_trained_on_as_written(tmp_path: Path):
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 12, "b": null}'}}
    messages = [
        user("12+?"),
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "12"},
        {**assistant("It is 12."), "weight": 0},
        user("And now?"),
        {**assistant("Still 12."), "weight": 1},
    ]
    row = {"messages": messages, "tools": [TOOL], "parallel_tool_calls": False}
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages[2:]]
    in_parts = {**row, "messages": [*messages[:2], *parts]}
    for file, given in (("openai.jsonl", row), ("openai.parquet", row), ("parts.jsonl", in_parts)):
        (found,) = read(written(tmp_path / file, [given]))
        ((before, texts),) = trained(found)
        assert json.dumps(TOOL) in before
        # The message of weight 0 is in the sequence, but is not trained on.
        assert texts == [
            '<tool_call>{"name": "add", "arguments": {"a": 12, "b": null}}</tool_call><|im_end|>',
            "Still 12.<|im_end|>",
        ]
    with pytest.raises(DataError, match=r"a message has the weight 0\.5, expected 0"):
        trained({"messages": [user("1"), {**assistant("2"), "weight": 0.5}]})


def test_openrlhfs_prompts_are_text_messages_or_text_within_the_chat_template(tmp_path: Path):
    texts = written(tmp_path / "input.jsonl", [{"input": "12+30?", "label": "42"}])
    chats = written(tmp_path / "context.jsonl", [{"context_messages": [user("12+30?")], "label": "42"}])
    (plain,) = read(texts, prompt_key="input")
    assert plain["prompt"] == "12+30?"
    (chat,) = read(chats, prompt_key="context_messages")
    (applied,) = read(texts, prompt_key="input", apply_chat_template=True)
    assert applied["prompt"] == chat["prompt"] == [user("12+30?")]
    assert applied["label"] == "42"
    # Messages stay as they are, as with OpenRLHF's option.
    assert read(chats, prompt_key="context_messages", apply_chat_template=True)[0]["prompt"] == chat["prompt"]
    # The other rows of OpenRLHF's supervised data: a response as text.
    (answered,) = read(
        written(tmp_path / "sft.jsonl", [{"input": "12+30?", "completion": "42"}]),
        prompt_key="input",
        apply_chat_template=True,
    )
    assert trained(answered) == [(ASKED, ["42<|im_end|>"])]


def test_verls_agent_loop_rows_keep_what_their_environment_reads(tmp_path: Path):
    row = {
        "data_source": "openai/gsm8k",
        "agent_name": None,
        "prompt": [{"role": "system", "content": "Use tools."}, user("12+30?")],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_info": {"index": 0, "tools_kwargs": {"add": {"create_kwargs": {"ground_truth": "42"}}}},
    }
    (found,) = read(written(tmp_path / "train.parquet", [row]))
    assert found["prompt"] == row["prompt"]
    assert found["reward_spec"] == row["reward_model"]
    assert found["extra_info"] == row["extra_info"]


def test_skywork_or1s_references_stay_as_they_are(tmp_path: Path):
    row = {
        "data_source": "train-math-deepscaler",
        "prompt": [user("12+30?")],
        "ability": "math",
        "reward_model": {"ground_truth": '["42"]', "style": "rule"},
        "extra_info": {"index": 7, "model_difficulty": {"DeepSeek-R1-Distill-Qwen-7B": 3}},
    }
    (found,) = read(written(tmp_path / "or1.parquet", [row]))
    assert found["prompt"] == [user("12+30?")]
    assert found["reward_spec"]["ground_truth"] == '["42"]'


def test_conversations_of_sharegpt_are_refused_with_the_columns_that_there_are(tmp_path: Path):
    row = {"system": "Think.", "conversations": [{"from": "user", "value": "12+30?"}, {"from": "gpt", "value": "42"}]}
    file = written(tmp_path / "open_thoughts.jsonl", [row])
    with pytest.raises(DataError, match=r"open_thoughts\.jsonl:1: expected a row with the column 'prompt', got system"):
        read(file)
    problem = r"open_thoughts\.jsonl:1: 'conversations' must be text or a list of messages with 'role' and 'content'"
    with pytest.raises(DataError, match=problem):
        read_rows([file], key="data.train_data", prompt_key="conversations")
