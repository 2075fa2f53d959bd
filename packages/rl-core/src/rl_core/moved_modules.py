"""Old names of modules, for plug-ins built against an earlier version.

Importing an old name works and logs the new one. It does not raise a DeprecationWarning, so that plug-ins whose tests
treat warnings as errors still work. Remove an entry when the contract versions in which the old name was valid are no
longer accepted (`CONTRACTS`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

logger = logging.getLogger(__name__)

MOVED = {
    "rl_core.hugging_face": "rl_core.rank_kit.expert_choices",
    "rl_core.model_files": "rl_core.rank_kit.model_files",
    "rl_core.model_shape": "rl_core.rank_kit.model_shapes",
    "rl_core.routes": "rl_core.rank_kit.route_checks",
    "rl_core.state_files": "rl_core.rank_kit.state_files",
    "rl_core.trainer.callbacks": "rl_core.interfaces.runs",
    "rl_core.weights": "rl_core.rank_kit.weight_buckets",
    "rl_core.workers.objective": "rl_core.rank_kit.objectives",
    "rl_core.workers.schedule": "rl_core.rank_kit.learning_rates",
}


class _OldNames(MetaPathFinder):
    """The last finder of `sys.meta_path`. Python calls it only for modules that no other finder has found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, _Forwarding(MOVED[fullname])) if fullname in MOVED else None


class _Forwarding(Loader):
    def __init__(self, new_name: str):
        self._new_name = new_name

    def exec_module(self, module: ModuleType) -> None:
        logger.info("%s has moved to %s", module.__name__, self._new_name)
        module.__getattr__ = partial(getattr, import_module(self._new_name))  # pyright: ignore[reportAttributeAccessIssue]


def install() -> None:
    """Makes old names importable in this process; a second call does nothing."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.append(_OldNames())
