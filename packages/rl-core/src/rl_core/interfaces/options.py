"""Validators of the keys that a plug-in declares (`options_class`). Their errors have the same form as errors about the
core's keys.

An options class is a frozen attrs class whose fields are the keys. Users write them next to the core's keys in
`generator.inference_engine` or `generator`; they are loaded, shown and documented in the same way. Each field has a
default, a type that YAML can represent, and below it a docstring that explains the key. No field may have the name of a
core key. The key of a validator's ConfigError is the field's name, as in the validators below. The loader puts the
section in front of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs

from rl_core.errors import ConfigError


@attrs.frozen
class Bound:
    """Validator of an attrs field: the values for which `holds` is true; None passes."""

    expected: str
    """Describes these values, in messages and in the configuration reference."""
    holds: Callable[[Any], bool]

    def __call__(self, _: Any, field: attrs.Attribute[Any], value: Any) -> None:
        """Raises ConfigError, with the field's name as key, if the value is out of bounds."""
        if value is not None and not self.holds(value):
            shown = list(value) if isinstance(value, tuple) else value
            raise ConfigError(f"got {shown}; expected {self.expected}", key=field.name)


FINITE = Bound("a finite number", lambda value: value < math.inf)
_BOUNDS = "bounds"


def at_least(low: float) -> Bound:
    """A number of `low` or more."""
    return Bound(f"at least {low}", lambda value: value >= low)


def at_most(high: float) -> Bound:
    """A number of `high` or less."""
    return Bound(f"at most {high}", lambda value: value <= high)


def above(low: float) -> Bound:
    """A finite number above `low`."""
    return Bound(f"a finite number above {low}", lambda value: low < value < math.inf)


def between(low: float, high: float) -> Bound:
    """A number from `low` to `high`."""
    return Bound(f"between {low} and {high}", lambda value: low <= value <= high)


def bounded(default: Any, *bounds: Bound) -> Any:
    """A field of the core's configuration with bounds. Unlike attrs validators, they do not refuse the instance: the
    checks before a run look at the keys that the command reads."""
    return attrs.field(default=default, metadata={_BOUNDS: bounds})


def bounds_of(field: attrs.Attribute[Any]) -> tuple[Bound, ...]:
    """The bounds of a field, whether from `bounded` or its validator."""
    return field.metadata.get(_BOUNDS) or ((field.validator,) if isinstance(field.validator, Bound) else ())
