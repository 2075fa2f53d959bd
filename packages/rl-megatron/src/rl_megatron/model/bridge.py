"""Imports Megatron-Bridge, which converts Hugging Face models to Megatron's and back.

Bridge 0.3.1 imports Transformer Engine (in two of its LoRA modules) and triton (in a Mamba layer) whether or not they
are used. If Transformer Engine is not installed, a stand-in replaces it while Bridge is imported. If triton is missing
too, a second stand-in replaces triton. Flags that Megatron and Bridge set because of the stand-ins are reset
afterwards.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch

from rl_megatron.megatron_fields import require_bridge

HAS_TRANSFORMER_ENGINE = find_spec("transformer_engine") is not None
_TE_CLASSES = (
    "transformer_engine.pytorch.Linear",
    "transformer_engine.pytorch.LayerNormLinear",
    "transformer_engine.pytorch.GroupedLinear",
    "transformer_engine.pytorch.RMSNorm",
    "transformer_engine.pytorch.LayerNorm",
    "transformer_engine.pytorch.DotProductAttention",
    "transformer_engine.pytorch.ops.Sequential",
)
_CONCLUSIONS = (
    "megatron.bridge.peft.module_matcher.HAVE_TE_COL_LINEAR",
    "megatron.bridge.peft.module_matcher.HAVE_TE_LN_COL_LINEAR",
    "megatron.bridge.peft.module_matcher.HAVE_TE_ROW_LINEAR",
)
_IMPORTED_FIRST = (
    "accelerate",
    "datasets",
    "transformers.models.qwen3",
    "megatron.core.distributed",
    "megatron.core.models.common.embeddings.rope_utils",
    "megatron.core.models.gpt.experimental_attention_variant_module_specs",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.transformer.multi_latent_attention",
    "megatron.core.transformer.moe.moe_layer",
)
"""Modules that look for Transformer Engine or triton themselves. They are imported first, so that they do not find the
stand-ins."""


def _import_bridge() -> Any:
    require_bridge()
    with warnings.catch_warnings():
        # At import, the libraries warn only of other libraries that are not installed. This package reports those
        # itself, or does not need them.
        warnings.simplefilter("ignore")
        for name in _IMPORTED_FIRST:
            importlib.import_module(name)
        with contextlib.nullcontext() if HAS_TRANSFORMER_ENGINE else _stand_ins():
            bridge = importlib.import_module("megatron.bridge")
            importlib.import_module("megatron.bridge.peft.canonical_lora")
    if not HAS_TRANSFORMER_ENGINE:
        _take_conclusions_back()
    return bridge


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    modules = _transformer_engine()
    if find_spec("triton") is None:
        modules |= _triton()
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []
    return module


class _NeverBuilt(torch.nn.Module):
    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("Transformer Engine is not installed")


def _transformer_engine() -> dict[str, types.ModuleType]:
    engine: Any = _module("transformer_engine")
    layers: Any = _module("transformer_engine.pytorch")
    engine.pytorch, engine.__version__, layers.ops = layers, "0.0.0", types.SimpleNamespace()
    for path in _TE_CLASSES:
        owner, _, name = path.rpartition(".")
        setattr(layers.ops if owner.endswith(".ops") else layers, name, type(name, (_NeverBuilt,), {}))
    return {"transformer_engine": engine, "transformer_engine.pytorch": layers}


class _Anything(types.ModuleType):
    """A module in which every name that does not begin with `__` is a decorator that returns the function unchanged.
    The decorator may be called with or without arguments."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _decorate


def _decorate(*args: Any, **_kwargs: Any) -> Any:
    return args[0] if len(args) == 1 and callable(args[0]) else _decorate


def _triton() -> dict[str, types.ModuleType]:
    triton, language = (_Anything(name) for name in ("triton", "triton.language"))
    for module in (triton, language):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        module.__path__ = []
    vars(triton).update(language=language, __version__="3.6.0")
    return {"triton": triton, "triton.language": language}


def _take_conclusions_back() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and getattr(module, "HAVE_TE", False) is True:
            vars(module)["HAVE_TE"] = False
    for path in _CONCLUSIONS:
        matcher, _, name = path.rpartition(".")
        if not hasattr(sys.modules[matcher], name):
            raise RuntimeError(f"{matcher} has no {name}: install megatron-bridge==0.3.1")
        setattr(sys.modules[matcher], name, False)


_bridge = _import_bridge()
AutoBridge = _bridge.AutoBridge
LoRA = _bridge.peft.lora.LoRA
CanonicalLoRA = _bridge.peft.canonical_lora.CanonicalLoRA
get_module_and_param_from_name = importlib.import_module(
    "megatron.bridge.models.conversion.utils"
).get_module_and_param_from_name
