"""Parses calls in a policy's text, in the format of its chat template.

    hermes      <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>                 Hermes, Qwen2.5, Qwen3
    qwen_xml    <tool_call><function=add><parameter=a>1</parameter></function></tool_call>    Qwen3-Coder, Qwen3.5
    llama_json  {"name": "add", "parameters": {"a": 1}}                                       Llama 3.1 and later
    marked      any of these, recognised by its tags: for templates that render no calls

To find a template's format, each format tries to parse an example call that the template renders (`format_of_example`).
A call that is begun but cannot be parsed is a `BrokenCall`, whose problem is shown to the policy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs

from rl_core.errors import ConfigError
from rl_core.interfaces import EXAMPLE_CALL, ToolSchema, without_thought


@attrs.frozen(kw_only=True)
class Call:
    """A parsed call. Its name and arguments are not validated yet."""

    name: str
    arguments: Mapping[str, Any]
    is_text: bool = False
    """Whether all argument values are text, whatever the parameters' types."""


@attrs.frozen(kw_only=True)
class BrokenCall:
    """A call that was begun but cannot be parsed."""

    problem: str
    """Description of the problem, for the policy."""


class CallFormat(Protocol):
    """The format in which a family of models writes calls. An environment may define a new one."""

    name: str

    def read(self, text: str) -> Sequence[Call | BrokenCall]:
        """Returns the calls in a policy's text, which `ToolEnvironment` passes without thinking (`Action.answer`), in
        order; empty if there are none. Must not raise."""
        ...


@runtime_checkable
class ForcibleFormat(CallFormat, Protocol):
    """A format in which a grammar can force a call. `qwen_xml` is not forcible, because xgrammar 0.2 allows blanks
    around a value, and in `qwen_xml` such blanks are part of the value."""

    def call_grammar(self, tool: ToolSchema) -> Mapping[str, Any]:
        """The grammar of one call of this function, as a format of xgrammar's structural tags, such as `{"type":
        "regex", "pattern": …}`."""
        ...


def format_of_example(example: str) -> CallFormat:
    """Returns the format in which a chat template wrote `rl_core.interfaces.EXAMPLE_CALL`.

    Raises:
        ConfigError: no known format can parse the example.
    """
    function = EXAMPLE_CALL["function"]
    for known in _FORMATS.values():
        calls = known.read(example)
        read = [(call.name, dict(call.arguments)) for call in calls if isinstance(call, Call)]
        if read == [(function["name"], function["arguments"])]:
            return known
    raise ConfigError(
        f"the model's chat template writes a call as {example!r:.200}; expected one of the formats "
        f"{', '.join(_FORMATS)}. Define an attribute `call_format` in the environment with a format that parses it"
    )


def format_of_name(name: str, key: str = "environment.options.call_format") -> CallFormat:
    """Returns the format that is called `name`. Raises ConfigError, which names the key, for an unknown name."""
    known = {**_FORMATS, MARKED.name: MARKED}
    if not isinstance(name, str) or name not in known:
        raise ConfigError(f"got {name!r}; expected one of {', '.join(known)}", key=key)
    return known[name]


class HermesCalls:
    """Parses calls that are JSON between `<tool_call>` and `</tool_call>`, with the keys `name` and `arguments` (or
    `parameters`)."""

    name = "hermes"

    def read(self, text: str) -> Sequence[Call | BrokenCall]:
        """See `CallFormat.read`."""
        text = without_thought(text)
        found: list[Call | BrokenCall] = []
        end = 0
        while (start := text.find("<tool_call>", end)) >= 0:
            call, end = _json_call(text, start + len("<tool_call>"), "arguments")
            closing = re.compile(r"\s*</tool_call>").match(text, end)
            if isinstance(call, Call) and closing is None:
                call = BrokenCall(problem="the call does not end with </tool_call> after its JSON")
            found.append(call)
            behind = text.find("</tool_call>", end)
            end = closing.end() if closing else behind + len("</tool_call>") if behind >= 0 else len(text)
        return found

    def call_grammar(self, tool: ToolSchema) -> Mapping[str, Any]:
        """See `ForcibleFormat.call_grammar`."""
        name = json.dumps(tool["function"]["name"])
        return _call_tag(tool, f'<tool_call>\n{{"name": {name}, "arguments": ', "}\n</tool_call>")


