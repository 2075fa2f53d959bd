"""What is changed in DeepSpeed itself, and until when."""

from __future__ import annotations

import os
import warnings
from importlib import import_module
from typing import Any

import torch


def choose_accelerator() -> None:
    """Before DeepSpeed is imported: without a GPU it is told so, where it would guess, with a warning."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def keep_plain_gloo() -> None:
    """On the CPU all-reduces inside one host go through gloo.

    DeepSpeed 0.19.8 compiles a shared-memory all-reduce when ranks meet (`deepspeed/comm/torch.py`, `build_shm_op`):
    it needs a compiler, takes minutes, and a rank that is killed meanwhile leaves a lock that all later ones wait for.
    Only inference uses it. This can go when DeepSpeed builds it where it is first called.
    """
    backend: Any = import_module("deepspeed.comm.torch")

    if not callable(getattr(backend, "build_shm_op", None)):
        raise RuntimeError("deepspeed.comm.torch.build_shm_op is gone: rl_deepspeed.fixes.keep_plain_gloo can go too")
    if not torch.cuda.is_available():
        backend.build_shm_op = lambda: None


def expect_deprecated_calls() -> None:
    """DeepSpeed 0.19.8 gathers by functions that torch 2.13 has new names for, and that warn in every call. This can go
    when it uses the new ones."""
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
