"""Generates the configuration reference page from the configuration classes and the docstrings of their fields,
including those of plug-ins.

Run as `python -m rl_core.config.reference > docs/configuration.md`; a test fails if the page is stale.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

import attrs

from rl_core import plugins
from rl_core.config.keys import ALIASES
from rl_core.config.layers import VALUE_ALIASES
from rl_core.config.loading import describe, hints, own_keys
from rl_core.config.plugin_options import SECTIONS, installed_classes
from rl_core.config.resolving import RULES, as_mapping
from rl_core.config.tree import Config
from rl_core.interfaces import bounds_of

_HEAD = """\
# Configuration

Generated from `rl_core.config` by `python -m rl_core.config.reference > docs/configuration.md`. Do not edit.

This page includes the keys of all plug-ins that were installed when it was generated.

A run is described by a recipe (`rl train quickstart`), a YAML file (`rl train run.yaml`) or `package.module:recipe`,
with `key.path=value` overrides on top. `rl config RECIPE` shows every value and where it comes from. Values are YAML
1.2. Keys may be nested or dotted. Where a list of any length is expected, a single value means a list of one. An
unknown key, a wrong type or an impossible combination is an error before anything starts, and independent mistakes are
listed together. A key that is set twice in one file or command line causes a warning; the last value is used.
"""
_BACKENDS = """\
## Backend sections

`trainer.policy.<backend>_config`, `trainer.ref.<backend>_config` and `trainer.critic.<backend>_config` contain the
options of a training backend. Sections of installed backends are checked like all other keys. Sections of this
project's backends that are not installed are kept unchecked, with a warning.
"""
_OPTIONS = "Keys of {package}, read only with `{chooser}`. Otherwise, changing one has no effect and causes a warning."
_DERIVED = """\
## Derived values

A run derives the values of these keys if they are null. In the run's name and in paths, a leading `~` means the home
directory, and `${key.path}` means the value of another key.
"""
_ALIASES = """\
## Aliases

These spellings are accepted without a warning. `<backend>_config.train.KEY` sets KEY for policy and critic,
`<backend>_config.eval.KEY` for the reference. [coming_from.md](coming_from.md#keys-of-skyrl) lists keys of
other trainers that are translated with a warning.

| alias | meaning |
|---|---|
"""


def reference_page() -> str:
    """The page as Markdown."""
    rules = [f"| `{rule.key}` | `{rule.text}` |" for rule in RULES]
    derived = "\n".join([_DERIVED, "| key | value |", "|---|---|", *rules])
    sections = [*_sections(Config, ""), _BACKENDS.rstrip(), *_backend_sections()]
    return "\n".join([_HEAD, *(f"{section}\n" for section in sections), derived, "", _aliases()])


def _aliases() -> str:
    values = {f"{key}={_plain(alias)}": f"{key}={_plain(value)}" for (key, alias), value in VALUE_ALIASES.items()}
    return _ALIASES + "".join(f"| `{alias}` | `{here}` |\n" for alias, here in {**ALIASES, **values}.items())


def _sections(cls: type, above: str) -> Iterator[str]:
    if above:
        yield _section(cls, f"## {above}" if "." not in above else f"### {above}", inspect.getdoc(cls) or "")
    yield from _sections_of_plugins(cls)
    for name in own_keys(cls):
        if attrs.has(hints(cls)[name]):
            yield from _sections(hints(cls)[name], f"{above}.{name}" if above else name)


def _section(cls: type, title: str, text: str) -> str:
    """A table of the keys of `cls`, without those of nested classes, which have their own sections."""
    docs, fields = field_docs(cls), attrs.fields_dict(cls)
    cells = {name: (_values(hints(cls)[name], fields[name]), _default(fields[name])) for name in fields}
    rows = [
        f"| `{name}` | {' | '.join(cells[name])} | {_cell(docs.get(name, ''))} |"
        for name in own_keys(cls)
        if not attrs.has(hints(cls)[name])
    ]
    table = ["", "| key | type, bounds | default | meaning |", "|---|---|---|---|", *rows] if rows else []
    return "\n".join([title, "", text, *table])


def _sections_of_plugins(cls: type) -> Iterator[str]:
    """Tables of the keys that installed plug-ins declare in a section of the core."""
    for section in SECTIONS:
        if section.cls is cls:
            packages = {plugin.name: plugin.distribution for plugin in plugins.installed(section.group)}
            for name, options in installed_classes(section):
                chooser = f"{section.field}={name}"
                text = _OPTIONS.format(package=_package(packages[name]), chooser=f"{section.path}.{chooser}")
                yield from _with_nested(options, section.path, f"{section.path}, {chooser}", text)


def _backend_sections() -> Iterator[str]:
    """Tables of the backends' sections. Backends that share a section, such as `fsdp` and `fsdp1`, have one table."""
    strategies: dict[str, list[plugins.Plugin]] = {}
    for plugin in plugins.installed("rl_core.backends"):
        section = plugins.load("rl_core.backends", plugin.name).config_section
        strategies.setdefault(section, []).append(plugin)
    for section, found in strategies.items():
        path = f"trainer.policy.{section}"
        names = " and ".join(f"`trainer.strategy={plugin.name}`" for plugin in found)
        text = f"Keys of {_package(found[0].distribution)}, for {names}."
        cls = plugins.load("rl_core.backends", found[0].name).options_class
        yield from _with_nested(cls, path, path, text)


def _with_nested(cls: type, path: str, title: str, text: str) -> Iterator[str]:
    """The table of a plug-in's options class, then the tables of its nested classes."""
    yield _section(cls, f"### {title}", " ".join(filter(None, [inspect.getdoc(cls), text])))
    for name in own_keys(cls):
        if attrs.has(hints(cls)[name]):
            yield from _sections(hints(cls)[name], f"{path}.{name}")


def _package(distribution: str) -> str:
    return distribution.partition(" ")[0]


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Field name → the docstring below the field."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if attrs.has(base):
            docs |= _own_field_docs(base)
    return docs


def _own_field_docs(cls: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            docs[field.target.id] = " ".join(str(text.value.value).split())
    return docs


def _values(hint: Any, field: attrs.Attribute[Any]) -> str:
    """The type of a key and its bounds."""
    return _cell(", ".join([describe(hint), *(bound.expected for bound in bounds_of(field))]))


def _default(field: attrs.Attribute[Any]) -> str:
    default: Any = field.default
    if hasattr(default, "factory"):
        default = default.factory()
    return f"`{default if isinstance(default, str) else json.dumps(as_mapping(default))}`"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(reference_page(), end="")
