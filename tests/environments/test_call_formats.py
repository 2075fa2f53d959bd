"""Reading calls in a policy's text, and finding the call format of a chat template."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import trl
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import ConfigError
from rl_core.interfaces import EXAMPLE_CALL
from rl_environments.tools import BrokenCall, Call, format_of_example, format_of_name
from rl_rollout.chat import TokenCodec
from rl_rollout.turn_tokens import TurnTokens
from tests.rollout.chat_templates import tokenizer_of

HERMES, XML, LLAMA, MARKED = map(format_of_name, ("hermes", "qwen_xml", "llama_json", "marked"))


def calls(name: str, **arguments: Any) -> list[Call]:
    return [Call(name=name, arguments=arguments)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', calls("f", a=1)),
        ('So:\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n', calls("f")),
        # The marker that ends a call may occur in a string argument.
        (
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
            calls("f", a="</tool_call>"),
        ),
        ('<think><tool_call>{"name": "f"</think>none', []),
        ("<think>still <tool_call>", []),
        ("no call", []),
        ('{"name": "f", "arguments": {}}', []),
    ],
)
def test_hermes_calls_are_read(text: str, found: list[Call]):
    assert HERMES.read(text) == found


def test_a_broken_call_does_not_hide_the_other_calls_of_its_turn():
    text = (
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>{"name": f}</tool_call>'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    )
    first, broken, last = HERMES.read(text)
    assert [first, last] == [*calls("f", a=1), *calls("g")]
    assert isinstance(broken, BrokenCall)
    assert broken.problem == "the call is not JSON: Expecting value (character 10)"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', "not JSON"),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', "does not end with </tool_call>"),
        ('<tool_call>{"name": "f"}</tool_call>', 'has the keys name; expected {"name": "…", "arguments"'),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "has the keys name, arguments"),
        ("<tool_call>[1]</tool_call>", "expected an object"),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is not JSON"),
        ("<tool_call>" + "[" * 100_000, "not JSON"),
        ("<tool_call>" + "1" * 10_000, "not JSON"),
        ("<tool_call>", "not JSON"),
    ],
)
def test_a_broken_hermes_call_says_what_is_wrong(text: str, said: str):
    (broken,) = HERMES.read(text)
    assert isinstance(broken, BrokenCall)
    assert said in broken.problem


def test_xml_calls_are_read_with_their_arguments_as_text():
    text = (
        "I look.\n<tool_call>\n<function=f>\n<parameter=a>\n1\n2\n</parameter>\n<parameter=b>\n <x> \n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>"
    )
    assert XML.read(text) == [
        Call(name="f", arguments={"a": "1\n2", "b": " <x> "}, is_text=True),
        Call(name="g", arguments={}, is_text=True),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<function=f><parameter=a>1</parameter>", "does not end with </function>"),
        ("<function=f><parameter=a>1</function>", "outside of <parameter=name>"),
        ("<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>", "'a' twice"),
        ('<tool_call>{"name": "f"}</tool_call>', "not followed by <function=name>"),
    ],
)
def test_a_broken_xml_call_says_what_is_wrong(text: str, said: str):
    (broken,) = XML.read(text)
    assert isinstance(broken, BrokenCall)
    assert said in broken.problem


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', calls("f", a=1)),
        ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}', calls("f", a=1)),
        ('{"type": "function", "name": "f", "parameters": {}}', calls("f")),
        ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', [*calls("f"), *calls("g")]),
        ('{"answer": 3}', []),
        ('The answer is {"name": "f", "parameters": {}}', []),
        ("{", []),
    ],
)
def test_llama_calls_are_read(text: str, found: list[Call]):
    assert LLAMA.read(text) == found


def test_the_format_marked_reads_calls_of_every_format():
    for text in (
        '<tool_call>{"name": "f", "arguments": {"a": "1"}}</tool_call>',
        "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>",
        '{"name": "f", "parameters": {"a": "1"}}',
    ):
        (call,) = MARKED.read(text)
        assert isinstance(call, Call)
        assert (call.name, dict(call.arguments)) == ("f", {"a": "1"})


MARKS = ("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "</think>")
PIECES = st.sampled_from([*MARKS, *'{}[]";:1\\x \n', '{"name": "f", ', '"arguments": {', "<|python_tag|>", "<think>"])


@given(st.lists(PIECES, max_size=30).map("".join))
def test_no_text_makes_a_reader_raise(text: str):
    for each in (HERMES, XML, LLAMA, MARKED):
        assert all(isinstance(call, Call | BrokenCall) for call in each.read(text))


TEMPLATES = Path(trl.__file__).parent / "chat_templates"
"""Chat templates of real model families, which TRL ships."""


def example_of(template: str) -> str | None:
    tokenizer = copy.copy(tokenizer_of("tool_chatml"))  # any tokenizer will do: only the template matters
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return TurnTokens(TokenCodec(tokenizer, chat_template_kwargs={})).example_call


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("qwen2_5", "hermes"),
        ("qwen3", "hermes"),
        ("qwen3_instruct_2507", "hermes"),
        ("qwen3_5_think", "qwen_xml"),
        ("qwen3_5_nothink", "qwen_xml"),
        ("qwen3_8", "qwen_xml"),
        ("llama3_1", "llama_json"),
        ("llama3_2", "llama_json"),
    ],
)
def test_the_format_of_a_real_template_is_found(template: str, name: str):
    example = example_of(template)
    assert example is not None
    assert format_of_example(example).name == name


def test_a_template_that_shows_no_calls_gives_no_example():
    assert example_of("llama3") is None


def test_an_example_in_an_unknown_format_is_refused():
    function = json.dumps(EXAMPLE_CALL["function"])
    with pytest.raises(ConfigError, match=r"writes a call as .*hermes, qwen_xml, llama_json.*call_format"):
        format_of_example(f"[TOOL_CALLS] {function}")
    with pytest.raises(ConfigError, match="got 'mistral'; expected one of hermes, qwen_xml, llama_json, marked"):
        format_of_name("mistral")
