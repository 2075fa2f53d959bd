"""Messages and tools in the forms in which data sets write them, and the one form in which they are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from rl_core.errors import DataError
from rl_core.interfaces import require_messages, require_tools
from rl_core.trainer.before.data import read_rows

ASKED = {"role": "user", "content": "12+30?"}
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 12, "b": None}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
NORMAL = [ASKED, CALLING, {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "42"}]


def with_call(**changes: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": {**CALL["function"], **changes}}]}


def calling(**changes: Any) -> dict[str, Any]:
    found = {**CALLING, **changes}
    return {name: value for name, value in found.items() if value != "absent"}


@pytest.mark.parametrize(
    "message",
    [
        calling(content=None),
        calling(content="absent"),
        calling(name=None, reasoning_content=None, function_call=None),
        calling(content=[{"type": "text", "text": "", "image": None}]),
        calling(tool_calls=({**CALL, "index": None},)),
        calling(tool_calls=np.array([CALL], dtype=object)),
        calling(tool_calls=[{"id": "c1", "type": None, "function": {**CALL["function"], "strict": None}}]),
        calling(tool_calls=[{"id": "c1", **CALL["function"]}]),
        with_call(arguments='{"a": 12, "b": null}'),
        with_call(arguments=' { "a":12,"b":null } '),
        with_call(arguments={"a": np.int64(12), "b": None}),
    ],
)
def test_every_way_to_write_a_call_is_the_same_message(message: dict[str, Any]):
    assert require_messages([ASKED, message, NORMAL[2]], "a prompt") == NORMAL


@pytest.mark.parametrize("nothing", [None, "", {}, "absent"])
def test_a_call_without_arguments_has_an_empty_mapping(nothing: Any):
    function = {"name": "now"} if nothing == "absent" else {"name": "now", "arguments": nothing}
    (message,) = require_messages([{"role": "assistant", "tool_calls": [{"function": function}]}], "a prompt")
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "now", "arguments": {}}}]


def test_the_former_format_of_calls_is_read_as_calls():
    former = [
        ASKED,
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 12}'}},
        {"role": "function", "name": "add", "content": "42"},
    ]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 12}}}
    assert require_messages(former, "a prompt") == [
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "42"},
    ]


def test_parts_of_text_are_joined_without_separators_and_arrays_are_lists():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b", "image": None}]
    given = np.array([{"role": "user", "content": np.array(parts, dtype=object)}], dtype=object)
    assert require_messages(given, "a prompt") == [{"role": "user", "content": "a b"}]
    arrow = pyarrow.scalar([{"role": "user", "content": "a b", "name": None}])
    assert require_messages(arrow, "a prompt") == [{"role": "user", "content": "a b"}]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "part of type 'image_url'; only text"),
        ({"role": "user", "content": ["a"]}, "part of type 'str'; only text"),
        ({"role": "user", "content": []}, "whose 'content' is not text"),
        ({"role": "user", "content": {"text": "a"}}, "whose 'content' is not text"),
        ({"from": "narrator", "value": "a"}, "from 'narrator'; expected human, user, gpt"),
        ({"from": "function_call", "value": "add(12)"}, "from 'function_call' whose value is not JSON"),
        ({"from": "human"}, "must be text or a list of messages with 'role' and 'content'"),
        (with_call(arguments="a=12"), "whose call of 'add' has arguments that are not a JSON object"),
        (with_call(arguments="[12]"), "whose call of 'add' has arguments that are not a JSON object"),
        (with_call(arguments='{"a": NaN}'), "whose call of 'add' has arguments that are not a JSON object"),
        (with_call(arguments='"{\\"a\\": 12}"'), "whose call of 'add' has arguments that are not a JSON object"),
        (with_call(arguments=[]), "whose call of 'add' has arguments that are not a JSON object"),
        ({**CALLING, "function_call": {"name": "add", "arguments": "{}"}}, "both 'function_call' and 'tool_calls'"),
    ],
)
def test_a_message_that_cannot_be_read_is_refused_with_its_problem(message: Any, problem: str):
    with pytest.raises(DataError, match=f"row 3 .*{problem}"):
        require_messages([message], "row 3")


def test_null_values_within_a_schema_of_json_are_data():
    schema = {"type": "object", "properties": {"a": {"type": "integer", "default": None}}}
    given = {"type": "function", "strict": None, "function": {"name": "add", "description": None, "parameters": schema}}
    assert require_tools([given]) == [{"type": "function", "function": {"name": "add", "parameters": schema}}]


def test_the_fields_that_columns_add_are_no_arguments_but_null_in_json_is_one(tmp_path: Path):
    messages = [ASKED, calling(content=None), {"role": "assistant", "content": "42"}]
    wider = [ASKED, with_call(name="sub", arguments={"x": 1}), {"role": "assistant", "content": "1"}]
    former = [ASKED, {"role": "assistant", "content": "", "function_call": CALL["function"]}]
    former_wider = [ASKED, {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": {"x": 1}}}]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"prompt": former}, {"prompt": former_wider}]), tmp_path / "former.parquet"
    )
    texts = [ASKED, with_call(arguments='{"a": 12, "b": null}'), {"role": "assistant", "content": "42"}]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"messages": messages}, {"messages": wider}]), tmp_path / "columns.parquet"
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": texts}]), tmp_path / "texts.parquet")
    (tmp_path / "lines.jsonl").write_text(json.dumps({"messages": messages}))

    def arguments(name: str) -> list[Any]:
        rows = read_rows([tmp_path / name], key="data.train_data")
        return [row.row["prompt"][1]["tool_calls"][0]["function"]["arguments"] for row in rows]

    assert arguments("columns.parquet") == arguments("former.parquet") == [{"a": 12}, {"x": 1}]
    assert arguments("texts.parquet") == arguments("lines.jsonl") == [{"a": 12, "b": None}]
