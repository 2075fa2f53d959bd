"""Modules under the names that they had before: plug-ins built against an earlier version import them there.

An import of an old name works and warns (DeprecationWarning) with the new one. An entry goes with the version of
contracts that it belongs to: see `rl_core.interfaces.version`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "rl_core.hugging_face": "rl_core.rank_kit.expert_choices",
    "rl_core.model_files": "rl_core.rank_kit.model_files",
    "rl_core.model_shape": "rl_core.rank_kit.model_shapes",
    "rl_core.routes": "rl_core.rank_kit.route_checks",
    "rl_core.state_files": "rl_core.rank_kit.state_files",
    "rl_core.weights": "rl_core.rank_kit.weight_buckets",
    "rl_core.workers.objective": "rl_core.rank_kit.objectives",
    "rl_core.workers.schedule": "rl_core.rank_kit.learning_rates",
}


class _OldNames(MetaPathFinder):
    """Asked after all other finders: only for modules that are not there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, _Forwarding(MOVED[fullname])) if fullname in MOVED else None


class _Forwarding(Loader):
    def __init__(self, new_name: str):
        self._new_name = new_name

    def exec_module(self, module: ModuleType) -> None:
        warnings.warn(f"{module.__name__} has moved to {self._new_name}", DeprecationWarning, stacklevel=2)
        module.__getattr__ = partial(getattr, import_module(self._new_name))  # pyright: ignore[reportAttributeAccessIssue]


def install() -> None:
    """Makes old names importable in this process; a second call does nothing."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.append(_OldNames())
