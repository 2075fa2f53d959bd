"""Reads options of environments (`environment.options`) into each environment's own record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import attrs

from rl_core.errors import ConfigError, nearest

T = TypeVar("T")


def own_options(options: Mapping[str, Any], name: str, known: Sequence[str]) -> Mapping[str, Any]:
    """The options of one environment.

    A run with several environments gives all of them the same options. If these have a section with the environment's
    name, only that section is used; else all keys are.

    Raises:
        ConfigError: this environment does not have such an option.
    """
    section = options.get(name)
    has_section = isinstance(section, Mapping)
    given: Mapping[str, Any] = section if has_section else options
    place = f"environment.options.{name}" if has_section else "environment.options"
    for key in given:
        if key not in known:
            raise ConfigError(
                f"{place}.{key}: not an option of the environment {name!r} ({', '.join(known) or 'it has none'})."
                f"{nearest(str(key), known)} In a run with several environments write "
                f"environment.options.{name}.<option>"
            )
    return given


def options_of(record: type[T], name: str, options: Mapping[str, Any]) -> T:
    """The options of one environment as an instance of `record`; see `own_options`.

    Args:
        record: an attrs class; its validators begin their messages with the field's name.

    Raises:
        ConfigError: an unknown key or an invalid value; the message begins with the full key.
    """
    given = own_options(options, name, [field.name for field in attrs.fields(record)])
    try:
        return record(**given)
    except ConfigError as error:
        place = "environment.options" if given is options else f"environment.options.{name}"
        raise ConfigError(f"{place}.{error}") from error


def one_of(*choices: str) -> Any:
    """Validator of an attrs field: the value must be one of `choices`."""

    def require(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if value not in choices:
            raise ConfigError(f"{field.name}: got {value!r}; expected one of {', '.join(choices)}")

    return require


def is_number(kind: type[int] | type[float]) -> Any:
    """Validator of an attrs field: the value must be a number of this type, or None."""

    def require(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        fits = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
        if value is not None and not fits:
            raise ConfigError(f"{field.name}: got {value!r}; expected {'an integer' if kind is int else 'a number'}")

    return require


def whole_number(options: Mapping[str, Any], name: str, default: int) -> int:
    """An option that is a whole number of at least 1. Raises ConfigError."""
    value = options.get(name, default)
    if type(value) is not int or value < 1:
        raise ConfigError(f"environment.options.{name}: got {value!r}; expected a whole number of at least 1")
    return value


def seconds(options: Mapping[str, Any], name: str, default: float) -> float:
    """An option that is a time in seconds, above 0 and at most a day. Raises ConfigError."""
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 86400:
        raise ConfigError(f"environment.options.{name}: got {value!r}; expected seconds, above 0 and at most 86400")
    return float(value)


def text(options: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """An option that is text and not empty. Raises ConfigError."""
    value = options.get(name, default)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"environment.options.{name}: got {value!r}; expected text that is not empty")
    return value
