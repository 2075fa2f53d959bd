"""Training backend on PyTorch FSDP and Hugging Face models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_fsdp.backend import FsdpBackend, fsdp, fsdp1
    from rl_fsdp.options import FsdpOptions, MixedPrecision
    from rl_fsdp.worker import FsdpWorker

_MODULES = {
    "FsdpBackend": "rl_fsdp.backend",
    "FsdpOptions": "rl_fsdp.options",
    "FsdpWorker": "rl_fsdp.worker",
    "MixedPrecision": "rl_fsdp.options",
    "fsdp": "rl_fsdp.backend",
    "fsdp1": "rl_fsdp.backend",
}
__all__ = ["FsdpBackend", "FsdpOptions", "FsdpWorker", "MixedPrecision", "fsdp", "fsdp1"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
