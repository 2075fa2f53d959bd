"""The FSDP backend passes the suite that every backend must pass."""

from __future__ import annotations

from rl_core.testing.backend import BackendConformance
from rl_fsdp import FsdpOptions, fsdp


class TestFsdp(BackendConformance):
    backend = fsdp
    options = FsdpOptions()
