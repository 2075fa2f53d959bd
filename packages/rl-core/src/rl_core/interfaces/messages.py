"""Chat messages and tools in the form that chat templates expect, and checks of both."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from rl_core.errors import DataError

Message = Mapping[str, Any]
"""A chat message: `role` (any role that the chat template supports, such as system, user, assistant, tool) and
`content` (text).

An assistant's message may have `tool_calls`, `[{"type": "function", "function": {"name": …, "arguments": {…}}}, …]`; it
then needs no content. A tool's message may have `name`, the name of the function, and `tool_call_id`, the call that it
answers. A key whose value is None counts as missing, because in a Parquet file all messages have the same keys."""
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


def require_messages(messages: object, what: str) -> Sequence[Message]:
    """Returns `messages` if they are chat messages. Raises DataError, whose message calls them `what`."""
    if not _is_list(messages) or not messages or not all(_has_role_and_content(message) for message in messages):
        raise DataError(f"{what} must be text or a list of messages with 'role' and 'content', got {messages!r:.200}")
    for message in messages:
        if problem := _problem_of_keys(message):
            raise DataError(f"{what} has a message {problem}, got {message!r:.200}")
    return messages


def require_tools(tools: object, what: str = "the environment's tools") -> Sequence[ToolSchema]:
    """Returns `tools` if they are function schemas with distinct names. Raises DataError, whose message calls them
    `what`."""
    example = "{'type': 'function', 'function': {'name': …, 'description': …, 'parameters': {…}}}"
    if not _is_list(tools) or not all(_is_tool(tool) for tool in tools):
        raise DataError(f"{what} must be a list of {example}, got {tools!r:.200}")
    try:
        json.dumps(list(tools), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"{what} cannot be written as JSON ({error}), got {tools!r:.200}") from error
    names = [tool["function"]["name"] for tool in tools]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise DataError(f"two of {what} have the name {repeated[0]!r}; rename one")
    return tools


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _has_role_and_content(message: object) -> bool:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    return isinstance(content, str) or (content is None and message.get("tool_calls") is not None)


def _problem_of_keys(message: Message) -> str | None:
    calls = message.get("tool_calls")
    if calls is not None and message["role"] != "assistant":
        return f"of role {message['role']!r} with 'tool_calls', which only an assistant's message may have"
    if calls is not None and not (_is_list(calls) and calls and all(_is_call(call) for call in calls)):
        return "whose 'tool_calls' are not a list of {'type': 'function', 'function': {'name': …, 'arguments': {…}}}"
    for key in ("name", "tool_call_id"):
        if not isinstance(message.get(key), str | None):
            return f"whose {key!r} is not text"
    return None


def _is_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    # Some templates expect arguments as JSON text.
    return _is_named(function) and isinstance(function.get("arguments"), Mapping | str)


def _is_tool(tool: object) -> bool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not _is_named(tool.get("function")):
        return False
    function = tool["function"]
    return isinstance(function.get("description"), str | None) and isinstance(
        function.get("parameters"), Mapping | None
    )


def _is_named(function: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(function, Mapping) and isinstance(function.get("name"), str) and bool(function["name"])
