"""The configuration reference page, made from the classes and the texts under their fields.

Run as `python -m rl_core.config.reference > docs/configuration.md`; a test fails when the page is stale.
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

from rl_core.config.loading import describe, hints
from rl_core.config.resolving import RULES, as_mapping
from rl_core.config.tree import Config

_HEAD = """\
# Configuration

Generated from `rl_core.config` by `python -m rl_core.config.reference > docs/configuration.md`. Do not edit.

A run is described by a recipe (`rl train quickstart`), a YAML file (`rl train run.yaml`) or `package.module:recipe`,
with `key.path=value` overrides on top. `rl config RECIPE` shows every value and where it comes from. Values are YAML
1.2; keys may be nested or dotted; where a list is expected, a single value stands for a list of one. An unknown key, a
value of another type or a combination that cannot work is an error before anything starts; a key given twice is a
warning, and the last one counts.
"""
_BACKENDS = """\
## Backend sections

`trainer.policy.<backend>_config`, and the same of `trainer.ref` and `trainer.critic`, belongs to the backend:
`fsdp_config` is described in rl-fsdp. The section of an installed backend is loaded as exactly as the rest; that of
another one is kept with a warning.
"""
_DERIVED = """\
## Derived values

What a key is when it is null. In the run's name and in paths, a leading `~` is the home directory and `${key.path}` the
value of another key.
"""


def reference_page() -> str:
    """The page as Markdown."""
    rules = [f"| `{rule.key}` | `{rule.text}` |" for rule in RULES]
    derived = "\n".join([_DERIVED, "| key | value |", "|---|---|", *rules])
    return "\n".join([_HEAD, *(f"{section}\n" for section in _sections(Config, "")), _BACKENDS, derived]) + "\n"


def _sections(cls: type, above: str) -> Iterator[str]:
    docs, fields = field_docs(cls), attrs.fields_dict(cls)
    rows, nested = [], []
    for name, hint in hints(cls).items():
        if name == "backend_sections":
            continue
        if attrs.has(hint):
            nested.append((name, hint))
        else:
            rows.append(f"| `{name}` | {_cell(describe(hint))} | {_default(fields[name])} | {_cell(docs[name])} |")
    if above:
        title = f"## {above}" if "." not in above else f"### {above}"
        table = ["", "| key | type | default | meaning |", "|---|---|---|---|", *rows] if rows else []
        yield "\n".join([title, "", inspect.getdoc(cls) or "", *table])
    for name, hint in nested:
        yield from _sections(hint, f"{above}.{name}" if above else name)


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Field name → the text under the field."""
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


def _default(field: attrs.Attribute[Any]) -> str:
    default: Any = field.default
    if hasattr(default, "factory"):
        default = default.factory()
    return f"`{default if isinstance(default, str) else json.dumps(as_mapping(default))}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(reference_page(), end="")
