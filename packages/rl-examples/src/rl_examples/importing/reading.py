"""Reads key-value pairs from a launch script or a YAML file of any trainer."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import attrs
import yaml

from rl_core.config.yaml12 import Yaml12Loader
from rl_core.errors import ConfigError
from rl_examples.importing.branches import Branches, set_in_branches
from rl_examples.importing.shell import Shell, shown, unexpanded
from rl_examples.importing.words import Command, Operator, Unclosed, commands

_USED = re.compile(r"\$\{?([A-Za-z_]\w*)")
_KEY = re.compile(r"^(\+{0,2}|~)([A-Za-z_][\w-]*(?:[./@][\w-]+)*)(?:=(.*))?$", re.DOTALL)
_NO_VALUE = re.compile(r"^[-$]|^[\d&]*[<>]|.*=", re.DOTALL)
"""Matches words that cannot be the next word of an unquoted value: options, `$@`, redirections and `key=value`."""
_HYDRA_FILE = re.compile(r"^(?:--config-(?:name|path|dir)|-cn|-cp|-cd)(?:=|$)")


_FUNCTION = re.compile(r"^\s*(?:function\s+)?([\w-]+)\s*\(\s*\)\s*\{(.*?)(?:^\s*|;\s*)\}", re.MULTILINE | re.DOTALL)


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
    shell, branches, followed = Shell(dict(os.environ)), Branches(), list[str]()
    found, unread = Read(module=None, values={}), list[str]()
    functions = {each[1] for each in _FUNCTION.finditer(text) if re.search(r"python|torchrun|\s-m\s", each[2])}
    for command in _until_unclosed(text, name, unread):
        line = branches.followed(command.text, shell)
        if line is None:
            continue
        followed.append(line)
        used = sorted(set_in_branches(followed) & set(_USED.findall(line)) & {*shell.variables, *shell.arrays})
        all_words = _of_the_shell(list(shell.run(command)), shell, name, unread)
        if len(all_words) > 1 and all_words[0] in functions and not isinstance(all_words[1], Operator):
            unread.append(
                f"{shown(' '.join(all_words))}: the arguments of the function {all_words[0]} are not read; write them "
                "into its Python command"
            )
        uncertain = [
            f"{each}: is set in a branch or a loop, and {shell.text(f'${{{each}[*]}}')!r} was used; check the keys "
            f"that use {each}"
            for each in used
        ]
        for arguments in _python_commands(all_words):
            read_here = _arguments_read(arguments, name)
            # A command with a single pair may be a small helper script, so it does not replace an earlier command.
            if len(dict(_pairs(arguments))) > 1 or not found.values:
                found = attrs.evolve(read_here, remarks=(*uncertain, *_after_comment(command), *read_here.remarks))
    return attrs.evolve(found, remarks=(*unread, *found.remarks))


def _until_unclosed(text: str, name: str, unread: list[str]) -> Iterator[Command]:
    """Yields the commands of a script and of its here-documents, which may be scripts too. Notes in `unread` where a
    quote is not closed."""
    try:
        for command in commands(text):
            yield command
            for document in command.documents:
                yield from _until_unclosed(document.partition("\n")[2].rpartition("\n")[0], name, [])
    except Unclosed as error:
        unread.append(f"{name}: {error}")


def _after_comment(command: Command) -> list[str]:
    at = f"{command.text[:60]!r}: bash ends this command at the comment inside it"
    return [f"{at}; the keys after the comment were read here"] if command.skips_comment else []


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


def _of_the_shell(all_words: list[str], shell: Shell, name: str, unread: list[str]) -> list[str]:
    """Returns the words of the command that `bash -c`, `eval` or `sbatch --wrap` runs; without these, `all_words`."""
    inner = None
    for option, command in pairwise([*all_words, ""]):
        if option == "--wrap" or option.startswith("--wrap="):
            inner = command if option == "--wrap" else option.removeprefix("--wrap=")
    for program, option, command in zip(all_words, all_words[1:], all_words[2:], strict=False):
        if Path(program).name in ("bash", "sh") and re.fullmatch(r"-\w*c", option):
            inner = command
    if all_words[:1] == ["eval"]:
        inner = " ".join(all_words[1:])
    if inner is None:
        return all_words
    child = Shell(dict(shell.variables), dict(shell.arrays))
    return [word for command in _until_unclosed(inner, name, unread) for word in (*child.run(command), Operator(";"))]


def _python_commands(all_words: list[str]) -> Iterator[list[str]]:
    """Yields the Python commands of a line that have `key=value` words, each without the words before `python`."""
    for is_operator, group in groupby(all_words, lambda word: isinstance(word, Operator)):
        command = [] if is_operator else list(group)
        starts = (at for at, word in enumerate(command) if word.endswith(".py") or "python" in word or word == "-m")
        arguments = command[next(starts, len(command)) :]
        if any(_pairs(arguments)):
            yield arguments


def _arguments_read(arguments: list[str], name: str) -> Read:
    pairs = dict(_pairs(arguments))
    values = {key: _value(value) for key, value in pairs.items() if not unexpanded(value)}
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
        elif "=" not in shown(word) and shown(word).startswith("$") and unexpanded(word):
            yield f"{_remedy(shown(word), name)}; its keys are missing"
        elif any(_pairs([before])) and not (unexpanded(before) or _NO_VALUE.match(word)):
            yield f"{shown(word)}: is not key=value; if it belongs to {shown(before)!r}, put both in one pair of quotes"


def _unread_values(pairs: Mapping[str, str], name: str) -> Iterator[str]:
    for key, value in pairs.items():
        if parts := unexpanded(value):
            yield f"{key}={shown(value)}: {_remedy(parts[0], name)}"


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
