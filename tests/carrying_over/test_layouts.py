"""Data in the layouts of other projects: small files, made here, and what is read from them."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from trl.data_utils import maybe_convert_to_chatml

from rl_core.config import from_mapping
from rl_core.errors import DataError
from rl_core.testing.scripted_engine import ScriptedClient
from rl_rollout.chat import TokenCodec
from rl_rollout.dataset_generator import DatasetGenerator
from rl_rollout.generator import EnvironmentGenerator, Episodes
from rl_rollout.supervised_tokens import RowEncoder
from tests.rollout.chat_templates import tokenizer_of


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def written(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), file)
    elif file.suffix == ".csv":
        with file.open("w", newline="") as opened:
            cells = csv.writer(opened)
            cells.writerow(rows[0])
            cells.writerows(
                [value if isinstance(value, str) else json.dumps(value) for value in row.values()] for row in rows
            )
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read(file: Path, **data: Any) -> list[Mapping[str, Any]]:
    """The rows as a run with these keys of `data` reads them."""
    from rl_core.trainer.before.environment_checks import configured_rows

    config = from_mapping({"data.train_data": [str(file)], **{f"data.{name}": value for name, value in data.items()}})
    return [row.row for row in configured_rows(config, "data.train_data")]


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


SHAREGPT: list[dict[str, Any]] = [
    {"conversations": [{"from": "human", "value": "12+30?"}, {"from": "gpt", "value": "42"}], "source": "openhermes"},
    {"system": "Think.", "conversations": [{"from": "user", "value": "12+30?"}, {"from": "assistant", "value": "42"}]},
    {"system": "", "conversations": [{"from": "system", "value": "S"}, {"from": "user", "value": "12+30?"}], "id": 7},
    {"conversations": [user("12+30?"), assistant("42")]},
]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_conversations_of_sharegpt_are_messages(tmp_path: Path, suffix: str):
    for number, row in enumerate(SHAREGPT):
        if "id" in row:
            row = {**row, "conversations": [*row["conversations"], {"from": "chatgpt", "value": "42", "weight": 1}]}
        (found,) = read(written(tmp_path / f"{number}.{suffix}", [row]))
        roles = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
        theirs = maybe_convert_to_chatml({"conversations": [dict(one) for one in row["conversations"]]})["messages"]
        theirs = [{**one, "role": roles.get(one["role"], one["role"])} for one in theirs]
        if row.get("system"):
            theirs = [{"role": "system", "content": row["system"]}, *theirs]
        whole = tokenizer_of("tool_chatml").apply_chat_template(theirs, tokenize=False)
        ((before, texts),) = trained(found)
        assert before + texts[0] == whole.rstrip()
        assert texts == ["42<|im_end|>"]


def test_llama_factorys_calls_and_pairs_are_read_as_calls_and_pairs(tmp_path: Path):
    call = {"name": "add", "arguments": {"a": 12, "b": 30}}
    said = [
        {"from": "human", "value": "12+30?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "42"},
        {"from": "gpt", "value": "It is 42."},
    ]
    row = {"conversations": said, "tools": json.dumps([TOOL["function"]])}
    messages = [
        user("12+30?"),
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "42"},
        assistant("It is 42."),
    ]
    (plain,) = read(written(tmp_path / "plain.jsonl", [{"messages": messages, "tools": [TOOL]}]))
    for suffix in ("jsonl", "parquet"):
        (found,) = read(written(tmp_path / f"glaive.{suffix}", [row]))
        assert trained(found) == trained(plain)
    pair = {
        "conversations": said[:1],
        "chosen": {"from": "gpt", "value": "42"},
        "rejected": {"from": "gpt", "value": "0"},
    }
    (found,) = read(written(tmp_path / "pairs.jsonl", [pair]))
    assert trained(found, is_pair=True) == [(ASKED, [f"{text}<|im_end|>"]) for text in ("42", "0")]


def test_conversations_in_text_are_conversations(tmp_path: Path):
    asked, good, bad = [user("12+30?")], [assistant("42")], [assistant("31")]
    rows = [
        {"messages": json.dumps(asked + good)},
        {"prompt": json.dumps(asked), "completion": json.dumps(good)},
        {"prompt": "12+30?", "chosen": json.dumps(asked + good), "rejected": json.dumps(asked + bad)},
        {"prompt": json.dumps(asked), "chosen": json.dumps(good), "rejected": json.dumps(bad)},
    ]
    expected = [(ASKED, ["42<|im_end|>"]), (ASKED, ["31<|im_end|>"])]
    for suffix in ("jsonl", "parquet", "csv"):
        for number, row in enumerate(rows):
            (found,) = read(written(tmp_path / f"{number}.{suffix}", [row]))
            is_pair = "chosen" in row
            assert trained(found, is_pair=is_pair) == (expected if is_pair else expected[:1])
    # The response to a text stays text, even if it looks like messages.
    (found,) = read(written(tmp_path / "made.jsonl", [{"prompt": "Write one.", "completion": json.dumps(asked)}]))
    assert found["completion"] == json.dumps(asked)
    with pytest.raises(DataError, match=r"repr\.jsonl:1: 'prompt' is text that looks like a list of messages"):
        read(written(tmp_path / "repr.jsonl", [{"prompt": str(asked)}]))
    with pytest.raises(DataError, match="'messages' must be a list of messages, or its JSON text, with 'role'"):
        read(written(tmp_path / "text.jsonl", [{"messages": "12+30?"}]))


def test_openais_former_functions_are_shown_as_tools(tmp_path: Path):
    messages = [
        user("12+30?"),
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 12}'}},
        {"role": "function", "name": "add", "content": "42"},
        assistant("42"),
    ]
    (plain,) = read(written(tmp_path / "tools.jsonl", [{"messages": messages, "tools": [TOOL]}]))
    assert json.dumps(TOOL) in trained(plain)[0][0]
    responses_form = {"type": "function", **TOOL["function"]}
    for number, row in enumerate(
        [
            {"functions": [TOOL["function"]]},
            {"tools": [TOOL["function"]]},
            {"tools": [responses_form]},
            {"tools": json.dumps([TOOL["function"]])},
            {"tools": [json.dumps(TOOL["function"])]},
        ]
    ):
        (found,) = read(written(tmp_path / f"{number}.jsonl", [{"messages": messages, **row}]))
        assert trained(found) == trained(plain)
    # Another column of this name, which only an environment reads.
    (found,) = read(written(tmp_path / "other.jsonl", [{"messages": messages, "functions": ["f", "g"]}]))
    assert "tools" not in found


@pytest.mark.parametrize("key", ["weight", "train", "training"])
def test_messages_that_axolotl_leaves_out_are_not_trained_on(tmp_path: Path, key: str):
    messages = [user("1"), {**assistant("bad"), key: False}, user("2"), {**assistant("good"), key: True}]
    for suffix in ("jsonl", "parquet"):
        (found,) = read(written(tmp_path / f"rows.{suffix}", [{"messages": messages}]))
        assert [texts for _, texts in trained(found)] == [["good<|im_end|>"]]


def test_a_conversation_that_begins_with_the_assistant_needs_a_weight(tmp_path: Path):
    greeting = assistant("Hello.")
    (found,) = read(written(tmp_path / "0.jsonl", [{"messages": [greeting, user("12+30?"), assistant("42")]}]))
    with pytest.raises(DataError, match=r'begins with the assistant.* give it "weight": 0'):
        trained(found)
    (found,) = read(
        written(tmp_path / "1.jsonl", [{"messages": [{**greeting, "weight": 0}, user("12+30?"), assistant("42")]}])
    )
    assert [texts for _, texts in trained(found)] == [["42<|im_end|>"]]


def test_trls_language_modelling_rows_are_trained_on_as_a_whole(tmp_path: Path):
    (row,) = read(written(tmp_path / "text.jsonl", [{"text": "12+30=42"}]), prompt_key="text")
    tokenizer = tokenizer_of("llama3")
    encoder = RowEncoder(
        TokenCodec(tokenizer, chat_template_kwargs={}),
        response_key="prompt",
        trained_roles=["assistant"],
        trained_turns="all",
        scored_at_end=False,
    )
    sequence = encoder.response(row)
    assert list(sequence.tokens) == [*tokenizer("12+30=42")["input_ids"], tokenizer.eos_token_id]
    assert sequence.trained == (False, *(True for _ in sequence.tokens[1:]))


def test_columns_that_no_sequence_has_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    rows = [
        {"instruction": "Add.", "input": "", "output": "42"},
        {"instruction": "Add.", "input": "12", "output": "42"},
    ]
    codec = TokenCodec(tokenizer_of("tool_chatml"), chat_template_kwargs={})
    encoder = RowEncoder(
        codec, response_key="output", trained_roles=["assistant"], trained_turns="all", scored_at_end=False
    )
    generator = DatasetGenerator(codec, encoder, of_pairs=False)
    found = read(written(tmp_path / "alpaca.jsonl", rows), prompt_key="instruction", apply_chat_template=True)
    with caplog.at_level(logging.INFO):
        for row in found:
            generator.prove(row, anew=False)
        assert caplog.messages == ["columns of the data that are not read: input"]
        caplog.clear()
        chats = [{**SHAREGPT[1], "tools": [TOOL]}, {"prompt": "12+30?", "messages": [user("12+30?"), assistant("42")]}]
        for row in read(written(tmp_path / "read.jsonl", chats)):
            generator.prove(row, anew=False)
        assert caplog.messages == []


def test_token_ids_are_no_prompt_of_an_environment(tmp_path: Path):
    (row,) = read(written(tmp_path / "ids.jsonl", [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}]))
    with pytest.raises(DataError, match=r"has token ids \('input_ids'\), but no prompt"):
        EnvironmentGenerator(
            ScriptedClient(lambda request: (5,)),
            TokenCodec(tokenizer_of("tool_chatml"), chat_template_kwargs={}),
            Episodes(environment_of=lambda row: None),  # pyright: ignore
        ).prompt_length(row)


def test_a_template_setting_that_a_parquet_column_adds_to_a_row_is_not_set(tmp_path: Path):
    prompt = {"prompt": [user("12+30?")]}
    settings = [{"enable_thinking": False}, {"enable_thinking": True, "preserve_thinking": True}]
    rows = [{**prompt, "chat_template_kwargs": one} for one in settings]
    found = read(written(tmp_path / "rows.parquet", rows))
    assert [row["chat_template_kwargs"] for row in found] == settings


def test_pairs_without_a_prompt_of_their_own_are_refused_or_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    before = "\n\nHuman: 12+30?\n\nAssistant:"
    answers = [(" 42", " 31"), (" 42", " 42"), (" 42", " 4")]
    pairs = [{"chosen": before + good, "rejected": before + bad} for good, bad in answers]
    file = written(tmp_path / "hh_rlhf.jsonl", pairs)
    with pytest.raises(DataError, match=r"hh_rlhf\.jsonl:2: .* are the same, .* set data\.on_refused_row=drop"):
        read(file)
    (row,) = read(file, on_refused_row="drop")
    assert trained(row, is_pair=True) == [(before, [" 42<|im_end|>"]), (before, [" 31<|im_end|>"])]
    assert "left out 2 of 3 rows without a usable prompt; the first: " in caplog.text
    only = written(tmp_path / "only.jsonl", pairs[1:])
    with pytest.raises(DataError, match=r"only\.jsonl:1: .* are the same"):
        read(only, on_refused_row="drop")
