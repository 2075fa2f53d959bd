"""Training backend on Megatron-Core: tensor, sequence, pipeline, context, expert and data parallelism."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_megatron.backend import MegatronBackend, megatron
    from rl_megatron.options import DdpOptions, LoraOptions, MegatronOptions
    from rl_megatron.rank.worker import MegatronWorker

_MODULES = {
    "DdpOptions": "rl_megatron.options",
    "LoraOptions": "rl_megatron.options",
    "MegatronBackend": "rl_megatron.backend",
    "MegatronOptions": "rl_megatron.options",
    "MegatronWorker": "rl_megatron.rank.worker",
    "megatron": "rl_megatron.backend",
}
__all__ = ["DdpOptions", "LoraOptions", "MegatronBackend", "MegatronOptions", "MegatronWorker", "megatron"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
