"""Options of environments (`environment.options`), read into a record of the environment's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import attrs

from rl_core.errors import ConfigError, nearest

T = TypeVar("T")


def options_of(record: type[T], name: str, options: Mapping[str, Any]) -> T:
    """The environment's options.

    A run with several environments gives all of them the same options. Where these have a section of the environment's
    name, that is read alone; else all keys are the environment's, and one that it does not know is an error.

    Args:
        record: an attrs class; its validators begin their messages with the field's name.

    Raises:
        ConfigError: an unknown key or a value that does not fit; it begins with the whole key.
    """
    own = options.get(name)
    place = f"environment.options.{name}" if isinstance(own, Mapping) else "environment.options"
    given: Mapping[str, Any] = own if isinstance(own, Mapping) else options
    known = [field.name for field in attrs.fields(record)]
    for key in given:
        if key not in known:
            raise ConfigError(
                f"{place}.{key}: not an option of the environment {name!r} ({', '.join(known)}).{nearest(key, known)} "
                f"In a run with several environments write environment.options.{name}.<option>"
            )
    try:
        return record(**given)
    except ConfigError as error:
        raise ConfigError(f"{place}.{error}") from error


def one_of(*choices: str) -> Any:
    """Validator of an attrs field: one of some words."""

    def require(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if value not in choices:
            raise ConfigError(f"{field.name}: got {value!r}; expected one of {', '.join(choices)}")

    return require


def is_number(kind: type[int] | type[float]) -> Any:
    """Validator of an attrs field: a number of this kind; None passes."""

    def require(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        fits = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
        if value is not None and not fits:
            raise ConfigError(f"{field.name}: got {value!r}; expected {'an integer' if kind is int else 'a number'}")

    return require
