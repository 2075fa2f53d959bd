"""Lets a policy call functions: derives their schemas, parses and runs calls, and has a base class for environments.

Begin with `ToolEnvironment` and `tool`. A name is imported from its module when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_environments.tools.call_formats import (
        BrokenCall,
        Call,
        CallFormat,
        ForcibleFormat,
        format_of_example,
        format_of_name,
    )
    from rl_environments.tools.calling import Answer, run_calls
    from rl_environments.tools.environment import ToolChoiceEnvironment, ToolEnvironment, tool
    from rl_environments.tools.functions import ToolFunction

_MODULES = {
    "Answer": "rl_environments.tools.calling",
    "BrokenCall": "rl_environments.tools.call_formats",
    "Call": "rl_environments.tools.call_formats",
    "CallFormat": "rl_environments.tools.call_formats",
    "ForcibleFormat": "rl_environments.tools.call_formats",
    "ToolChoiceEnvironment": "rl_environments.tools.environment",
    "ToolEnvironment": "rl_environments.tools.environment",
    "ToolFunction": "rl_environments.tools.functions",
    "format_of_example": "rl_environments.tools.call_formats",
    "format_of_name": "rl_environments.tools.call_formats",
    "run_calls": "rl_environments.tools.calling",
    "tool": "rl_environments.tools.environment",
}

__all__ = [
    "ToolEnvironment",
    "ToolChoiceEnvironment",
    "tool",
    "ToolFunction",
    "Call",
    "BrokenCall",
    "CallFormat",
    "ForcibleFormat",
    "format_of_example",
    "format_of_name",
    "Answer",
    "run_calls",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
