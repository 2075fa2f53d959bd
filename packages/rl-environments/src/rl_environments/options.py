"""What environments read from `environment.options`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_core.errors import DataError, nearest


def require_known(options: Mapping[str, Any], known: tuple[str, ...], environment: str) -> None:
    """Raises DataError for an option that this environment does not have."""
    for name in options:
        if name not in known:
            raise DataError(
                f"environment.options.{name}: {environment} has no such option; it has {', '.join(known) or 'none'}."
                f"{nearest(str(name), known)}"
            )


def whole_number(options: Mapping[str, Any], name: str, default: int) -> int:
    """An option that is a whole number of at least 1. Raises DataError."""
    value = options.get(name, default)
    if type(value) is not int or value < 1:
        raise DataError(f"environment.options.{name}: got {value!r}; expected a whole number of at least 1")
    return value


def seconds(options: Mapping[str, Any], name: str, default: float) -> float:
    """An option that is a time in seconds, above 0 and at most a day. Raises DataError."""
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 86400:
        raise DataError(f"environment.options.{name}: got {value!r}; expected seconds, above 0 and at most 86400")
    return float(value)


def text(options: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """An option that is text and not empty. Raises DataError."""
    value = options.get(name, default)
    if not isinstance(value, str) or not value:
        raise DataError(f"environment.options.{name}: got {value!r}; expected text")
    return value
