"""Expands the variables and the arithmetic of a bash script without running it."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile

import attrs

DECLARING = "export|declare|local|readonly|typeset"
"""Words that may precede an assignment, as a regular expression."""
_BRACED = r"(?:[^{}]|\$\{[^{}]*\})*"
_EXPANSION = re.compile(
    rf"""(?<!\\)(?:
        \$\(\((?P<sum>(?:[^()]|\([^()]*\))*)\)\)
      | \$\{{(?P<braced>\w+)(?:(?P<operator>:?[-=?])(?P<default>{_BRACED}))?\}}
      | \$(?P<name>[A-Za-z_]\w*)
    )""",
    re.VERBOSE,
)
_REPLACEMENT = re.compile(
    r"(?<!\\)\$\{(\w+)(?:(?P<all>//?)(?P<old>(?:\\.|[^/}*?\[#%\\])+)/(?P<new>[^}]*)|##\*(?P<end>[^}*?\[\\]+))\}"
)
"""`${NAME//old/new}`, `${NAME/old/new}` and `${NAME##*end}` without patterns in `old` and `end`."""
_LEFT = re.compile(r"(?<!\\)(?:\$\([^)]*\)*|\$\{[#!][^}]*\}|\$\{\w+(?:(?![\w.:])|:[-=?+\d])[^}]*\}?|\$\w+|`[^`]*`?)")
_WORD = re.compile(
    r"""(?:\\.|"(?:\\.|[^"\\])*"|'[^']*'|\$\(\(.*?\)\)|\$\([^)]*\)|\$\{[^}]*\}|`[^`]*`|\S)+""", re.DOTALL
)
_TERMINATOR = re.compile(r"(?<!\\)(;+)$")
_SET = re.compile(rf"(?:^|[;&|{{]\s*|\b(?:then|else|do)\s+)(?:(?:{DECLARING})\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)\+?=")
_OPENS = re.compile(r"^(?:if|case|for|while|until)\b")
_CLOSES = re.compile(r"(?:^|;\s*)(?:fi|esac|done)\b")
_IF = re.compile(r"^(?:el)?if\s+\[\[?\s+(.*?)\s+\]\]?\s*;?\s*(?:then)?\s*(?:#.*)?$")
_ELSE = re.compile(r"^else\s*(?:#.*)?$")
_THEN = re.compile(r"^then\s*(?:#.*)?$")
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}


def _quotient(left: int, right: int) -> int:
    """Divides as bash does, towards zero."""
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda left, right: left - right * _quotient(left, right),
}


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Replaces `$NAME`, `${NAME}`, `${NAME:-default}` (also with `=` or `?`, or without the colon), `${NAME//old/new}`,
    `${NAME##*end}` and `$((2 * NAME))` with their values.

    Leaves everything else as it is: variables without a value, other forms of `${…}`, and `$(command)`.
    """

    def value(found: re.Match[str]) -> str:
        if found["sum"] is not None:
            result = _sum(found["sum"], variables)
            return found[0] if result is None else str(result)
        name = found["braced"] or found["name"]
        if name in variables and (variables[name] or not (found["operator"] or "").startswith(":")):
            return variables[name]
        if (found["operator"] or "?")[-1] == "?":
            return found[0]
        return unquoted(expanded(found["default"], variables))

    return _EXPANSION.sub(value, _REPLACEMENT.sub(lambda found: _replaced(found, variables), text))


def _replaced(found: re.Match[str], variables: Mapping[str, str]) -> str:
    before = variables.get(found[1])
    if before is None:
        return found[0]
    if found["end"]:
        return before.rpartition(found["end"])[2]
    old = re.sub(r"\\(.)", r"\1", found["old"])
    return before.replace(old, expanded(found["new"], variables), -1 if found["all"] == "//" else 1)


def unexpanded(text: str) -> list[str]:
    """Returns the parts of an expanded text that bash would still replace. Leaves out `${a.b}`, which refers to a
    key."""
    return _LEFT.findall(text)


def unquoted(text: str) -> str:
    """Removes the quotes around a value."""
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def words(command: str) -> list[str]:
    """Splits a command into words, which keep their quotes. A `;` after a word is a word of its own, and a comment ends
    the command."""
    parts = (part for word in _WORD.findall(command) for part in _TERMINATOR.split(word) if part)
    return list(takewhile(lambda word: not word.startswith("#"), parts))


def set_in_branches(commands: Iterable[str]) -> set[str]:
    """Returns the variables that the script sets conditionally: in a branch, in a loop or after `[ … ] &&`."""
    names, depth = set(), 0
    for command in commands:
        opens = bool(_OPENS.match(command))
        depth += opens
        if depth or re.match(r"^(?:\[|test\b)", command):
            names |= set(_SET.findall(command))
        depth -= len(_CLOSES.findall(command)) if depth else 0
    return names


@attrs.define
class _Block:
    """An open `if`, `case` or loop."""

    is_known: bool
    """Whether it is an `if` whose conditions so far could be evaluated."""
    runs: bool
    """Whether bash runs the present branch, as far as known."""
    has_run: bool
    """Whether a branch of it has run."""


class Branches:
    """Follows the branches of a script, and leaves out those that bash would not run."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def followed(self, command: str, variables: Mapping[str, str]) -> str | None:
        """Returns the command if bash may run it; None if not, or if the command only separates known branches."""
        is_running = all(block.runs for block in self._blocks)
        if _OPENS.match(command):
            if _CLOSES.search(command):
                return command if is_running else None
            found = _IF.match(command)
            holds = _holds(found[1], variables) if found else None
            is_known = not is_running or holds is not None
            self._blocks.append(_Block(is_known, holds is not False, holds is True))
            return None if is_known else command
        if not self._blocks:
            return command
        block = self._blocks[-1]
        if found := _CLOSES.search(command):
            self._blocks.pop()
            return command if is_running and (found.start() or not block.is_known) else None
        if not block.is_known or not all(above.runs for above in self._blocks[:-1]):
            return command if is_running else None
        if found := _IF.match(command):
            holds = False if block.has_run else _holds(found[1], variables)
            # From an unknown condition on, each branch may run.
            block.is_known, block.runs, block.has_run = (
                holds is not None,
                holds is not False,
                block.has_run or holds is True,
            )
            return None if block.is_known else command.removeprefix("el")
        if _ELSE.match(command):
            block.runs = not block.has_run
            return None
        return command if block.runs and not _THEN.match(command) else None


def _holds(test: str, variables: Mapping[str, str]) -> bool | None:
    """Whether `[ test ]` holds; None if it is not evaluated: files, patterns, several conditions, unknown variables."""
    text = expanded(test, variables)
    try:
        parts = shlex.split(text)
    except ValueError:
        return None
    if unexpanded(text):
        return None
    match parts:
        case ["-z" | "-n" as wanted, value]:
            return bool(value) == (wanted == "-n")
        case [left, "=" | "==" | "!=" as relation, right] if not re.search(r"[*?\[]", right):
            return (left == right) == (relation != "!=")
        case [left, relation, right] if relation in _COMPARISONS and left.isdecimal() and right.isdecimal():
            return _COMPARISONS[relation](int(left), int(right))
    return None


def _sum(text: str, variables: Mapping[str, str]) -> int | None:
    """The value of an arithmetic expression; None if it cannot be computed."""
    text = re.sub(r"[A-Za-z_]\w*", lambda found: variables.get(found[0], found[0]), expanded(text, variables))
    try:
        return _number(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_number(node.left), _number(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    raise ValueError(f"{ast.unparse(node)} is not a sum of whole numbers")
