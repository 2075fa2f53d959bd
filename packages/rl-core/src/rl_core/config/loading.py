"""From a tree of given values to the frozen classes, exactly: an unknown key or a wrong type is an error that names it.

Driven by the classes' fields and type hints: bool, int, float (an int will do), str, None, Literal, unions, tuples (one
value stands for a tuple of one), mappings and nested classes. Nothing is guessed: `"3"` is no int and `1` no bool.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs

from rl_core.config.layers import Given, plain
from rl_core.errors import ConfigError, nearest

_T = TypeVar("_T")
SectionClass = Callable[[str], type | None]
"""The options class of a `<backend>_config` section; `dict` keeps it raw; None: no such section."""


def load_class(cls: type[_T], node: Any, path: str, section_class: SectionClass) -> _T:
    """An instance of the attrs class `cls` from a tree of `Given` leaves; `path` is its key, empty for the whole."""
    if isinstance(node, Given):
        if node.value is None or node.value == {}:
            node = {}
        else:
            raise _wrong(node, path, f"a section, e.g. {path}.{next(iter(hints(cls)))}")
    values: dict[str, Any] = {}
    sections: dict[str, Any] = {}
    for key, child in node.items():
        child_path = f"{path}.{key}" if path else key
        if key in hints(cls) and key != "backend_sections":
            values[key] = _load(hints(cls)[key], child, child_path, section_class)
        elif "backend_sections" in hints(cls) and (options_class := section_class(key)) is not None:
            sections[key] = _load(options_class, child, child_path, section_class)
        else:
            raise _unknown(child, child_path, cls)
    if sections:
        values["backend_sections"] = sections
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


@cache
def hints(cls: type) -> dict[str, Any]:
    """Field name → type, in the order of the class."""
    resolved = get_type_hints(cls)
    return {field.name: resolved[field.name] for field in attrs.fields(cls)}


def _load(hint: Any, node: Any, path: str, section_class: SectionClass) -> Any:
    if attrs.has(hint):
        return load_class(hint, node, path, section_class)
    if _is_mapping(hint):
        value = plain(node)
        if value is None or isinstance(value, Mapping):
            return dict(value or {})
        raise _wrong(node, path, "a section of keys")
    if not isinstance(node, Given):
        first = next(iter(node))
        raise ConfigError(f"{path}.{first}: {path} is a single value ({describe(hint)}), not a section")
    return _leaf(hint, node, path)


_MISMATCH = object()


def _leaf(hint: Any, given: Given, path: str) -> Any:
    value = _fit(hint, given.value)
    if value is _MISMATCH and given.text is not None:
        value = _fit(hint, given.text)
    if value is _MISMATCH:
        raise _wrong(given, path, describe(hint))
    return value


def _fit(hint: Any, value: Any) -> Any:
    """`value` as the type hint wants it, or `_MISMATCH`."""
    if hint is Any:
        return value
    if hint is None or hint is type(None):
        return None if value is None else _MISMATCH
    if hint is float:
        is_number = type(value) in (int, float) and not math.isnan(value)
        return float(value) if is_number else _MISMATCH
    if hint in (bool, int, str):
        return value if type(value) is hint else _MISMATCH
    if hint is dict or _is_mapping(hint):
        return dict(value) if isinstance(value, Mapping) else _MISMATCH
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return next((arg for arg in args if type(arg) is type(value) and arg == value), _MISMATCH)
    if origin in (Union, types.UnionType):
        fits = (_fit(arg, value) for arg in args)
        return next((fit for fit in fits if fit is not _MISMATCH), _MISMATCH)
    if origin in (tuple, list):
        return _fit_sequence(origin, args, value)
    raise TypeError(f"a field of type {hint} cannot be loaded; use bool, int, float, str, Literal, tuple or Mapping")


def _fit_sequence(origin: type, args: tuple[Any, ...], value: Any) -> Any:
    is_open = origin is list or (len(args) == 2 and args[1] is Ellipsis)
    items = list(value) if isinstance(value, list | tuple) else [value] if is_open and value is not None else None
    if items is None or (not is_open and len(items) != len(args)):
        return _MISMATCH
    fitted = [_fit(arg, item) for arg, item in zip([args[0]] * len(items) if is_open else args, items, strict=True)]
    return _MISMATCH if any(item is _MISMATCH for item in fitted) else origin(fitted)


def _is_mapping(hint: Any) -> bool:
    return (get_origin(hint) or hint) in (dict, Mapping)


def describe(hint: Any) -> str:
    """A type hint in the words of an error message and of the reference page."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is None or hint is type(None):
        return "null"
    if origin is Literal:
        return " | ".join(str(arg) for arg in args)
    if origin in (Union, types.UnionType):
        return " | ".join(describe(arg) for arg in args)
    if origin is tuple and args[1:] != (Ellipsis,):
        return f"list of {len(args)} {describe(args[0])}"
    if origin in (tuple, list):
        return f"list of {describe(args[0])}"
    if _is_mapping(hint):
        return "mapping"
    return {bool: "true | false", int: "int", float: "float", str: "text", Any: "anything"}.get(hint, str(hint))


def _wrong(given: Any, path: str, expected: str) -> ConfigError:
    if not isinstance(given, Given):
        return ConfigError(f"{path}: a section is given; expected {expected}")
    kind = "null" if given.value is None else type(given.value).__name__
    shown = kind if given.value is None else f"{given.value!r} ({kind})"
    if isinstance(given.value, float) and math.isnan(given.value):
        expected = expected.replace("float", "a finite number")
    close = nearest(given.value, expected.split(" | ")) if isinstance(given.value, str) else ""
    return ConfigError(f"{path}: {shown} is given ({given.source}); expected {expected}.{close}")


def _unknown(node: Any, path: str, cls: type) -> ConfigError:
    from rl_core.config.tree import Config

    section, _, key = path.rpartition(".")
    siblings = [name for name in hints(cls) if name != "backend_sections"]
    elsewhere = [known for known in known_paths(Config) if known.rpartition(".")[2] == key]
    close = difflib.get_close_matches(key, siblings, n=1)
    near = elsewhere or [f"{section}.{name}" if section else name for name in close]
    remedy = (
        f"Did you mean {' or '.join(near)}?" if near else f"{section or 'The top level'} has {', '.join(siblings)}."
    )
    return ConfigError(f"{path}: unknown key ({next(_leaves(node)).source}). {remedy}")


def _leaves(node: Any) -> Iterator[Given]:
    if isinstance(node, Given):
        yield node
    else:
        for child in node.values():
            yield from _leaves(child)


@cache
def known_paths(cls: type, above: str = "") -> tuple[str, ...]:
    """The path of every key below `cls`, sections included."""
    paths: list[str] = []
    for name, hint in hints(cls).items():
        if name == "backend_sections":
            continue
        paths.append(f"{above}{name}")
        if attrs.has(hint):
            paths += known_paths(hint, f"{above}{name}.")
    return tuple(paths)
