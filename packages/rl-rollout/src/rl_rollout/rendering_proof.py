"""Proves that a chat template renders a conversation completely: each message, tool and call once and unchanged.

The conversation is rendered twice: as it is, and with a unique mark inside each of its texts, names and values. Each
mark must occur in the second rendering exactly once, between the two halves of its text, and without the marks, the
second rendering must equal the first. If it does not, the same is done with one mark at a time, because some templates
read the texts (`content.startswith('<tool_response>')`), and to find out which text is at fault.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from itertools import count, pairwise
from typing import Any, Literal

import attrs

from rl_core.errors import ConfigError, DataError
from rl_core.interfaces import Message, ToolSchema

_Render = Callable[[Sequence[Message], Sequence[ToolSchema]], str]
"""Renders messages and tools with the template."""
THINKING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that hold its thinking apart from its content."""
THOUGHT_TAGS = ("<think>", "</think>")
_MARK = re.compile(r"-q\d{4}q|73100\d{4}0137")
_ANY = 1_000_000
_MISSING = "does not show"
_MISPLACED = "writes, behind a later one,"
_Place = Literal["start", "middle", "end"]
"""Where in a text its mark stands."""
_MARKUP = re.compile(r"<[^<>\s]{1,40}>")
_WRITTEN: tuple[Callable[[str], str], ...] = (
    str,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
    lambda text: repr(text)[1:-1],
)
"""The ways in which a template may write a text: as it is, as JSON, or as Python."""
_REMEDIES = {
    "message": "give the model a chat_template.jinja that renders it, or change the message",
    "thought": "write it into the content as <think>…</think>, give the model a chat_template.jinja that renders it, "
    "or remove it",
    "thought in content": "give the model a chat_template.jinja that renders it, give the row as text (`prompt` and a "
    "response), or remove it",
    "call": "give the model a chat_template.jinja that renders `tool_calls`, or write the call into the content, in "
    "the format that the model was trained on",
    "tool": "give the model a chat_template.jinja that reads `tools`, or remove the tools and describe them in the "
    "prompt",
}


@attrs.frozen(kw_only=True)
class _Part:
    """One text, name or value of a conversation."""

    kind: Literal["message", "thought", "call", "tool"]
    what: str
    """Description, such as "the argument 'unit' of the call 'convert' in message 3"."""
    turn: int
    """Number of its message, from 0; -1 for a tool."""
    mark: str
    halves: tuple[str, str] = ("", "")
    """The text before and after the mark."""
    value: Any = None
    """A value that is no text, which the mark replaces."""
    is_in_content: bool = False
    """Whether it is a thought in the content of its message."""
    is_trimmed: bool = False
    """Whether the template may remove white space at both ends."""
    is_ordered: bool = False
    """Whether it must stand before later ones."""
    most: int = 1
    """How often it may occur. The name of a call may also stand in the results of calls, and a schema's names in lists
    of required parameters."""


def require_complete(
    render: _Render, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), *, thoughts: Collection[int] = ()
) -> None:
    """Requires that the rendering of a conversation contains all of it once and unchanged. White space at the ends of a
    content or a description may be missing.

    Args:
        thoughts: numbers of the messages whose thinking has to be in the rendering. The thinking of others may be
            missing, because templates drop it by design.

    Raises:
        ConfigError: a part of a tool is missing or changed.
        DataError: something else is missing, occurs twice or is changed; or `render` raises it.
    """
    plain = render(messages, tools)
    fault = _fault(render, messages, tools, plain, thoughts, only=None)
    if fault is None:
        return
    if fault[0] == _MISPLACED:  # one mark alone would not show it
        raise DataError(f"the model's chat template {_MISPLACED} {fault[1].what}: {_REMEDIES[fault[1].kind]}")
    for number in range(len(_Marker(plain).conversation(messages, tools)[2])):
        fault = _fault(render, messages, tools, plain, thoughts, only=number)
        if fault is None:
            continue
        problem, part = fault
        is_history = part.kind == "message" and part.turn not in thoughts and messages[part.turn]["role"] == "assistant"
        if is_history:
            beginning = _fault(render, messages, tools, plain, thoughts, only=number, place="start")
            end = _fault(render, messages, tools, plain, thoughts, only=number, place="end")
            if end is None and beginning is not None and beginning[0] == _MISSING:
                continue  # thinking in a form of the template's own, which it drops from earlier turns
        refused = ConfigError if part.kind == "tool" else DataError
        remedy = _REMEDIES["thought in content" if part.is_in_content else part.kind]
        raise refused(f"the model's chat template {problem} {part.what}: {remedy}")


