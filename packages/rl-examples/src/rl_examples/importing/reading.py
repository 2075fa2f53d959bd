"""Reads key-value pairs from a launch script or a YAML file of any trainer."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import yaml

from rl_core.config.yaml12 import Yaml12Loader
from rl_core.errors import ConfigError

_ASSIGNMENT = re.compile(r"^(?:export\s+|declare\s+(?:-\w+\s+)?|local\s+)?([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_DEFAULT = re.compile(r"""^:\s+"?\$\{(\w+):?=(.*?)\}"?\s*(?:#.*)?$""", re.DOTALL)
_ARRAY = re.compile(r"^[ \t]*(?:[a-z]+\s+(?:-a\s+)?)?(\w+)(\+?)=\((.*?)\)[ \t]*(?:#.*)?$", re.DOTALL | re.MULTILINE)
_WHOLE_ARRAY = re.compile(r""""?\$\{(\w+)\[[@*]\]\}"?""")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_KEY = re.compile(r"^(\+{0,2}|~)([A-Za-z_][\w-]*(?:[./@][\w-]+)*)(?:=(.*))?$", re.DOTALL)
_ALL_ARGUMENTS = ("$@", "$*", "${@}")


@attrs.frozen(kw_only=True)
class Read:
    """The key-value pairs that were read from a file."""

    module: str | None
    """The Python module that a script runs; None for a YAML file."""
    values: Mapping[str, Any]
    """Values, parsed as YAML, by key path. If a key is repeated, the last value counts."""
    remarks: tuple[str, ...] = ()
    """Descriptions of parts that could not be read; each begins with the part's place or key."""


def read(path: Path) -> Read:
    """Reads the pairs of a file: a YAML file if its name says so, else the Python command in a shell script.

    Raises ConfigError if the file cannot be read or contains no pairs.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    found = _yaml(text, str(path)) if path.suffix in (".yaml", ".yml") else script(text, str(path))
    if not found.values:
        raise ConfigError(f"{path}: expected a Python command with key=value words, or YAML keys; found neither")
    return found


def script(text: str, name: str) -> Read:
    """Reads the last Python command with `key=value` words in a script, and substitutes the script's variables."""
    variables, module, values, remarks = dict(_environment()), None, {}, []
    for line in _commands(_without_arrays(text)):
        for word in _assignments(line):
            if found := _DEFAULT.match(word):
                variables.setdefault(found[1], _unquoted(_expanded(found[2], variables)))
            elif found := _ASSIGNMENT.match(word):
                variables[found[1]] = _unquoted(_expanded(found[2], variables))
        try:
            words = shlex.split(_expanded(line, variables))
        except ValueError as error:
            remarks.append(f"{name}: {line[:60]!r} cannot be read as a command ({error})")
            continue
        pairs = dict(_pairs(words))
        if len(pairs) < 2 or not any("python" in word or word == "-m" or word.endswith(".py") for word in words):
            continue
        module, values = _module(words), pairs
    remarks += [
        f"{key}: ${word} has no value in the script" for key, value in values.items() for word in _unknown(value)
    ]
    return Read(module=module, values={key: _value(value) for key, value in values.items()}, remarks=tuple(remarks))


def _yaml(text: str, name: str) -> Read:
    try:
        content = yaml.load(text, Loader=Yaml12Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{name}: a configuration file holds `key: value` lines; this one does not")
    values = dict(_leaves(content, ""))
    package = re.search(r"^#\s*@package\s+([\w.]+)\s*$", text, re.MULTILINE)
    if package and package[1] not in ("_global_", "_group_"):
        values = {f"{package[1]}.{key}": value for key, value in values.items()}
    remarks = [
        f"{key}: is composed by Hydra; import the resolved file instead (--cfg job --resolve)" for key in _hydra(values)
    ]
    values = {key: value for key, value in values.items() if key not in _hydra(values)}
    return Read(module=None, values=values, remarks=tuple(remarks))


def _hydra(values: Mapping[str, Any]) -> list[str]:
    return [
        key
        for key, value in values.items()
        if key == "defaults" or (isinstance(value, str) and re.search(r"\$\{[^}]*\}", value))
    ]


def _leaves(node: Mapping[Any, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if str(key) in ("hydra", "_target_"):
            continue
        path = f"{above}{key}"
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _commands(text: str) -> Iterator[str]:
    """Yields the script's commands without comments. Lines that end with a backslash are joined with the next line,
    even if there is a comment between them."""
    whole = ""
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            continue
        whole += " " + stripped.removesuffix("\\")
        if not stripped.endswith("\\"):
            if whole.strip():
                yield whole.strip()
            whole = ""
    if whole.strip():
        yield whole.strip()


def _without_arrays(text: str) -> str:
    """Returns the script with each use of a whole array, `"${NAME[@]}"`, replaced by the elements in `NAME=(…)`."""
    arrays: dict[str, str] = {}

    def keep(found: re.Match[str]) -> str:
        before = arrays.get(found[1], "") if found[2] else ""
        lines = [line.strip().removesuffix("\\") for line in found[3].splitlines()]
        arrays[found[1]] = " ".join([before, *(line for line in lines if not line.startswith("#"))]).strip()
        return ""

    text = _ARRAY.sub(keep, text)
    for _ in range(3):  # arrays of arrays
        text = _WHOLE_ARRAY.sub(lambda found: arrays.get(found[1], found[0]), text)
    return text


def _assignments(line: str) -> list[str]:
    if _DEFAULT.match(line):
        return [line]
    if not _ASSIGNMENT.match(line):
        return []
    try:
        # The line may have several assignments, or an assignment before a command.
        words = shlex.split(line, posix=False)
    except ValueError:
        return [line]
    return [word for word in words if _ASSIGNMENT.match(word)] if len(words) > 1 else [line]


def _environment() -> Iterator[tuple[str, str]]:
    yield "HOME", os.environ.get("HOME", "~")


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        if name in variables:
            return variables[name]
        return found[2] if found[2] is not None else found[0]

    return _VARIABLE.sub(value, text)


def _unknown(value: str) -> list[str]:
    return [found[1] or found[3] for found in _VARIABLE.finditer(value)]


def _unquoted(text: str) -> str:
    text = text.strip().removesuffix(";")
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    started = False
    for word in words:
        started = started or word.endswith((".py",)) or "python" in word or word == "-m"
        found = _KEY.match(word)
        if started and found and found[3] is not None and found[1] != "~":
            yield found[2], found[3]


def _module(words: list[str]) -> str | None:
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    return next((word for word in words if word.endswith(".py")), None)


def _value(text: str) -> Any:
    try:
        return yaml.load(text, Loader=Yaml12Loader)
    except yaml.YAMLError:
        return text
