"""Encoding of conversations with tools: tokens and mask are those of the chat template with the row's schemas."""

from __future__ import annotations

import copy
import json
import random
from importlib.resources import files
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rl_core.errors import ConfigError, DataError
from rl_core.interfaces import Row
from rl_core.trainer.before.data import read_rows
from rl_core.trainer.before.prompt_lengths import fitting_rows
from rl_rollout.chat import TokenCodec
from rl_rollout.supervised_tokens import RowEncoder, Supervised
from tests.rollout.chat_templates import TOOL_CHATML, tokenizer_of
from tests.supervised.trained import config_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The {name} of two numbers",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
    for name in ("sum", "product")
]


def call(name: str, a: int, b: int) -> dict[str, Any]:
    return {"type": "function", "id": "call00001", "function": {"name": name, "arguments": {"a": a, "b": b}}}


MESSAGES = [
    {"role": "system", "content": "You can count."},
    {"role": "user", "content": "What is 12 + 30?"},
    {"role": "assistant", "tool_calls": [call("sum", 12, 30)]},
    {"role": "tool", "name": "sum", "content": "42"},
    {"role": "assistant", "content": "The answer is 42."},
]
ROW = {"messages": MESSAGES, "tools": TOOLS}


MARKED_CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}{{ message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""A template that marks the assistant's text itself, with `generation` blocks."""


def tokenizer_with(template: str) -> Any:
    tokenizer = copy.deepcopy(tokenizer_of("tool_chatml"))
    tokenizer.chat_template = template
    return tokenizer


def encoded(tokenizer: Any, row: Row, **settings: Any) -> Supervised:
    codec = TokenCodec(tokenizer, chat_template_kwargs={})
    given = {"response_key": "completion", "trained_roles": ("assistant",), "trained_turns": "all", **settings}
    return RowEncoder(codec, scored_at_end=False, **given).response(row)


def of_template(tokenizer: Any, row: Row) -> tuple[list[int], list[bool]]:
    """Tokens and mask that the template gives for the whole conversation."""
    tools = row.get("tools")
    made = tokenizer.apply_chat_template(
        row["messages"],
        tools=json.loads(tools) if isinstance(tools, str) else tools,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return made["input_ids"], [bool(value) for value in made["assistant_masks"]]


def require_the_templates(tokenizer: Any, row: Row) -> None:
    """Requires the template's tokens and mask. Ours end with the last answer; the template may add whitespace."""
    ours, (tokens, trained) = encoded(tokenizer, row), of_template(tokenizer, row)
    count = len(ours.tokens)
    assert list(ours.tokens) == tokens[:count]
    assert list(ours.trained) == trained[:count]
    assert not any(trained[count:])
    assert tokenizer.decode(tokens[count:]).strip() == ""


def random_conversation(rng: random.Random) -> Row:
    """A random conversation: questions, each with up to two turns of calls and tool messages, then an answer."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Count."}] * rng.randrange(2)
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": f"What is {rng.randrange(100)} + {rng.randrange(100)}?"})
        for _ in range(rng.randrange(3)):
            calls = [call(rng.choice(["sum", "product"]), rng.randrange(100), 7) for _ in range(rng.randint(1, 2))]
            said = {"content": "Let me see. "} if rng.random() < 0.5 else {}
            messages.append({"role": "assistant", **said, "tool_calls": calls})
            messages += [{"role": "tool", "content": str(rng.randrange(1000))} for _ in calls]
        messages.append({"role": "assistant", "content": f"It is {rng.randrange(1000)}."})
    tools = TOOLS[: rng.randint(0, 2)]
    return {"messages": messages, "tools": rng.choice([tools, json.dumps(tools)])}


def test_tokens_and_mask_are_the_templates_own():
    tokenizer = tokenizer_with(MARKED_CHATML)
    require_the_templates(tokenizer, ROW)
    for seed in range(200):
        require_the_templates(tokenizer, random_conversation(random.Random(seed)))


def test_the_comparison_notices_missing_schemas_and_another_role():
    tokenizer = tokenizer_with(MARKED_CHATML)
    tokens, trained = of_template(tokenizer, ROW)
    without = encoded(tokenizer, {"messages": MESSAGES})
    assert list(without.tokens) != tokens[: len(without.tokens)]
    others = encoded(tokenizer, ROW, trained_roles=("assistant", "tool"))
    assert list(others.tokens) == tokens[: len(others.tokens)]
    assert list(others.trained) != trained[: len(others.trained)]


def test_the_prompt_shows_the_tools_and_only_assistant_turns_are_trained_on():
    tokenizer = tokenizer_with(TOOL_CHATML)
    sequence = encoded(tokenizer, ROW)
    trained, was = [], False
    for token, is_trained in zip(sequence.tokens, sequence.trained, strict=True):
        if is_trained:
            trained += [[]] * (not was)
            trained[-1] = [*trained[-1], token]
        was = is_trained
    assert [tokenizer.decode(tokens) for tokens in trained] == [
        '<tool_call>{"name": "sum", "arguments": {"a": 12, "b": 30}}</tool_call><|im_end|>',
        "The answer is 42.<|im_end|>",
    ]
    shown = tokenizer.decode(list(sequence.tokens[: sequence.prompt_length]))
    assert all(json.dumps(tool) in shown for tool in TOOLS)
    assert shown.endswith("What is 12 + 30?<|im_end|>\n<|im_start|>assistant\n")


# Qwen3's template, changed by TRL's authors so that it keeps thinking. Its mask includes the newline after a turn.
QWEN3 = (files("trl") / "chat_templates" / "qwen3_training.jinja").read_text()


def test_masks_are_those_of_a_published_template():
    tokenizer = tokenizer_with(QWEN3)
    end = tokenizer.eos_token_id
    for seed in range(50):
        row = random_conversation(random.Random(seed))
        ours, (tokens, trained) = encoded(tokenizer, row), of_template(tokenizer, row)
        behind_an_end = [False] + [before == end for before in tokens[:-1]]
        expected = [is_said and not is_behind for is_said, is_behind in zip(trained, behind_an_end, strict=True)]
        count = len(ours.tokens)
        assert list(ours.tokens) == tokens[:count]
        assert list(ours.trained) == expected[:count]
        assert not any(expected[count:])


def test_tools_may_be_json_text_or_a_list_or_empty():
    tokenizer = tokenizer_with(TOOL_CHATML)
    assert encoded(tokenizer, {**ROW, "tools": json.dumps(TOOLS)}) == encoded(tokenizer, ROW)
    without = encoded(tokenizer, {"messages": MESSAGES})
    for nothing in (None, "", [], "[]", "null"):
        assert encoded(tokenizer, {**ROW, "tools": nothing}) == without
    assert without != encoded(tokenizer, ROW)


@pytest.mark.parametrize("family", ["chatml", "llama3"])
def test_a_template_that_does_not_show_tools_is_refused(family: str):
    messages = [MESSAGES[0], MESSAGES[1], MESSAGES[4]]
    with pytest.raises(ConfigError, match="the model's chat template does not show the name of the tool"):
        encoded(tokenizer_of(family), {"messages": messages, "tools": TOOLS})
    encoded(tokenizer_of(family), {"messages": messages})


def test_a_row_with_invalid_tools_is_named_before_the_run(tmp_path: Path):
    from rl_core.config import generator_spec
    from rl_core.trainer.before.preflight import NoSampler
    from rl_transformers.testing.models import make_checkpoint

    tokenizer = tokenizer_with(TOOL_CHATML)
    model = make_checkpoint(tmp_path / "model", max_position_embeddings=2048, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(model)
    config = config_of(tmp_path, model, [ROW, {**ROW, "tools": "sum"}])
    plugin, spec = generator_spec(config)
    generator = plugin.create(spec, NoSampler())
    rows = read_rows(config.data.train_data, key="data.train_data")
    with pytest.raises(DataError, match=r"rows\.jsonl:2.*the row's 'tools' are not JSON"):
        fitting_rows(rows, generator, config, "generator.sampling_params")


def test_a_parquet_file_gives_no_function_the_parameters_of_another(tmp_path: Path):
    other = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
    row, file = {**ROW, "tools": [TOOLS[0], other]}, tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    (read,) = read_rows([file], key="data.train_data")
    padded = pyarrow.parquet.read_table(file).to_pylist()[0]["tools"][1]
    assert padded != other
    assert read.row["tools"][1] == other
    tokenizer = tokenizer_with(TOOL_CHATML)
    assert encoded(tokenizer, read.row) == encoded(tokenizer, row)
