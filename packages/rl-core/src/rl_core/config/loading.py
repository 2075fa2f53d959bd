"""Builds the frozen configuration classes from a tree of `Given` values. An unknown key or a wrong type is an error,
which names the key.

Fields and type hints of the classes determine what is accepted: bool, int, float (also from an int), str, None,
Literal, unions, lists, tuples, mappings and nested classes. Where a list or tuple of any length is accepted, a single
value becomes one with a single element. An int may be written with an exponent (`1e8`); outside the command line, such
an int must be at least a million. A str that YAML reads as a number or a bool needs no quotes on the command line
(`007`). For a section or a mapping, null is the same as an empty one. No other value is converted: `"3"` is not an int,
and `1` is not a bool.

A key with a mistake gets its default, and loading continues. Such a result is used only to find more mistakes.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs

from rl_core.config.layers import Given, plain
from rl_core.errors import ConfigError, Mistakes, nearest

_T = TypeVar("_T")
_MOST_LISTED = 20
"""An error lists the keys of a section that has at most this number of keys."""
OF_PLUGINS = ("backend_sections", "plugin_options")
"""Fields of the core's classes that contain the options of plug-ins."""


@attrs.frozen(kw_only=True)
class PluginKeys:
    """Functions that load the keys of plug-ins."""

    section_class: Callable[[str], type | None] = lambda section: None
    """Returns the options class of a `<backend>_config` section; `dict` if the section is kept unchecked; None if there
    is no such section."""
    load_options: Callable[[Any, Mapping[str, Any], str, Mistakes], Mapping[str, Any]] = (
        lambda section, keys, path, mistakes: {}
    )
    """Loads the plug-ins' keys of a section. Arguments: the section with the core's keys loaded, the other keys that
    were set in it, the section's path, and `mistakes`. Returns the options objects by plug-in."""
    paths: Callable[[], Sequence[str]] = tuple
    """Returns the path of every key that an installed plug-in declares in a section of the core."""


LEFT_OUT: Any = object()
"""Placeholder for a value that could not be loaded."""


def load_class(cls: type[_T], node: Any, path: str, plugins: PluginKeys, mistakes: Mistakes) -> _T:
    """An instance of the attrs class `cls` from a tree of `Given` leaves; `LEFT_OUT` if it cannot be built.

    Args:
        path: the key of `node`; empty for the whole configuration.
        mistakes: collects unknown keys and wrong values. If there are any, the instance must not be used to run.
    """
    if isinstance(node, Given):
        if node.value is None or node.value == {}:
            node = {}
        else:
            mistakes.add(_wrong(node, path, f"a section, e.g. {path}.{own_keys(cls)[0]}"))
            return LEFT_OUT
    values: dict[str, Any] = {}
    sections: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for key, child in node.items():
        child_path = f"{path}.{key}" if path else key
        if key in own_keys(cls):
            values[key] = _load(hints(cls)[key], child, child_path, plugins, mistakes)
        elif "plugin_options" in hints(cls):
            others[key] = child
        elif "backend_sections" in hints(cls) and (options_class := plugins.section_class(key)) is not None:
            sections[key] = _load(options_class, child, child_path, plugins, mistakes)
        else:
            mistakes.add(unknown_key(child, child_path, dict.fromkeys(own_keys(cls), ""), plugins.paths()))
    values = _without_left_out(values)
    if sections:
        values["backend_sections"] = _without_left_out(sections)
    if others and (built := _built(cls, values, path, mistakes)) is not LEFT_OUT:
        values["plugin_options"] = plugins.load_options(built, others, path, mistakes)
    return _built(cls, values, path, mistakes)


def _without_left_out(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not LEFT_OUT}


def _built(cls: type[_T], values: Mapping[str, Any], path: str, mistakes: Mistakes) -> _T:
    """The instance, or `LEFT_OUT`. A value that its validator refuses is left out, so that all other validators run."""
    values, has_refused = dict(values), False
    while True:
        try:
            return cls(**values)
        except ConfigError as error:  # raised by a validator, for one field
            mistakes.add(error.below(path))
            if values.pop(error.key or "", LEFT_OUT) is LEFT_OUT:
                return LEFT_OUT
            has_refused = True
        except (TypeError, ValueError) as error:  # a left-out value may have caused this error
            if not has_refused:
                mistakes.add(ConfigError(str(error), key=path))
            return LEFT_OUT


@cache
def hints(cls: type) -> dict[str, Any]:
    """Field name → type, in the order of the class."""
    resolved = get_type_hints(cls)
    return {field.name: resolved[field.name] for field in attrs.fields(cls)}


