"""Works around faults of DeepSpeed. Each function says which fault, and when the function can be removed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch.optim import AdamW


def choose_accelerator() -> None:
    """Selects the CPU if there is no GPU; call before importing DeepSpeed, which would otherwise guess and warn. This
    function can go when DeepSpeed selects the CPU without a warning."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def keep_plain_gloo() -> None:
    """Without a GPU, prevents DeepSpeed from compiling its shared-memory all-reduce, which only inference uses.

    DeepSpeed 0.19.8 compiles it when ranks join (`deepspeed/comm/torch.py`, `build_shm_op`). This needs a compiler and
    takes minutes. If a rank is killed meanwhile, it leaves a lock that all later ranks wait for. This function can go
    when DeepSpeed compiles the all-reduce only on the first call.
    """
    backend: Any = import_module("deepspeed.comm.torch")

    if not callable(getattr(backend, "build_shm_op", None)):
        raise RuntimeError(
            "deepspeed.comm.torch has no build_shm_op: install deepspeed==0.19.8, or remove "
            "rl_deepspeed.fixes.keep_plain_gloo if this version no longer needs it"
        )
    if not torch.cuda.is_available():
        backend.build_shm_op = lambda: None


def expect_deprecated_calls() -> None:
    """Ignores torch 2.13's warnings about collectives that it has renamed, which DeepSpeed 0.19.8 calls by their old
    names. This function can go when DeepSpeed uses the new names."""
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)


@contextmanager
def offloading_torch_adamw() -> Iterator[None]:
    """Lets stage 3 offload the moments of torch's AdamW.

    DeepSpeed 0.19.8 accepts only its own FusedAdam, which needs CUDA's compiler. But offloading reads only `exp_avg`
    and `exp_avg_sq`, and both optimizers use these names. This function can go when DeepSpeed accepts torch's AdamW.
    """
    module: Any = import_module("deepspeed.ops.adam.fused_adam")
    own, module.FusedAdam = module.FusedAdam, AdamW
    try:
        yield
    finally:
        module.FusedAdam = own