def kind_of(messages: Sequence[Message]) -> Hashable:
    """Returns what a proof of a conversation depends on, apart from its texts: which messages with which keys, calls
    and types of arguments there are, after which roles, which of their texts are empty, and whether there are one or
    several of them."""
    kinds: Counter[Hashable] = Counter()
    before = None
    for message in messages:
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        calls = tuple((function["name"], _shape(function.get("arguments"))) for function in functions)
        thought, closing, answer = (message.get("content") or "").rpartition("</think>")
        texts = (thought.replace("<think>", ""), answer, *(message.get(key) for key in THINKING_KEYS))
        are_empty = tuple(not (isinstance(text, str) and text.strip()) for text in texts)
        kinds[before, message["role"], frozenset(message), are_empty, closing, calls] += 1
        before = message["role"]
    return frozenset((kind, min(number, 2)) for kind, number in kinds.items())


def _shape(value: Any) -> Hashable:
    if isinstance(value, Mapping):
        return tuple((name, _shape(part)) for name, part in value.items())
    return frozenset(map(_shape, value)) if isinstance(value, list | tuple) else (type(value), not value)


def _fault(
    render: _Render,
    messages: Sequence[Message],
    tools: Sequence[ToolSchema],
    plain: str,
    thoughts: Collection[int],
    *,
    only: int | None,
    place: _Place = "middle",
) -> tuple[str, _Part] | None:
    """Returns the first fault of the parts, or of the part number `only`: what the template does, and to which part. If
    marks stand at the start or end of texts, the text around them is not compared."""
    *marked, parts = _Marker(plain, only, place).conversation(messages, tools)
    if not parts:
        return None
    try:
        text = render(*marked)
    except DataError:
        # The template requires certain names or values.
        if only is not None and any(text in plain for text in _forms(parts[0])):
            return None
        return _MISSING, parts[0]
    for part in parts:
        times = text.count(part.mark)
        if times == 0 and part.kind == "thought" and part.turn not in thoughts:
            continue
        if times == 0:
            return _MISSING, part
        if times > part.most:
            return "repeats", part
        if part.value is None and place == "middle" and not _stands_in(text, part):
            return "changes", part
    changed = _first_difference(text, plain, {part.mark: part for part in parts})
    if changed is not None:
        return "shows differently, depending on its value,", changed
    misplaced = _first_misplaced(text, messages, parts)
    return None if misplaced is None else (_MISPLACED, misplaced)


def _first_misplaced(text: str, messages: Sequence[Message], parts: Sequence[_Part]) -> _Part | None:
    """Returns the first part that stands behind one of a later message or call. Templates may move system messages."""
    moved = ("system", "developer")
    shown = [part for part in parts if part.is_ordered and messages[part.turn]["role"] not in moved]
    for before, after in pairwise(sorted(shown, key=lambda part: text.index(part.mark))):
        is_swapped = before.kind == after.kind and shown.index(before) > shown.index(after)
        if before.turn > after.turn or is_swapped:
            return after
    return None


def _stands_in(text: str, part: _Part) -> bool:
    """Whether the two halves of a part stand around one of its marks, plain or escaped as in JSON or Python."""
    before, after = part.halves
    if part.is_trimmed:
        before, after = before.lstrip(), after.rstrip()
    return any(f"{write(before)}{part.mark}{write(after)}" in text for write in _WRITTEN)


