"""Configures PyYAML for the scalars of YAML 1.2, with hexadecimal and octal numbers as text: `1e-6` is a number and
`010` is ten; `yes`, `12:30`, `0x10` and dates are text."""

from __future__ import annotations

import re
from typing import Any

import yaml

_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
)
"""Tag, pattern and possible first characters of each kind of scalar that is not text. The first matching row counts."""


class Yaml12Loader(yaml.SafeLoader):
    """Loader with the scalars of YAML 1.2."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Raises ConstructorError for every value that does not fit its tag. PyYAML raises other errors for an integer
        of thousands of digits, and for explicit tags as in `!!float abc`."""
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, AttributeError) as error:
            problem = f"not a value of the type {node.tag.rpartition(':')[2]} ({error})"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark) from error


class Yaml12Dumper(yaml.SafeDumper):
    """Writes YAML that `Yaml12Loader` reads back unchanged: text that looks like a number is quoted."""

    def ignore_aliases(self, data: object) -> bool:
        """Always true: a value that occurs twice is written twice, not as an anchor and an alias."""
        return True


for _class in (Yaml12Loader, Yaml12Dumper):
    _class.yaml_implicit_resolvers = {}  # otherwise the resolvers of YAML 1.1 stay active
    for _tag, _pattern, _first in _SCALARS:
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def _decimal(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


# YAML 1.1 reads 010 as eight.
Yaml12Loader.add_constructor("tag:yaml.org,2002:int", _decimal)
