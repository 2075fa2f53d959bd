"""Reads key-value pairs from a launch script or a YAML file of any trainer."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import attrs
import yaml

from rl_core.config.yaml12 import Yaml12Loader
from rl_core.errors import ConfigError
from rl_examples.importing.shell import DECLARING, Branches, expanded, set_in_branches, unexpanded, unquoted, words

_ASSIGNMENT = re.compile(rf"^(?:(?:{DECLARING})\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
_DEFAULT = re.compile(r"""^:\s+"?\$\{(\w+)(:?)=(.*?)\}"?\s*(?:#.*)?$""", re.DOTALL)
_ARRAY = re.compile(r"^[ \t]*(?:[a-z]+\s+(?:-a\s+)?)?(\w+)(\+?)=\((.*?)\)[ \t]*(?:#.*)?$", re.DOTALL | re.MULTILINE)
_ARRAY_SET = re.compile(r"(?:^|[\s;&|])(\w+)(\+?)=\((.*)\)\s*(?:[;#].*)?$")
_WHOLE_ARRAY = re.compile(r""""?\$\{(\w+)\[[@*]\]\}"?""")
_USED = re.compile(r"\$\{?([A-Za-z_]\w*)")
_KEY = re.compile(r"^(\+{0,2}|~)([A-Za-z_][\w-]*(?:[./@][\w-]+)*)(?:=(.*))?$", re.DOTALL)
_MAY_SET_KEYS = re.compile(r"python|\.py\b|\s-m\s|\w\.\w+=")
_NO_VALUE = re.compile(r"^[-$]|^[\d&]*[<>]|.*=", re.DOTALL)
"""Matches words that cannot be the next word of an unquoted value: options, `$@`, redirections and `key=value`."""
_OPERATOR = re.compile(r"^[|&;]+$")
_HYDRA_FILE = re.compile(r"^(?:--config-(?:name|path|dir)|-cn|-cp|-cd)(?:=|$)")


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
        reasons = "".join(f"\n{remark}" for remark in found.remarks)
        raise ConfigError(
            f"{path}: expected a Python command with key=value words, or YAML keys; found neither{reasons}"
        )
    return found


def script(text: str, name: str) -> Read:
    """Reads a script's last Python command with several `key=value` words, else its first command with one such word.

    Substitutes the script's variables. Variables that the script does not set are read from the environment, as bash
    does.
    """
    variables, arrays = dict(os.environ), {}
    branches, followed = Branches(), []
    found, unread = Read(module=None, values={}), []
    for command in _commands(_with_arrays_on_one_line(text)):
        line = branches.followed(command, variables)
        if line is None:
            continue
        followed.append(line)
        used = sorted(set_in_branches(followed) & set(_USED.findall(line)) & {*variables, *arrays})
        line = _WHOLE_ARRAY.sub(lambda array: arrays.get(array[1], array[0]), line)
        _assign(line, variables, arrays)
        try:
            all_words = _of_the_shell(_unquoted_words(expanded(line, variables)))
        except ValueError as error:
            if _MAY_SET_KEYS.search(line):
                unread.append(f"{name}: {line[:60]!r} cannot be read as a command ({error})")
            continue
        uncertain = [
            f"{each}: is set in a branch or a loop, and {(variables | arrays)[each]!r} was used; check the keys that "
            f"use {each}"
            for each in used
        ]
        for arguments in _python_commands(all_words):
            read_here = _arguments_read(arguments, name)
            # A command with a single pair may be a small helper script, so it does not replace an earlier command.
            if len(dict(_pairs(arguments))) > 1 or not found.values:
                found = attrs.evolve(read_here, remarks=(*uncertain, *read_here.remarks))
    return attrs.evolve(found, remarks=(*unread, *found.remarks))


def _assign(line: str, variables: dict[str, str], arrays: dict[str, str]) -> None:
    """Carries out the line's assignments in `variables` or `arrays`. The elements of an array are words that keep
    their quotes."""
    if array := _ARRAY_SET.search(line):
        name, appends, elements = array.groups()
        before = arrays.get(name, "") if appends else ""
        arrays[name] = f"{before} {expanded(elements, variables)}".strip()
        return
    for word in _assignments(line):
        if default := _DEFAULT.match(word):
            name, replaces_empty, value = default.groups()
            if name not in variables or (replaces_empty and not variables[name]):
                variables[name] = unquoted(expanded(value, variables))
        elif assignment := _ASSIGNMENT.match(word):
            name, appends, value = assignment.groups()
            before = variables.get(name, "") if appends else ""
            variables[name] = before + unquoted(expanded(value, variables))


def _unquoted_words(command: str) -> list[str]:
    """The words of a command, without their quotes. Text that only bash can compute, such as `$(a | b)`, is one word.

    Raises ValueError if a quote is not closed.
    """
    return [
        piece
        for word in words(command)
        for piece in ([" ".join(shlex.split(word))] if unexpanded(word) else shlex.split(word))
    ]


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


def _with_arrays_on_one_line(text: str) -> str:
    """Returns the script with the lines of each `NAME=(…)` joined into one, and without the comments in them."""

    def one_line(found: re.Match[str]) -> str:
        elements = [word for line in found[3].splitlines() for word in words(line.strip().removesuffix("\\"))]
        return f"{found[1]}{found[2]}=({' '.join(elements)})"

    return _ARRAY.sub(one_line, text)


def _assignments(line: str) -> list[str]:
    """The assignments of a line. There may be several, and a command may follow them."""
    if _DEFAULT.match(line):
        return [line]
    return [word for word in words(line) if _ASSIGNMENT.match(word)] if _ASSIGNMENT.match(line) else []


def _of_the_shell(all_words: list[str]) -> list[str]:
    """Returns the words of the command that `bash -c` or `sbatch --wrap` runs; without these, `all_words`."""
    for option, command in pairwise([*all_words, ""]):
        if option == "--wrap":
            return shlex.split(command)
        if option.startswith("--wrap="):
            return shlex.split(option.removeprefix("--wrap="))
    for shell, option, command in zip(all_words, all_words[1:], all_words[2:], strict=False):
        if Path(shell).name in ("bash", "sh") and re.fullmatch(r"-\w*c", option):
            return shlex.split(command)
    return all_words


def _python_commands(all_words: list[str]) -> Iterator[list[str]]:
    """Yields the Python commands of a line that have `key=value` words, each without the words before `python`."""
    for is_operator, group in groupby(all_words, lambda word: bool(_OPERATOR.match(word))):
        command = [] if is_operator else list(group)
        starts = (at for at, word in enumerate(command) if word.endswith(".py") or "python" in word or word == "-m")
        arguments = command[next(starts, len(command)) :]
        if any(_pairs(arguments)):
            yield arguments


def _arguments_read(arguments: list[str], name: str) -> Read:
    pairs = dict(_pairs(arguments))
    # Between double quotes shlex keeps the backslash of `\${trainer.run_name}`; bash does not.
    values = {key: _value(value.replace("\\$", "$")) for key, value in pairs.items() if not unexpanded(value)}
    remarks = (*_unread_words(arguments, name), *_unread_values(pairs, name))
    return Read(module=_module(arguments), values=dict(_leaves(values, "")), remarks=remarks)


def _pairs(arguments: list[str]) -> Iterator[tuple[str, str]]:
    for word in arguments:
        found = _KEY.match(word)
        if found and found[3] is not None and found[1] != "~":
            yield found[2], found[3]


def _unread_words(arguments: list[str], name: str) -> Iterator[str]:
    """Describes the words that would set or remove keys but are not `key=value`."""
    for before, word in pairwise(arguments):
        if word.startswith("~") and _KEY.match(word):
            yield f"{word}: a key cannot be removed here; it keeps its default, or the value that the script sets"
        elif _HYDRA_FILE.match(word):
            yield f"{word}: names a file of Hydra's; import the resolved configuration instead (--cfg job --resolve)"
        elif word == "=":
            yield f"{before} = …: was not read; remove the spaces around ="
        elif "=" not in word and word.startswith("$") and unexpanded(word):
            yield f"{_remedy(word, name)}; its keys are missing"
        elif any(_pairs([before])) and not (unexpanded(before) or _NO_VALUE.match(word)):
            yield f"{word}: is not key=value; if it belongs to {before!r}, put both in one pair of quotes"


def _unread_values(pairs: Mapping[str, str], name: str) -> Iterator[str]:
    for key, value in pairs.items():
        if parts := unexpanded(value):
            yield f"{key}={value}: {_remedy(parts[0], name)}"


def _remedy(part: str, name: str) -> str:
    if variable := re.fullmatch(r"\$\{?([A-Za-z_]\w*)\}?", part):
        remedy = f"set it: {variable[1]}=… rl import-config {name}"
        return f"${variable[1]} has no value in the script or the environment; {remedy}"
    return f"{part} is not computed; write its value into the script"


def _module(words: list[str]) -> str | None:
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    return next((word for word in words if word.endswith(".py")), None)


def _value(text: str) -> Any:
    try:
        value = yaml.load(text, Loader=Yaml12Loader)
    except yaml.YAMLError:
        return text
    return _with_colons(value) if isinstance(value, dict) else value


def _with_colons(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    """Reads Hydra's `{key:value}`, which in YAML is a key `key:value` without a value."""
    pairs: dict[Any, Any] = {}
    for key, value in mapping.items():
        if value is None and isinstance(key, str) and ":" in key:
            key, _, text = key.partition(":")
            value = _value(text)
        pairs[key] = _with_colons(value) if isinstance(value, dict) else value
    return pairs
