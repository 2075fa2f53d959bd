"""Follows the branches of a bash script whose conditions are known."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping

import attrs

from rl_examples.importing.shell import DECLARING, Shell, unexpanded
from rl_examples.importing.words import Operator, Unclosed, commands

_SET = re.compile(
    rf"(?:^|[;&|{{)]\s*|\b(?:then|else|do)\s+)(?:(?:{'|'.join(DECLARING)})\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)\+?="
)
_OPENS = re.compile(r"^(?:if|case|for|while|until)\b")
_CLOSES = re.compile(r"(?:^|;\s*)(?:fi|esac|done)\b")
_IF = re.compile(r"^(?:el)?if\s+\[\[?\s+(.*?)\s+\]\]?\s*;?\s*(?:then)?\s*(?:#.*)?$")
_ELSE = re.compile(r"^else\s*(?:#.*)?$")
_THEN = re.compile(r"^then\s*(?:#.*)?$")
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}


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

    def followed(self, command: str, shell: Shell) -> str | None:
        """Returns the command if bash may run it; None if not, or if the command only separates known branches."""
        is_running = all(block.runs for block in self._blocks)
        if _OPENS.match(command):
            if _CLOSES.search(command):
                return command if is_running else None
            found = _IF.match(command)
            holds = _holds(found[1], shell) if found else None
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
            holds = False if block.has_run else _holds(found[1], shell)
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


def _holds(test: str, shell: Shell) -> bool | None:
    """Whether `[ test ]` holds; None if it is not evaluated: files, patterns, several conditions, unknown variables."""
    try:
        words = [word for command in commands(test) for word in command.words]
    except Unclosed:
        return None
    parts = [shell.text(word) for word in words]
    if any(isinstance(word, Operator) for word in words) or any(unexpanded(part) for part in parts):
        return None
    match parts:
        case ["-z" | "-n" as wanted, value]:
            return bool(value) == (wanted == "-n")
        case [left, "=" | "==" | "!=" as relation, right] if not re.search(r"[*?\[]", right):
            return (left == right) == (relation != "!=")
        case [left, relation, right] if relation in _COMPARISONS and left.isdecimal() and right.isdecimal():
            return _COMPARISONS[relation](int(left), int(right))
    return None
