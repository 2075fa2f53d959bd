"""The environment `calculator`: the policy may compute expressions with a tool before it answers with a number.

Row:       `prompt` (messages, or text that explains how to call), `answer` or `reward_spec.ground_truth`, a number
Reward:    1 if the last number in the answer equals the row's, else 0
Options:   `call_format` (see `rl_environments.tools`)
Metrics:   `accuracy`, `calls`, `wrong_calls`
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from rl_core.interfaces import Row
from rl_environments.answers import last_number, number_of_row, require_prompt
from rl_environments.options import own_options
from rl_environments.tools import ToolEnvironment, tool

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_SIGNS = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_LONGEST_EXPRESSION = 500
_LARGEST_POWER = 64


class CalculatorEnvironment(ToolEnvironment):
    """See the module."""

    def __init__(self, row: Row, options: Mapping[str, Any]) -> None:
        super().__init__(row, own_options(options, "calculator", ["call_format"]))
        self._answer = number_of_row(row, "calculator")

    @classmethod
    def require_options(cls, options: Mapping[str, Any]) -> None:
        """See `Environment.require_options`."""
        super().require_options(own_options(options, "calculator", ["call_format"]))

    @classmethod
    def require_row(cls, row: Row) -> None:
        """See `Environment.require_row`."""
        require_prompt(row, "calculator")
        number_of_row(row, "calculator")

    @tool
    def calculate(self, expression: str) -> str:
        """The value of an arithmetic expression.

        Args:
            expression: numbers, brackets and the operators + - * / // % **, e.g. (37 + 45) * 2
        """
        return computed(expression)

    async def judge(self, answer: str) -> float:
        """See `ToolEnvironment.judge`."""
        return float(last_number(answer) == self._answer)


def computed(expression: str) -> str:
    """Returns the value of an arithmetic expression: all digits of an integer, else 12 significant digits.

    Raises:
        ValueError: the text is not an arithmetic expression or is too long, or a number, power or the result is too
            large.
        ZeroDivisionError: the expression divides by zero.
    """
    if len(expression) > _LONGEST_EXPRESSION:
        raise ValueError(f"the expression has {len(expression)} characters; expected at most {_LONGEST_EXPRESSION}")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r:.100} is not an arithmetic expression") from None
    value = _value(tree.body)
    return str(value.numerator) if value.denominator == 1 else f"{Decimal(value.numerator) / value.denominator:.12g}"


def _value(node: ast.expr) -> Fraction:
    """Computes an expression exactly, so that 0.1 + 0.2 is 0.3 and large numbers keep all digits."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.BinOp(op=ast.Pow()):
            return _power(_value(node.left), _value(node.right))
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return Fraction(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
        case ast.UnaryOp() if type(node.op) in _SIGNS:
            return _SIGNS[type(node.op)](_value(node.operand))
    raise ValueError(f"{ast.unparse(node)!r:.100} is not arithmetic: expected numbers, brackets and + - * / // % **")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    largest = max(abs(base.numerator), base.denominator)
    if exponent.denominator != 1 or abs(exponent) > _LARGEST_POWER or largest > 10**12:
        raise ValueError(f"a power may have a whole exponent up to {_LARGEST_POWER} and a base up to 10^12")
    return base ** int(exponent)
