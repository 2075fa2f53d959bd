"""Environments with tools, search, code and mathematics, and the sandbox that runs untrusted code.

A class is imported when it is first used. A recipe refers to any environment by the name of its entry point; `Judge` is
a part of environments.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_environments.code import CodeEnvironment
    from rl_environments.judge import Judge
    from rl_environments.mathematics import MathematicsEnvironment

_MODULES = {
    "CodeEnvironment": "rl_environments.code",
    "Judge": "rl_environments.judge",
    "MathematicsEnvironment": "rl_environments.mathematics",
}

__all__ = ["CodeEnvironment", "Judge", "MathematicsEnvironment"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
