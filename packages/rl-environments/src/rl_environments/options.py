"""Selects an environment's options from `environment.options` and validates them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import attrs

from rl_core import plugins
from rl_core.errors import ConfigError, nearest

T = TypeVar("T")


class _Section(dict[str, Any]):
    """The options in an environment's own section of `environment.options`."""

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.name = name


def own_options(options: Mapping[str, Any], name: str, known: Sequence[str]) -> Mapping[str, Any]:
    """Returns the options that belong to one environment.

    All environments of a run receive the same `options`. If these contain a mapping under the environment's name, only
    that mapping is returned. Otherwise all options are returned, without the mappings under the names of other
    installed environments.

    Raises:
        ConfigError: an option is not in `known`, or an option of this environment is outside the environment's section,
            where the option would have no effect.
    """
    section = options.get(name)
    is_section = isinstance(section, Mapping)
    given = _Section(name, section) if is_section else _without_sections(options, known)
    for key in given:
        if key not in known:
            raise ConfigError(
                f"not an option of the environment {name!r} "
                f"({', '.join(known) or 'it has none'}).{nearest(str(key), known)} In a run with several environments "
                f"write environment.options.{name}.<option>",
                key=key_of(given, key),
            )
    if is_section and (outside := [key for key in options if key in known and key != name]):
        raise ConfigError(
            f"has no effect on the environment {name!r}, whose options are in the section environment.options.{name}; "
            f"write environment.options.{name}.{outside[0]}, or rename the option if it is another environment's",
            key=f"environment.options.{outside[0]}",
        )
    return given


def _without_sections(options: Mapping[str, Any], known: Sequence[str]) -> Mapping[str, Any]:
    sections = {key for key, value in options.items() if isinstance(value, Mapping) and key not in known}
    if sections:
        sections &= {plugin.name for plugin in plugins.installed("rl_core.environments")}
    return {key: value for key, value in options.items() if key not in sections} if sections else options


def key_of(options: Mapping[str, Any], name: str) -> str:
    """Returns the full key of an option, for messages. `options` is what `own_options` returned."""
    return f"{_section_of(options)}.{name}"


def _section_of(options: Mapping[str, Any]) -> str:
    return "environment.options" + (f".{options.name}" if isinstance(options, _Section) else "")


def options_of(record: type[T], name: str, options: Mapping[str, Any]) -> T:
    """Returns the options that belong to one environment (see `own_options`) as an instance of `record`.

    Args:
        record: an attrs class; its validators raise errors whose key is the field's name.

    Raises:
        ConfigError: a key is unknown or a value is invalid; the error has the full key.
    """
    given = own_options(options, name, [field.name for field in attrs.fields(record)])
    try:
        return record(**given)
    except ConfigError as error:
        raise error.below(_section_of(given)) from error


def one_of(*choices: str) -> Any:
    """Returns an attrs validator that accepts only the values in `choices`."""

    def require(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if value not in choices:
            raise ConfigError(f"got {value!r}; expected one of {', '.join(choices)}", key=field.name)

    return require


def is_number(kind: type[int] | type[float]) -> Any:
    """Returns an attrs validator that accepts numbers of type `kind`, but no booleans. The kind `float` includes
    integers. None is accepted if it is the field's default."""

    def require(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        fits = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
        if not fits and (value is not None or field.default is not None):
            raise ConfigError(f"got {value!r}; expected {'an integer' if kind is int else 'a number'}", key=field.name)

    return require


def whole_number(options: Mapping[str, Any], name: str, default: int) -> int:
    """Returns the option `name`. Raises ConfigError unless it is a whole number of at least 1."""
    value = options.get(name, default)
    if type(value) is not int or value < 1:
        raise ConfigError(f"got {value!r}; expected a whole number of at least 1", key=key_of(options, name))
    return value


def seconds(options: Mapping[str, Any], name: str, default: float) -> float:
    """Returns the option `name`, a time in seconds. Raises ConfigError unless it is above 0 and at most a day."""
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 86400:
        raise ConfigError(f"got {value!r}; expected seconds, above 0 and at most 86400", key=key_of(options, name))
    return float(value)


def number_up_to(options: Mapping[str, Any], name: str, default: float, *, highest: float) -> float:
    """Returns the option `name`. Raises ConfigError unless it is a number from 0 to `highest`."""
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= highest:
        raise ConfigError(f"got {value!r}; expected a number from 0 to {highest:g}", key=key_of(options, name))
    return float(value)


def text(options: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """Returns the option `name`. Raises ConfigError unless it is text and not empty."""
    value = options.get(name, default)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"got {value!r}; expected text that is not empty", key=key_of(options, name))
    return value
