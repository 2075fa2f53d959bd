"""Reads from the signature of a loss or an estimator which columns and settings it takes: positional parameters are
columns, keyword-only parameters are settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rl_core.errors import ConfigError, nearest


def keyword_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """A function's keyword-only parameters: its settings."""
    parameters = inspect.signature(function).parameters
    return {name: parameter for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}


def positional_parameters(function: Callable[..., Any]) -> list[str]:
    """The names of a function's positional parameters, in order: the columns that it reads."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in inspect.signature(function).parameters.values() if parameter.kind in kinds]


def require_settings(
    function: Callable[..., Any], settings: Mapping[str, Any], name: str, *, key: str | None = None, remedy: str = ""
) -> None:
    """Raises ConfigError for an unknown setting or a missing required one.

    Args:
        name: the function's name, for the message.
        key: the configuration key that names the function.
        remedy: the end of the message for a missing setting; `{setting}` in it is replaced by the setting's name.
    """
    known = keyword_parameters(function)
    for setting in settings:
        if setting not in known:
            names = ", ".join(known) or "none"
            raise ConfigError(
                f"{name} has no keyword-only parameter {setting!r}; it has {names}.{nearest(setting, known)}", key=key
            )
    for setting, parameter in known.items():
        if parameter.default is parameter.empty and setting not in settings:
            raise ConfigError(f"{name} needs the parameter {setting!r}{remedy.format(setting=setting)}", key=key)
