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
    from rl_core.config.tree import Config
    from rl_core.errors import RLError
    from rl_core.interfaces import (
        Backend,
        EnginePlugin,
        Environment,
        Generator,
        InferenceClient,
        Recipe,
        Tracker,
        WeightTransport,
        Worker,
    )
    from rl_core.trainer.run import run_training
    from rl_core.workers.group import WorkerGroup

_MODULES = {
    "Batch": "rl_core.batch",
    "Config": "rl_core.config.tree",
    "run_training": "rl_core.trainer.run",
    "WorkerGroup": "rl_core.workers.group",
    "Backend": "rl_core.interfaces",
    "Worker": "rl_core.interfaces",
    "EnginePlugin": "rl_core.interfaces",
    "InferenceClient": "rl_core.interfaces",
    "WeightTransport": "rl_core.interfaces",
    "Generator": "rl_core.interfaces",
    "Environment": "rl_core.interfaces",
    "Tracker": "rl_core.interfaces",
    "Recipe": "rl_core.interfaces",
    "RLError": "rl_core.errors",
}
__all__ = [
    "Batch",
    "Config",
    "run_training",
    "WorkerGroup",
    "Backend",
    "Worker",
    "EnginePlugin",
    "InferenceClient",
    "WeightTransport",
    "Generator",
    "Environment",
    "Tracker",
    "Recipe",
    "RLError",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
