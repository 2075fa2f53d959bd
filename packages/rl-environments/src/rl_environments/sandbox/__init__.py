"""Runs untrusted Python programs in a sandbox: either bubblewrap, or Landlock together with a separate user.

A name is imported from its module when it is first used, because the sandbox's interpreter also imports this package
and need not have attrs installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_environments.sandbox.limits import ProgramLimits, ProgramOutcome, SandboxError, Test
    from rl_environments.sandbox.probing import escapes, probe_sandbox, shared_sandbox
    from rl_environments.sandbox.sandbox import Sandbox, Session

_MODULES = {
    "ProgramLimits": "rl_environments.sandbox.limits",
    "ProgramOutcome": "rl_environments.sandbox.limits",
    "Sandbox": "rl_environments.sandbox.sandbox",
    "SandboxError": "rl_environments.sandbox.limits",
    "Session": "rl_environments.sandbox.sandbox",
    "Test": "rl_environments.sandbox.limits",
    "escapes": "rl_environments.sandbox.probing",
    "probe_sandbox": "rl_environments.sandbox.probing",
    "shared_sandbox": "rl_environments.sandbox.probing",
}

__all__ = [
    "ProgramLimits",
    "ProgramOutcome",
    "Sandbox",
    "SandboxError",
    "Session",
    "Test",
    "escapes",
    "probe_sandbox",
    "shared_sandbox",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
