"""Compares mathematical answers with math-verify. `judge_pool` starts this module as a process.

math-verify implements its timeout with an alarm signal, which works only in the main thread and cannot interrupt native
code. This process switches that timeout off; instead, the kernel ends the process when an answer has used up its CPU
time. A wall-clock limit would make right answers count as wrong on a busy machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import re
import resource
import signal
import sys
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from rl_environments.mathematical_text import (
    choice_and_value,
    choice_letter,
    ends_in_a_variable,
    last_box,
    marked,
    readings,
)
from rl_environments.sandbox.inside import frames

_ADDRESS_SPACE_BYTES = 4 << 30
_PR_SET_PDEATHSIG = 1
_MOST_ZEROS = 10_000
_QUANTIFIED = re.compile(r"\\(?:exists|forall|mid)(?![a-zA-Z])|[∃∀]")


def main() -> None:
    """Reads requests from stdin and answers each on stdout, until stdin ends."""
    answers_fd = os.dup(1)
    _become_quiet()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE_BYTES, _ADDRESS_SPACE_BYTES))
    try:
        import math_verify  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        frames.send(answers_fd, {"missing": str(error)})
        return
    # The parent may ignore SIGPROF, and a process inherits which signals are ignored.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    grader = Grader(math_verify)
    frames.send(answers_fd, {"ready": True})
    while (request := frames.receive(0)) is not None:
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        if "reference" in request:
            answer = {"problem": grader.problem(request["reference"])}
        else:
            answer = grader.verdict(request["response"], request["references"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        with contextlib.suppress(BrokenPipeError):
            frames.send(answers_fd, answer)


class Grader:
    """Compares answers by means of the module `math_verify`."""

    def __init__(self, math_verify: Any) -> None:
        self._parse, self._verify = math_verify.parse, math_verify.verify
        latex, expression = math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig()
        with_units = latex.normalization_config
        without_units = math_verify.LatexExtractionConfig(
            normalization_config=dataclasses.replace(with_units, units=False)
        )
        self._extractions = {False: [latex, expression], True: [without_units, expression]}
        self._letters = [math_verify.StringExtractionConfig(strings=tuple("ABCDEFGH"), lowercase=False)]

    def problem(self, reference: str) -> str | None:
        """Returns why no answer could be judged by this reference, or None: it must be an expression with a value, and
        equal the same text in a box."""
        texts = dict.fromkeys(readings(marked(reference)))
        if any(map(_QUANTIFIED.search, texts)):
            return "math-verify reads only a part of a statement with quantifiers or a condition"
        read = [self._parsed(text, reference) for text in texts]
        expressions = list(filter(_is_expression, read))
        if not expressions:
            return "math-verify does not read it as an expression, so at most the very same spelling would be right"
        if not any(map(_has_value, expressions)):
            return f"its value is {expressions[0][0]}"
        if not self.verdict(marked(reference), [reference])["is_right"]:
            return "math-verify says that it does not equal itself"
        return None

    def verdict(self, response: str, references: Sequence[str]) -> dict[str, Any]:
        """Returns the message that says whether the response's answer equals one of the references. An answer counts as
        wrong if comparing it raises, for example because it needs too much memory or recursion depth."""
        has_answer = is_readable = False
        try:
            for reference in references:
                letter = choice_letter(reference)
                pairs = dict.fromkeys(zip(readings(marked(reference)), readings(response), strict=True))
                for expected_text, found_text in pairs:
                    expected, found = self._parsed(expected_text, reference), self._parsed(found_text, reference)
                    is_readable |= _is_expression(expected)
                    boxed = choice_and_value(last_box(response) or "") if letter else None
                    if boxed:  # `\\boxed{(B) 12}`
                        expected, found = [letter], [boxed[0]]
                    elif letter and not found:  # an answer without a box: `The answer is B.`
                        expected = [letter]
                        found = self._parse(found_text, extraction_config=self._letters, parsing_timeout=None)
                    has_answer |= bool(found)
                    if found and self._are_equal(expected, found):
                        return {"is_right": True, "has_answer": True, "is_readable": is_readable}
        except (Exception, MemoryError, RecursionError) as error:
            return {"is_right": False, "has_answer": True, "is_readable": True, "error": repr(error)[:200]}
        return {"is_right": False, "has_answer": has_answer, "is_readable": is_readable}

    def _parsed(self, text: str, reference: str) -> list[Any]:
        extraction = self._extractions[ends_in_a_variable(reference)]
        return self._parse(text, extraction_config=extraction, parsing_timeout=None)

    def _are_equal(self, expected: list[Any], found: list[Any]) -> bool:
        # math-verify compares numbers to 6 and 15 decimals; small ones need more, or else all of them are equal.
        further = _leading_zeros(expected[0]) if expected else 0
        precision = {"float_rounding": 6 + further, "numeric_precision": 15 + further}
        # A solved inequality equals its interval; for others, repeating the question would be an answer.
        is_solved = bool(found) and all(map(_bounds_a_variable, getattr(found[0], "_unsorted_args", found[:1])))
        return self._verify(expected, found, **precision, allow_set_relation_comp=is_solved, timeout_seconds=None)


def _is_expression(parsed: list[Any]) -> bool:
    """Whether a text was read as more than a text."""
    return bool(parsed) and not isinstance(parsed[0], str)


def _has_value(parsed: list[Any]) -> bool:
    value = parsed[0]
    return not hasattr(value, "doit") or type(value.doit()).__name__ not in ("NaN", "ComplexInfinity")


def _bounds_a_variable(expression: Any) -> bool:
    """Whether an expression is an inequality of a variable and a number, such as `x > 3`."""
    if not getattr(expression, "is_Relational", False):
        return False
    return (
        len(expression.free_symbols) == 1
        and (expression.lhs.is_Symbol or expression.rhs.is_Symbol)
        and bool(expression.lhs.is_number or expression.rhs.is_number)
    )


def _leading_zeros(expression: Any) -> int:
    """The number of zeros after the decimal point of a number, less one; 0 for anything else than a number."""
    if not getattr(expression, "is_number", False):
        return 0
    try:
        exponent = Decimal(str(abs(expression).evalf(3))).adjusted()
    except (ArithmeticError, TypeError, AttributeError):  # no finite number
        return 0
    return min(_MOST_ZEROS, max(0, -exponent - 2))


def _become_quiet() -> None:
    """Sends library output and warnings to /dev/null, so that the requester gets only answers."""
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)


if __name__ == "__main__":
    main()
