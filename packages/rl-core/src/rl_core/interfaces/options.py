"""The contract of plug-ins that declare configuration keys (`Configurable`), and validators for these keys. The
validators' errors have the same form as errors about the core's keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import attrs

from rl_core.errors import ConfigError

Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]


@runtime_checkable
class Configurable(Protocol):
    """An engine or generator that declares keys. Users write them next to the core's keys in
    `generator.inference_engine` or `generator`; they are loaded, shown and documented in the same way."""

    @property
    def options_class(self) -> type:
        """A frozen attrs class whose fields are the keys. Each field has a default, a type that YAML can represent, and
        below it a docstring that explains the key. No field may have the name of a core key.

        The key of a validator's ConfigError is the field's name, as in the validators below. The loader puts the
        section in front of it.
        """
        ...


def at_least(low: float) -> Validator:
    """Validator of an attrs field: a number of `low` or more; None passes."""
    return _bound(lambda value: value >= low, f"at least {low}")


def above(low: float) -> Validator:
    """Validator of an attrs field: a finite number above `low`; None passes."""
    return attrs.validators.and_(
        _bound(lambda value: value > low, f"above {low}"), _bound(lambda value: value < math.inf, "a finite number")
    )


def between(low: float, high: float) -> Validator:
    """Validator of an attrs field: a number from `low` to `high`; None passes."""
    return _bound(lambda value: low <= value <= high, f"between {low} and {high}")


def _bound(holds: Callable[[Any], bool], expected: str) -> Validator:
    def require(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if value is not None and not holds(value):
            raise ConfigError(f"got {value}; expected {expected}", key=field.name)

    return require
