"""Runs checks of a configuration so that one mistake is not reported as several: a check ends as soon as it uses the
value of a key that already has a mistake, or that is derived from one. To copy the value, for example into a spec, is
not a use."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Set
from functools import cache
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import attrs

from rl_core.config.loading import OF_PLUGINS
from rl_core.config.resolving import RULES, value_at
from rl_core.config.tree import Config
from rl_core.errors import Mistakes

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _UsesMistakeError(BaseException):
    """A check used a value that is a mistake. Not an Exception, so that no check catches it."""


def _end_check(*_: Any) -> Any:
    raise _UsesMistakeError


_NO_USES = (
    "__new__ __init__ __init_subclass__ __subclasshook__ __class__ __class_getitem__ __module__ __slots__ __doc__"
)
_USES = {name for kind in (int, float, str, tuple, dict, Path) for name in dir(kind) if name.startswith("__")}
_Mistaken = type("_Mistaken", (), dict.fromkeys(_USES.difference(_NO_USES.split()) | {"__call__"}, _end_check))
_MISTAKEN: Any = _Mistaken()
"""The value of every key that has a mistake, as checks see it. All that can be done with it is to copy it."""


def passes(
    mistakes: Mistakes,
    check: Callable[Concatenate[Config, _P], object],
    config: Config,
    *args: _P.args,
    **kwargs: _P.kwargs,
) -> bool:
    """Runs a check and records the errors that it raises or yields. Returns whether it ended without an error and
    without using a value that already is a mistake."""
    num_before = len(mistakes.errors)
    try:
        with mistakes.gathered():
            result = check(_guarded(config, mistakes, _derived(config, mistakes)), *args, **kwargs)
            mistakes.add(*(result if isinstance(result, Iterator) else ()))
            return len(mistakes.errors) == num_before
    except _UsesMistakeError:
        pass
    return False


def result_of(
    mistakes: Mistakes,
    check: Callable[Concatenate[Config, _P], _T],
    config: Config,
    *args: _P.args,
    **kwargs: _P.kwargs,
) -> _T | None:
    """Like `passes`, but returns what the check returns; None if it does not pass."""
    try:
        with mistakes.gathered():
            result = check(_guarded(config, mistakes, _derived(config, mistakes)), *args, **kwargs)
            return None if result is _MISTAKEN else result
    except _UsesMistakeError:
        pass
    return None


def _derived(config: Config, mistakes: Mistakes) -> Set[str]:
    """Keys that are not set and whose values are derived from keys that have a mistake."""
    keys: set[str] = set()
    for rule in RULES if mistakes else ():
        sources = re.findall(r"\w+(?:\.\w+)+", rule.text)
        is_mistaken = mistakes.about(*sources) or not keys.isdisjoint(sources)
        if is_mistaken and value_at(config, rule.key) == rule.value(config):
            keys.add(rule.key)
    return keys


def _guarded(record: _T, mistakes: Mistakes, derived: Set[str], section: str = "") -> _T:
    """A copy of a record of the configuration in which keys with a mistake, and keys in `derived`, have the value
    `_MISTAKEN`. It has the record's own class, methods and properties."""
    if not mistakes:
        return record
    copy = object.__new__(_guarding(type(record)))
    for field in attrs.fields(type(record)):
        object.__setattr__(copy, field.name, object.__getattribute__(record, field.name))
    object.__setattr__(copy, "_section", section)
    object.__setattr__(copy, "_mistakes", mistakes)
    object.__setattr__(copy, "_derived", derived)
    return copy


@cache
def _guarding(cls: type) -> Any:
    names = {field.name for field in attrs.fields(cls)}

    def read(self: Any, name: str) -> Any:
        if name == "__class__":
            return cls  # so that it equals a record of this class
        value = object.__getattribute__(self, name)
        if name not in names:
            return value
        section, mistakes = object.__getattribute__(self, "_section"), object.__getattribute__(self, "_mistakes")
        derived = object.__getattribute__(self, "_derived")
        path = f"{section}.{name}" if section else name
        if name in OF_PLUGINS:
            is_backends = name == "backend_sections"
            return {
                key: _guarded(options, mistakes, derived, f"{section}.{key}" if is_backends else section)
                if attrs.has(type(options))
                else options
                for key, options in value.items()
            }
        if attrs.has(type(value)):
            is_mistaken = any(error.key == path for error in mistakes.errors)
            return _MISTAKEN if is_mistaken else _guarded(value, mistakes, derived, path)
        return _MISTAKEN if path in derived or mistakes.about(path) else value

    return type(cls.__name__, (cls,), {"__slots__": ("_derived", "_mistakes", "_section"), "__getattribute__": read})
