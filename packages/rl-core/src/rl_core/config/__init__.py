"""The configuration of a run: its classes, strict loading, overrides, derived values and checks. Importing this package
does not import torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.config.function_params import (
        advantage_params,
        asks_for_correction,
        correction_params,
        loss_params,
        needs_critic,
        needs_greedy_answers,
        needs_reference,
        objective_of,
    )
    from rl_core.config.layers import ConfigWarning, Given
    from rl_core.config.resolving import dump_yaml, resolve
    from rl_core.config.sources import Loaded, from_mapping, load, origins
    from rl_core.config.specs import engine_spec, generator_spec, needs_engine
    from rl_core.config.tree import AlgorithmConfig, Config
    from rl_core.config.value_checks import check_values

_MODULES = {
    "check_values": "value_checks",
    "origins": "sources",
    "Config": "tree",
    "AlgorithmConfig": "tree",
    "load": "sources",
    "from_mapping": "sources",
    "Loaded": "sources",
    "Given": "layers",
    "ConfigWarning": "layers",
    "resolve": "resolving",
    "dump_yaml": "resolving",
    "engine_spec": "specs",
    "generator_spec": "specs",
    "needs_engine": "specs",
    "correction_params": "function_params",
    "loss_params": "function_params",
    "advantage_params": "function_params",
    "asks_for_correction": "function_params",
    "needs_critic": "function_params",
    "needs_reference": "function_params",
    "objective_of": "function_params",
    "needs_greedy_answers": "function_params",
}
__all__ = [
    "check_values",
    "origins",
    "Config",
    "AlgorithmConfig",
    "load",
    "from_mapping",
    "Loaded",
    "Given",
    "ConfigWarning",
    "resolve",
    "dump_yaml",
    "engine_spec",
    "generator_spec",
    "needs_engine",
    "correction_params",
    "loss_params",
    "advantage_params",
    "asks_for_correction",
    "needs_critic",
    "needs_reference",
    "objective_of",
    "needs_greedy_answers",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
