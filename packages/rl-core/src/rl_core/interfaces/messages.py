"""Chat messages and tools in one normal form, and checks of both.

Data sets write the same conversation in several ways: with keys that are null, with arguments as JSON text, with
content in parts. `require_messages` and `require_tools` convert them to one form, which the rest of the code compares
and renders."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, TypeGuard

from rl_core.errors import DataError

Message = Mapping[str, Any]
"""A chat message: `role` (any role that the chat template supports, such as system, user, assistant, tool) and
`content` (text).

An assistant's message may have `tool_calls`, `[{"type": "function", "function": {"name": …, "arguments": {…}}}, …]`; it
then needs no content. A tool's message may have `name`, the name of the function, and `tool_call_id`, the call that it
answers. `require_messages` describes which other forms are accepted."""
Prompt = str | Sequence[Message]
"""Text that is used unchanged, or chat messages that the model's chat template converts to text."""
ToolSchema = Mapping[str, Any]
"""A function that the model may call, in the form of the argument `tools` of chat templates:
`{"type": "function", "function": {"name": …, "description": …, "parameters": <JSON schema of an object>}}`."""
EXAMPLE_CALL: Mapping[str, Any] = {
    "type": "function",
    "id": "call00001",
    "function": {"name": "look_up", "arguments": {"word": "example"}},
}
"""A call that the chat template renders to show the format of calls (`Action.example_call`)."""


_PLAIN_TYPES = {str, int, float, bool, type(None)}
_LIST_OF_MESSAGES = re.compile(r"\s*\[\s*\{\s*([\"'])(role|content|from|value)\1\s*:")
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


def require_messages(messages: object, what: str) -> list[dict[str, Any]]:
    """Returns chat messages in normal form, as new lists and dictionaries.

    - NumPy and Arrow values and tuples become Python's own values.
    - A key whose value is None is missing, in a message, a call and a call's function. None within the arguments of a
      call is data.
    - Text becomes the list of messages that it holds as JSON, and a single message a list.
    - ShareGPT's `from` and `value` become `role` and `content`, with the roles of `_SHAREGPT_ROLES`; a `function_call`
      becomes a call.
    - Content in parts of text becomes one text, without separators. A message with calls and no content has content "".
    - A call without `function` around its name and arguments gets it.
    - Arguments given as JSON text, as OpenAI writes them, become a mapping; missing or empty arguments become `{}`.
    - OpenAI's former `function_call` becomes a call, and its role `function` becomes `tool`; an empty list of calls is
      removed.

    Raises DataError, whose message calls the messages `what`, if they are not chat messages.
    """
    plain = _plain(decoded_messages(messages, what))
    if isinstance(plain, dict) and plain:
        plain = [plain]
    if not isinstance(plain, list) or not plain or not all(isinstance(message, dict) for message in plain):
        forms = (
            "a list of messages, or its JSON text,"
            if isinstance(plain, str) and plain
            else "text or a list of messages"
        )
        raise DataError(f"{what} must be {forms} with 'role' and 'content', got {messages!r:.200}")
    return [_normal_message(message, what) for message in plain]


def decoded_messages(value: Any, what: str) -> Any:
    """Returns the JSON value in a text that seems to be a list of messages, as in a CSV file that was written from
    messages; other values unchanged. Raises DataError, whose message calls the text `what`, if it is no JSON, such as
    the notation of Python that pandas writes into CSV files."""
    if not isinstance(value, str) or not value.endswith(("]", "]\n")) or _LIST_OF_MESSAGES.match(value) is None:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{what} is text that looks like a list of messages, but is not JSON ({error}), got {value!r:.200}; write "
            "the messages with json.dumps"
        ) from error


def require_tools(tools: object, what: str = "the environment's tools") -> list[dict[str, Any]]:
    """Returns function schemas in normal form: with Python's own values, and without the keys of a tool and of its
    function that are None. Raises DataError, whose message calls them `what`, if they are not function schemas with
    distinct names."""
    example = "{'type': 'function', 'function': {'name': …, 'description': …, 'parameters': {…}}}"
    plain = _plain(tools)
    tools = (
        [_given_tool(tool) if isinstance(tool, dict) else tool for tool in plain] if isinstance(plain, list) else tools
    )
    if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools):
        raise DataError(f"{what} must be a list of {example}, got {tools!r:.200}")
    try:
        json.dumps(tools, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"{what} cannot be written as JSON ({error}), got {tools!r:.200}") from error
    names = [tool["function"]["name"] for tool in tools]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise DataError(f"two of {what} have the name {repeated[0]!r}; rename one")
    return tools


def split_pair(chosen: Any, rejected: Any) -> tuple[Prompt, Any, Any]:
    """Splits two texts or two conversations into their common beginning, which is the prompt, and the two responses, as
    TRL's `extract_prompt` does: a space between prompt and responses belongs to the responses.

    Raises:
        DataError: the two are equal, one is the beginning of the other, or they have no common beginning.
    """
    if not (isinstance(chosen, str) and isinstance(rejected, str)):
        chosen, rejected = require_messages(chosen, "'chosen'"), require_messages(rejected, "'rejected'")
    size = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    if size == min(len(chosen), len(rejected)):
        if len(chosen) == len(rejected):
            raise DataError(
                "'chosen' and 'rejected' are the same, so no prompt with two responses can be found in them; remove "
                "the row, or set data.on_refused_row=drop"
            )
        raise DataError(
            "'chosen' and 'rejected' differ only in length: one begins with all the other, so no prompt with two "
            "responses can be found in them; remove the row, set data.on_refused_row=drop, or write the prompt into a "
            "column 'prompt' only"
        )
    if isinstance(chosen, str) and chosen[:size].endswith(" "):
        size -= 1
    if not size:
        raise DataError(
            "'chosen' and 'rejected' begin differently; begin both with the prompt, or add a column 'prompt'"
        )
    return chosen[:size], chosen[size:], rejected[size:]


