"""Training backend on Megatron-Core. This version reserves the package's place and registers nothing yet."""

from __future__ import annotations

__all__: list[str] = []