def _first_difference(marked: str, plain: str, parts: Mapping[str, _Part]) -> _Part | None:
    """Compares the rendering with marks to the one without. Returns the part at whose mark they begin to differ."""
    place, latest = 0, next(iter(parts.values()))
    start = 0
    for match in [*_MARK.finditer(marked), None]:
        between = marked[start : match.start() if match else len(marked)]
        if not plain.startswith(between, place):
            return latest
        place += len(between)
        if match is None:
            return None if place == len(plain) else latest
        start = match.end()
        latest = parts[match.group()]
        if latest.value is not None:
            written = next((form for form in _written(latest.value[0]) if plain.startswith(form, place)), None)
            if written is None:
                return latest
            place += len(written)
    return None


def _written(value: Any) -> tuple[str, ...]:
    return json.dumps(value), str(value), str(value).lower()


def _forms(part: _Part) -> Sequence[str]:
    text = "".join(part.halves)
    return [write(text) for write in _WRITTEN] if part.value is None else _written(part.value[0])


class _Marker:
    """Puts marks into a copy of a conversation."""

    def __init__(self, plain: str, only: int | None = None, place: _Place = "middle") -> None:
        self._plain = plain
        self._only = only
        self._place: _Place = place
        self._numbers = count()
        self._parts: list[_Part] = []
        self._names: dict[str, str] = {}
        """The marked name of the latest call of each function, which its result repeats."""
        self._num_results = 0

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> tuple[list[Message], list[ToolSchema], list[_Part]]:
        """Returns copies of messages and tools with marks, and the marked parts."""
        self._num_results = sum(message["role"] == "tool" for message in messages)
        marked_tools = [self._tool(tool) for tool in tools]
        return [self._message(turn, message) for turn, message in enumerate(messages)], marked_tools, self._parts

    def _message(self, turn: int, message: Message) -> Message:
        marked, role = dict(message), message["role"]
        if role == "tool" and isinstance(message.get("name"), str):
            marked["name"] = self._names.get(message["name"], message["name"])
        where = f"message {turn + 1}"
        if isinstance(message.get("content"), str):
            marked["content"] = "".join(self._content(turn, role, message["content"]))
        for key in THINKING_KEYS:
            if isinstance(message.get(key), str):
                marked[key] = self._text(message[key], "thought", f"{key!r} of {where} ({role})", turn, trims=True)
        if calls := message.get("tool_calls"):
            marked["tool_calls"] = [self._call(call, turn, where) for call in calls]
        return marked

    def _content(self, turn: int, role: str, content: str) -> Iterator[str]:
        pieces = re.split(r"(</?think>)", content) if role == "assistant" else [content]
        for index, piece in enumerate(pieces):
            is_thought = piece != content and "</think>" in pieces[index:]
            if piece in THOUGHT_TAGS:
                yield piece
            else:
                what = f"the {'thinking' if is_thought else 'content'} of message {turn + 1} ({role})"
                kind = "thought" if is_thought else "message"
                yield self._text(piece, kind, what, turn, trims=True, is_in_content=is_thought)

    def _call(self, call: Mapping[str, Any], turn: int, where: str) -> Mapping[str, Any]:
        function = dict(call["function"])
        of = f"of the call {function['name']!r} in {where}"
        arguments = function.get("arguments")
        # Without arguments, only the number of its names shows that a call is repeated. A template may write two.
        most = _ANY if arguments else 2 * (1 + self._num_results)
        name = self._name(function["name"], "call", f"the name {of}", turn, most=most, is_ordered=True)
        self._names[function["name"]] = function["name"] = name
        if arguments is not None:
            function["arguments"] = self._value(arguments, of, turn, "the arguments")
        return {**call, "function": function}

    def _value(self, value: Any, of: str, turn: int, what: str) -> Any:
        if isinstance(value, Mapping):
            return {
                self._name(key, "call", f"the name of the argument {key!r} {of}", turn): self._value(
                    part, of, turn, f"the argument {key!r}"
                )
                for key, part in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._value(part, of, turn, what) for part in value]
        if isinstance(value, str):
            return self._text(value, "call", f"{what} {of}", turn)
        mark = f"73100{next(self._numbers):04d}0137"
        return int(mark) if self._add("call", f"{what} {of}", turn, mark=mark, value=(value,)) else value

    def _tool(self, tool: ToolSchema) -> ToolSchema:
        function = dict(tool["function"])
        of = f"the tool {function['name']!r}"
        function["name"] = self._name(function["name"], "tool", f"the name of {of}", -1, most=_ANY)
        if isinstance(function.get("description"), str):
            function["description"] = self._text(
                function["description"], "tool", f"the description of {of}", trims=True
            )
        if isinstance(function.get("parameters"), Mapping):
            function["parameters"] = self._schema(function["parameters"], of)
        return {**tool, "function": function}

    def _schema(self, schema: Any, of: str) -> Any:
        """Marks names and descriptions of parameters and the texts of enumerations, at any depth."""
        if isinstance(schema, list | tuple):
            return [self._schema(each, of) for each in schema]
        if not isinstance(schema, Mapping):
            return schema
        marked, names = dict(schema), {}
        if isinstance(schema.get("properties"), Mapping):
            names = {
                key: self._name(key, "tool", f"the parameter {key!r} of {of}", -1, most=_ANY)
                for key in schema["properties"]
            }
            marked["properties"] = {
                names[key]: self._schema(value, f"the parameter {key!r} of {of}")
                for key, value in schema["properties"].items()
            }
        if isinstance(schema.get("required"), list):
            marked["required"] = [names.get(key, key) for key in schema["required"]]
        if isinstance(schema.get("description"), str):
            marked["description"] = self._text(schema["description"], "tool", f"the description of {of}", trims=True)
        if isinstance(schema.get("enum"), list):
            marked["enum"] = [
                self._text(value, "tool", f"the value {value!r} of {of}") if isinstance(value, str) else value
                for value in schema["enum"]
            ]
        for key in ("items", "anyOf", "oneOf", "allOf", "additionalProperties"):
            if key in schema:
                marked[key] = self._schema(schema[key], of)
        return marked

    def _name(self, name: str, kind: Any, what: str, turn: int, *, most: int = 1, is_ordered: bool = False) -> str:
        # The mark stands at the end and begins with a character before all letters, so that names keep their order.
        mark = self._text_mark()
        is_marked = self._add(kind, what, turn, mark=mark, halves=(name, ""), most=most, is_ordered=is_ordered)
        return f"{name}{mark}" if is_marked else name

    def _text(
        self, text: str, kind: Any, what: str, turn: int = -1, *, trims: bool = False, is_in_content: bool = False
    ) -> str:
        if not text.strip():
            return text
        mark, middle = self._text_mark(), _place_in(text, self._place)
        halves = text[:middle], text[middle:]
        fields: dict[str, Any] = {"halves": halves, "is_trimmed": trims, "is_in_content": is_in_content}
        is_marked = self._add(kind, what, turn, mark=mark, is_ordered=kind == "message", **fields)
        return f"{halves[0]}{mark}{halves[1]}" if is_marked else text

    def _text_mark(self) -> str:
        return f"-q{next(self._numbers):04d}q"

    def _add(self, kind: Any, what: str, turn: int, *, mark: str, **fields: Any) -> bool:
        number = int(re.findall(r"\d{4}", mark.removeprefix("73100"))[0])
        if self._only not in (None, number) or mark in self._plain:
            return False
        self._parts.append(_Part(kind=kind, what=what, turn=turn, mark=mark, **fields))
        return True


def _place_in(text: str, place: _Place) -> int:
    """Returns a place in the middle of the text, behind its first or before its last character. It is neither within
    white space at an end nor, unless before the last character, within markup, which a template may look for."""
    first, end = len(text) - len(text.lstrip()), len(text.rstrip())
    if place == "end":
        return end - 1
    middle = (first + end + 1) // 2 if place == "middle" else first + 1
    inside = next((match for match in _MARKUP.finditer(text) if match.start() < middle < match.end()), None)
    return middle if inside is None else inside.end()