def _plain(value: Any) -> Any:
    """Converts NumPy's and Arrow's values and tuples, at any depth."""
    if type(value) in _PLAIN_TYPES:  # Nearly all values are; checking these first halves the time.
        return value
    if type(value) is dict:
        return {key: _plain(part) for key, part in value.items()}
    convert = getattr(value, "as_py", None) or getattr(value, "tolist", None)
    if callable(convert):
        value = convert()
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(part) for part in value]
    return value


def _given(named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message, call or tool without keys whose value is None: in a Parquet file all have the same keys."""
    found = {key: value for key, value in named.items() if value is not None}
    if isinstance(found.get("function"), dict):
        found["function"] = {key: value for key, value in found["function"].items() if value is not None}
    return found


def _given_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool without keys that are None. A function without the mapping around it, as in OpenAI's former
    `functions`, gets it."""
    if "function" not in tool and isinstance(tool.get("parameters"), dict):
        tool = {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
    return _given(tool)


def _normal_message(given: Mapping[str, Any], what: str) -> dict[str, Any]:
    def refused(problem: str) -> DataError:
        return DataError(f"{what} has a message {problem}, got {given!r:.200}")

    message = _given(given)
    if "from" in message and "value" in message and message.keys().isdisjoint(("role", "content")):
        message = _of_sharegpt(message, refused)
    if message.get("tool_calls") == []:
        del message["tool_calls"]
    if "function_call" in message:
        if "tool_calls" in message:
            raise refused("with both 'function_call' and 'tool_calls'")
        message["tool_calls"] = [{"function": message.pop("function_call")}]
    role, calls = message.get("role"), message.get("tool_calls")
    if not isinstance(role, str) or (calls is None and "content" not in message):
        raise DataError(f"{what} must be text or a list of messages with 'role' and 'content', got {given!r:.200}")
    if calls is not None and role != "assistant":
        raise refused(f"of role {role!r} with 'tool_calls', which only an assistant's message may have")
    if calls is not None:
        message["tool_calls"] = [_normal_call(call, refused) for call in calls] if isinstance(calls, list) else []
        message.setdefault("content", "")
    if message.get("tool_calls") == []:
        raise refused("whose 'tool_calls' are not a list of {'type': 'function', 'function': {'name': …, …}}")
    message["role"] = "tool" if role == "function" else role
    message["content"] = _text(message.get("content"), refused)
    for key in ("name", "tool_call_id"):
        if not isinstance(message.get(key), str | None):
            raise refused(f"whose {key!r} is not text")
    return message


def _of_sharegpt(message: Mapping[str, Any], refused: Callable[[str], DataError]) -> dict[str, Any]:
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    source, value = message["from"], message["value"]
    if source == "function_call":
        calls = None
        if isinstance(value, str):
            with contextlib.suppress(ValueError, RecursionError):
                calls = json.loads(value, parse_constant=_no_number)
        calls = calls if isinstance(calls, list) else [calls]
        if not all(map(_is_named, calls)):
            raise refused('from \'function_call\' whose value is not JSON such as {"name": …, "arguments": {…}}')
        return {**rest, "role": "assistant", "tool_calls": [{"function": call} for call in calls]}
    if source not in _SHAREGPT_ROLES:
        raise refused(f"from {source!r}; expected {', '.join(_SHAREGPT_ROLES)} or function_call")
    return {**rest, "role": _SHAREGPT_ROLES[source], "content": value}


def _text(content: Any, refused: Callable[[str], DataError]) -> str:
    """Returns content as one text. Templates that read parts write them without separators, so they are joined so."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise refused("whose 'content' is not text")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise refused(
                f"with a content part of type {kind!r}; only text is supported: text, or parts {{'type': 'text', "
                "'text': …}"
            )
    return "".join(part["text"] for part in content)


def _normal_call(given: Any, refused: Callable[[str], DataError]) -> dict[str, Any]:
    call = _given(given) if isinstance(given, dict) else {}
    if "function" not in call and {"name", "arguments"} <= call.keys():  # as chat templates and models write it
        call["function"] = {key: call.pop(key) for key in ("name", "arguments")}
    function = call.get("function")
    if not _is_named(function):
        raise refused(
            "whose 'tool_calls' are not a list of {'type': 'function', 'function': {'name': …, 'arguments': {…}}}"
        )
    arguments = function.get("arguments", "")
    if arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments, parse_constant=_no_number)
    if not isinstance(arguments, dict):
        raise refused(f"whose call of {function['name']!r} has arguments that are not a JSON object")
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _is_tool(tool: object) -> bool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not _is_named(tool.get("function")):
        return False
    function = tool["function"]
    return isinstance(function.get("description"), str | None) and isinstance(
        function.get("parameters"), Mapping | None
    )


def _is_named(function: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(function, Mapping) and isinstance(function.get("name"), str) and bool(function["name"])