def own_keys(cls: type) -> list[str]:
    """The keys that a class declares itself, without those of plug-ins."""
    return [name for name in hints(cls) if name not in OF_PLUGINS]


def _load(hint: Any, node: Any, path: str, plugins: PluginKeys, mistakes: Mistakes) -> Any:
    if attrs.has(hint):
        return load_class(hint, node, path, plugins, mistakes)
    if _is_mapping(hint):
        value = plain(node)
        if value is None or isinstance(value, Mapping):
            return dict(value or {})
        mistakes.add(_wrong(node, path, "a section of keys"))
        return LEFT_OUT
    if not isinstance(node, Given):
        for key in node:
            mistakes.add(
                ConfigError(f"{path} is a single value ({describe(hint)}), not a section", key=f"{path}.{key}")
            )
        return LEFT_OUT
    return _leaf(hint, node, path, mistakes)


_MISMATCH = object()


def _leaf(hint: Any, given: Given, path: str, mistakes: Mistakes) -> Any:
    value = _fit(hint, given.value)
    if value is _MISMATCH and given.text is not None:
        value = _fit(hint, given.text)
    if value is _MISMATCH and _has_exponent(given):
        value = _fit(hint, int(given.value))
    if value is _MISMATCH:
        mistakes.add(_wrong(given, path, describe(hint)))
        return LEFT_OUT
    return value


def fitted(hint: Any, value: Any, path: str) -> Any:
    """`value` converted to the type of the hint. Raises ConfigError about `path` if it has another type."""
    try:
        fit = _fit(hint, value)
    except TypeError:  # a type that configurations do not have
        fit = _MISMATCH
    if fit is _MISMATCH:
        raise ConfigError(f"got {value!r}; expected {describe(hint)}", key=path)
    return fit


def _has_exponent(given: Given) -> bool:
    """Whether a whole number was written with an exponent, as in 1e8. The notation is known only for values from the
    command line; other floats of at least 1e6 are assumed to have an exponent."""
    if not isinstance(given.value, float) or not given.value.is_integer():
        return False
    return given.value >= 1e6 if given.text is None else "e" in given.text.lower()


def _fit(hint: Any, value: Any) -> Any:
    """`value` converted to the type of the hint, or `_MISMATCH`."""
    if hint is Any:
        return value
    if hint is None or hint is type(None):
        return None if value is None else _MISMATCH
    if hint is float:
        return _fit_float(value)
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


def _fit_float(value: Any) -> Any:
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:  # an integer above 1.8e308
        return _MISMATCH
    return _MISMATCH if math.isnan(number) else number


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
    """A type hint as readable text, for error messages and the reference page."""
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
        return ConfigError(f"got a section; expected {expected}", key=path)
    shown = "null" if given.value is None else repr(given.value)
    kind = "" if given.value is None else f"{type(given.value).__name__}, "
    if isinstance(given.value, float) and math.isnan(given.value):
        expected = expected.replace("float", "a finite number")
    close = nearest(given.value, expected.split(" | ")) if isinstance(given.value, str) else ""
    return ConfigError(f"got {shown} ({kind}{given.source}); expected {expected}.{close}", key=path)


def unknown_key(
    node: Any, path: str, siblings: Mapping[str, str], paths: Sequence[str], *, chosen: str = ""
) -> ConfigError:
    """The error for an unknown key.

    Args:
        siblings: known key of the section → remark that names the plug-in that declares the key; empty if this run
            reads the key.
        paths: keys of plug-ins, which are suggested in addition to the core's keys.
        chosen: the plug-in that is selected in the section, e.g. `backend=local`.
    """
    from rl_core.config.tree import Config

    section, _, key = path.rpartition(".")
    elsewhere = [known for known in (*known_paths(Config), *paths) if known.rpartition(".")[2] == key]
    close = difflib.get_close_matches(key.lower(), siblings, n=1)
    near = elsewhere or [f"{section}.{name}{siblings[name]}" if section else name for name in close]
    read = [name for name in siblings if not siblings[name]]
    has = ", ".join(read) if len(read) <= _MOST_LISTED else f"{len(read)} keys; rl config RECIPE lists them"
    remedy = f"Did you mean {' or '.join(near)}?" if near else f"{section or 'The top level'} has {has}."
    place = next(_leaves(node)).source + (f", with {chosen}" if chosen else "")
    return ConfigError(f"unknown key ({place}). {remedy}", key=path)


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
    for name in own_keys(cls):
        paths.append(f"{above}{name}")
        if attrs.has(hints(cls)[name]):
            paths += known_paths(hints(cls)[name], f"{above}{name}.")
    return tuple(paths)
