"""Where callbacks import their base class from; the contract stands in `rl_core.interfaces`."""

from __future__ import annotations

from rl_core.interfaces import Callback, Control

__all__ = ["Callback", "Control"]
