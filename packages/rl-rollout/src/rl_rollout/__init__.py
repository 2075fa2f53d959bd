"""Inference engines, weight transports and generators.

This package exports the classes and functions of the engine `local`, the transport `files` and the generator
`environment`. Each name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_rollout.chat import TokenCodec, load_tokenizer
    from rl_rollout.episode import Limits
    from rl_rollout.generator import EnvironmentGenerator, Episodes, create_generator
    from rl_rollout.generator_options import EnvironmentGeneratorOptions
    from rl_rollout.local.engine import LocalEngine
    from rl_rollout.local.plugin import LocalEnginePlugin
    from rl_rollout.transports.files import FilesTransport

_MODULES = {
    "EnvironmentGenerator": "rl_rollout.generator",
    "EnvironmentGeneratorOptions": "rl_rollout.generator_options",
    "Episodes": "rl_rollout.generator",
    "FilesTransport": "rl_rollout.transports.files",
    "Limits": "rl_rollout.episode",
    "LocalEngine": "rl_rollout.local.engine",
    "LocalEnginePlugin": "rl_rollout.local.plugin",
    "TokenCodec": "rl_rollout.chat",
    "create_generator": "rl_rollout.generator",
    "load_tokenizer": "rl_rollout.chat",
}

__all__ = [
    "EnvironmentGenerator",
    "EnvironmentGeneratorOptions",
    "Episodes",
    "FilesTransport",
    "Limits",
    "LocalEngine",
    "LocalEnginePlugin",
    "TokenCodec",
    "create_generator",
    "load_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
