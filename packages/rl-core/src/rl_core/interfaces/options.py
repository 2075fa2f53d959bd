"""Options of plug-ins: who has some (`Configurable`), and validators whose errors read like those of any other key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import attrs

from rl_core.errors import ConfigError

Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]


@runtime_checkable
class Configurable(Protocol):
    """An engine or a generator with keys of its own, written beside the core's in `generator.inference_engine` or in
    `generator`, and loaded, shown and documented like those."""

    @property
    def options_class(self) -> type:
        """A frozen attrs class. Its fields are the keys: each has a default, a type that a file can hold, and its
        meaning as a text under it; none has the name of a key of the core.

        A validator that raises a ConfigError begins its message with the field's name, as the ones below do: the
        section is put in front of it.
        """
        ...


def at_least(low: float) -> Validator:
    """Validator of an attrs field: a number of `low` or more; None passes."""
    return _bound(lambda value: value >= low, f"at least {low}")


def above(low: float) -> Validator:
    """Validator of an attrs field: a number above `low`; None passes."""
    return _bound(lambda value: value > low, f"above {low}")


def between(low: float, high: float) -> Validator:
    """Validator of an attrs field: a number from `low` to `high`; None passes."""
    return _bound(lambda value: low <= value <= high, f"between {low} and {high}")


def _bound(holds: Callable[[Any], bool], expected: str) -> Validator:
    def require(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if value is not None and not holds(value):
            raise ConfigError(f"{field.name}: got {value}; expected {expected}")

    return require
