"""Reads the columns of a row that change how the chat template renders it: `tools` and `chat_template_kwargs`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rl_core.errors import DataError
from rl_core.interfaces import Row, require_tools


def tools_of(row: Row) -> list[dict[str, Any]]:
    """Returns the function schemas in a row's column `tools`, which holds a list, the JSON text of one, or a list of
    JSON texts. Raises DataError if it holds anything else."""
    tools = _decoded(row, "tools")
    if isinstance(tools, list) and all(isinstance(tool, str) and tool.startswith("{") for tool in tools):
        tools = [_decoded({"tools": tool}, "tools") for tool in tools]
    return [] if tools is None else require_tools(tools, "the row's 'tools'")


def template_settings_of(row: Row) -> dict[str, Any]:
    """Returns the arguments for the chat template in a row's column `chat_template_kwargs`, a mapping or the JSON text
    of one. Raises DataError if it holds anything else."""
    settings = _decoded(row, "chat_template_kwargs")
    if settings is None:
        return {}
    if not isinstance(settings, Mapping) or not all(isinstance(name, str) for name in settings):
        raise DataError(
            "the row's 'chat_template_kwargs' must be a mapping such as {'enable_thinking': False}, got "
            f"{settings!r:.200}"
        )
    if "tools" in settings:
        raise DataError("the row's 'chat_template_kwargs' have 'tools'; write them into the column 'tools' instead")
    return {name: value for name, value in settings.items() if value is not None}


def _decoded(row: Row, name: str) -> Any:
    value = row.get(name)
    if isinstance(value, str):
        if not value:
            return None
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(f"the row's {name!r} are not JSON ({error}), got {value!r:.200}") from error
    return value
