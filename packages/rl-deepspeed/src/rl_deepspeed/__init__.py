"""Training backend on DeepSpeed's ZeRO and Hugging Face models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_deepspeed.backend import DeepSpeedBackend, deepspeed
    from rl_deepspeed.options import DeepSpeedOptions, OffloadOptimizer, OffloadParam, ZeroOptimization
    from rl_deepspeed.worker import DeepSpeedWorker

_MODULES = {
    "DeepSpeedBackend": "rl_deepspeed.backend",
    "DeepSpeedOptions": "rl_deepspeed.options",
    "DeepSpeedWorker": "rl_deepspeed.worker",
    "OffloadOptimizer": "rl_deepspeed.options",
    "OffloadParam": "rl_deepspeed.options",
    "ZeroOptimization": "rl_deepspeed.options",
    "deepspeed": "rl_deepspeed.backend",
}
__all__ = [
    "DeepSpeedBackend",
    "DeepSpeedOptions",
    "DeepSpeedWorker",
    "OffloadOptimizer",
    "OffloadParam",
    "ZeroOptimization",
    "deepspeed",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
