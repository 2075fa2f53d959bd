"""Algorithms, data, contracts and the training loop of reinforcement learning post-training.

This module exports the names that most programs need, and imports each when it is first used. Further names
for users are in `rl_core.algorithms`, `rl_core.layout`, `rl_core.config` and `rl_core.plugins`. Authors of plug-ins
also need `rl_core.interfaces`, `rl_core.rank_kit` and `rl_core.testing`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.batch import Batch
    from rl_core.errors import RLError
    from rl_core.trainer.run import run_training
    from rl_core.workers.group import WorkerGroup

_MODULES = {
    "Batch": "rl_core.batch",
    "run_training": "rl_core.trainer.run",
    "WorkerGroup": "rl_core.workers.group",
    "RLError": "rl_core.errors",
}
__all__ = [
    "Batch",
    "run_training",
    "WorkerGroup",
    "RLError",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
