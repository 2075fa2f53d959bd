"""The controller's side of a model's ranks. It starts the ranks, plans and sends their work, and collects results."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.workers.group import MicroBatchLimits, WorkerGroup

_MODULES = {"MicroBatchLimits": "rl_core.workers.group", "WorkerGroup": "rl_core.workers.group"}
__all__ = ["MicroBatchLimits", "WorkerGroup"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