class QwenXmlCalls:
    """Parses calls that are `<function=name>` with a `<parameter=name>` for each argument. Argument values are text."""

    name = "qwen_xml"

    def read(self, text: str) -> Sequence[Call | BrokenCall]:
        """See `CallFormat.read`."""
        text = without_thought(text)
        found: list[Call | BrokenCall] = []
        end = 0
        while head := _FUNCTION.search(text, end):
            closing = text.find("</function>", head.end())
            end = closing if closing >= 0 else len(text)
            found.append(_xml_call(head[1].strip(), text[head.end() : end], is_closed=closing >= 0))
        if not found and "<tool_call>" in text:
            return [BrokenCall(problem="<tool_call> is not followed by <function=name>")]
        return found


class LlamaJsonCalls:
    """Parses calls that are JSON objects at the beginning of the response; `;` or blanks may separate several."""

    name = "llama_json"

    def read(self, text: str) -> Sequence[Call | BrokenCall]:
        """See `CallFormat.read`. JSON whose first key is neither `name` nor `type` is an answer, not a call."""
        text = without_thought(text).replace("<|python_tag|>", "").strip()
        found: list[Call | BrokenCall] = []
        start = 0
        while text.startswith("{", start):
            if not re.compile(r'\{\s*"(type|name)"').match(text, start):
                break
            call, end = _json_call(text, start, "parameters")
            found.append(call)
            if isinstance(call, BrokenCall):
                break
            start = end + len(text[end:]) - len(text[end:].lstrip("; \n"))
        return found

    def call_grammar(self, tool: ToolSchema) -> Mapping[str, Any]:
        """See `ForcibleFormat.call_grammar`."""
        return _call_tag(tool, f'{{"name": {json.dumps(tool["function"]["name"])}, "parameters": ', "}")


class MarkedCalls:
    """Any of the formats, recognised by its tags: text with `<function=` is `qwen_xml`, other text with `<tool_call>`
    is `hermes`, and all other text is `llama_json`."""

    name = "marked"

    def read(self, text: str) -> Sequence[Call | BrokenCall]:
        """See `CallFormat.read`."""
        behind = without_thought(text)
        if "<function=" in behind:
            return _FORMATS["qwen_xml"].read(text)
        return _FORMATS["hermes" if "<tool_call>" in behind else "llama_json"].read(text)


_FORMATS: dict[str, CallFormat] = {each.name: each for each in (HermesCalls(), QwenXmlCalls(), LlamaJsonCalls())}
MARKED = MarkedCalls()


def _call_tag(tool: ToolSchema, begin: str, end: str) -> Mapping[str, Any]:
    """The grammar of `begin`, the function's arguments as JSON, and `end`. Whitespace is limited, because otherwise a
    model may write blanks forever."""
    schema = tool["function"]["parameters"]
    arguments = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
    return {"type": "tag", "begin": begin, "content": arguments, "end": end}


def _json_call(text: str, start: int, key: str) -> tuple[Call | BrokenCall, int]:
    """The call whose JSON begins at `start`, possibly after whitespace, and the position after the JSON."""
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        return BrokenCall(problem=f"the call is not JSON: {error.msg} (character {error.pos - start + 1})"), start
    except (ValueError, RecursionError) as error:
        return BrokenCall(problem=f"the call is not JSON: {error!s:.200}"), start
    if not isinstance(value, dict):
        return BrokenCall(problem=f"the call is {json.dumps(value):.80}; expected an object"), end
    arguments = value.get(key, value.get("arguments", value.get("parameters")))
    if isinstance(arguments, str):
        arguments = _object_or_none(arguments)
    if not isinstance(value.get("name"), str) or not isinstance(arguments, dict):
        expected = json.dumps({"name": "…", key: {"…": "…"}}, ensure_ascii=False)
        return BrokenCall(problem=f"the call has the keys {', '.join(value) or 'none'}; expected {expected}"), end
    return Call(name=value["name"], arguments=arguments), end


def _xml_call(name: str, inside: str, *, is_closed: bool) -> Call | BrokenCall:
    if not is_closed:
        return BrokenCall(problem=f"the call of {name!r:.80} does not end with </function>")
    arguments: dict[str, Any] = {}
    rest = inside
    for match in _PARAMETER.finditer(inside):
        if match[1] in arguments:
            return BrokenCall(problem=f"the call gives the argument {match[1]!r} twice")
        arguments[match[1]] = match[2].removeprefix("\n").removesuffix("\n")
        rest = rest.replace(match[0], "", 1)
    if rest.strip():
        return BrokenCall(problem=f"the call has {rest.strip()!r:.80} outside of <parameter=name>…</parameter>")
    return Call(name=name, arguments=arguments, is_text=True)


_FUNCTION = re.compile(r"<function=([^<>\n]*)>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>(.*?)</parameter>", re.DOTALL)


def _object_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
