"""The controller's side of many ranks: launch, plan, dispatch, collect."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.workers.group import MicroBatchLimits, WorkerGroup
    from rl_core.workers.objective import objective_from_spec
    from rl_core.workers.schedule import learning_rate, require_schedule

_MODULES = {
    "MicroBatchLimits": "rl_core.workers.group",
    "WorkerGroup": "rl_core.workers.group",
    "learning_rate": "rl_core.workers.schedule",
    "objective_from_spec": "rl_core.workers.objective",
    "require_schedule": "rl_core.workers.schedule",
}
__all__ = ["MicroBatchLimits", "WorkerGroup", "learning_rate", "objective_from_spec", "require_schedule"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
