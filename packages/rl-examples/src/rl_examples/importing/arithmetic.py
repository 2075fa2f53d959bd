"""Computes the arithmetic of bash, `$((2 * NAME))`."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping


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


def computed(text: str, variables: Mapping[str, str]) -> int | None:
    """Returns the value of an arithmetic expression; None if it cannot be computed."""
    text = re.sub(r"[A-Za-z_]\w*", lambda found: variables.get(found[0], found[0]), text)
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
