"""Megatron passes the suite that every backend must pass, on every kind of mesh that it offers."""

from __future__ import annotations

from rl_core.testing import VARIANTS, BackendConformance, Variant
from rl_megatron import MegatronOptions, megatron


class TestMegatron(BackendConformance):
    backend = megatron
    options = MegatronOptions()
    variants = VARIANTS
    preload = ("rl_megatron.worker",)
    timeout_s = 120.0
