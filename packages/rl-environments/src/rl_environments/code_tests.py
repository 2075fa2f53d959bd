"""Parses program tests from rows and decides whether an outcome passes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rl_core.errors import DataError
from rl_core.interfaces import Row
from rl_environments.sandbox import Outcome, Test

_EXPECTED = (
    "a list of {'input': text, 'output': text} (stdin and stdout), {'function': name, 'input': [arguments], 'output': "
    "value}, {'check': code that raises on failure} or only that code, as text; or {'inputs': [...], 'outputs': [...], "
    "'fn_name': name}"
)
_NEARLY = {"rel_tol": 1e-6, "abs_tol": 1e-9}


@attrs.frozen(kw_only=True)
class ExpectedTest:
    """A test and its expected result, which never enters the sandbox."""

    test: Test
    output: Any = None
    """Expected text on stdout, or expected return value of the function. A test with a `check` does not use it."""

    def passes(self, outcome: Outcome) -> bool:
        """Whether the program ended without error and produced the expected result."""
        if not outcome.is_clean:
            return False
        if self.test.function is not None:
            return outcome.is_complete and is_equal(outcome.value, self.output)
        if self.test.check is not None:
            return outcome.is_complete
        return _lines(outcome.stdout) == _lines(self.output)


def expected_tests(row: Row) -> list[ExpectedTest]:
    """Reads the tests from the row's `tests`, or else from `reward_spec.ground_truth`. Either may be JSON text, because
    a Parquet column has a single type.

    Raises:
        DataError: there are no tests, or one is invalid.
    """
    name, given = "tests", row.get("tests")
    spec = row.get("reward_spec")
    if given is None and isinstance(spec, Mapping):
        name, given = "reward_spec.ground_truth", spec.get("ground_truth")
    try:
        found = [_expected_test(item) for item in _listed(_decoded(given))]
    except (TypeError, ValueError, KeyError) as error:
        raise DataError(f"a code row needs {name}: {_EXPECTED}; got {given!r:.200} ({error})") from error
    if not found:
        columns = ", ".join(map(str, row))
        raise DataError(f"a code row needs tests: {_EXPECTED}; got {given!r:.200} (the row has {columns})")
    return found


def is_equal(value: Any, expected: Any) -> bool:
    """Compares a JSON value with the expected one. Tuples equal lists, booleans do not equal integers, and floats may
    differ by a relative 1e-6 or an absolute 1e-9."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, float) or isinstance(expected, float):
        numbers = all(isinstance(number, int | float) for number in (value, expected))
        return numbers and (value == expected or _is_close(value, expected))
    if isinstance(value, list) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(is_equal, value, expected))
    if isinstance(value, dict) and isinstance(expected, Mapping):
        return value.keys() == expected.keys() and all(is_equal(value[key], expected[key]) for key in value)
    return value == expected


def _is_close(value: float, expected: float) -> bool:
    try:
        return math.isclose(value, expected, **_NEARLY)
    except OverflowError:  # an integer that no float can represent
        return False


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _decoded(given: Any) -> Any:
    return json.loads(given) if isinstance(given, str) else given


def _listed(given: Any) -> Sequence[Any]:
    """Returns one item per test; converts a mapping with a list of inputs and a list of outputs."""
    if not isinstance(given, Mapping):
        return () if given is None else list(given)
    inputs, outputs, name = given["inputs"], given["outputs"], given.get("fn_name")
    if len(inputs) != len(outputs):
        raise ValueError(f"got {len(inputs)} inputs and {len(outputs)} outputs; expected one output per input")
    return [{"function": name, "input": one, "output": other} for one, other in zip(inputs, outputs, strict=True)]


def _expected_test(item: Any) -> ExpectedTest:
    if isinstance(item, str):
        return ExpectedTest(test=Test(check=item))
    if not isinstance(item, Mapping):
        raise TypeError(f"got a test of type {type(item).__name__}; expected a mapping or text")
    check = item.get("check")
    if check is not None:
        return ExpectedTest(test=Test(check=_text(check)))
    if item.get("function") is None:
        return ExpectedTest(test=Test(stdin=_text(item["input"])), output=_text(item["output"]))
    # A text column holds the arguments and the output as JSON.
    arguments, output = _decoded(item["input"]), item["output"]
    if isinstance(item["input"], str):
        output = _decoded(output)
    if isinstance(arguments, Mapping) or not isinstance(arguments, Sequence):
        raise TypeError(f"got arguments of type {type(arguments).__name__}; expected a list")
    json.dumps(arguments)
    return ExpectedTest(test=Test(function=_text(item["function"]), arguments=list(arguments)), output=output)


def _text(given: Any) -> str:
    if not isinstance(given, str):
        raise TypeError(f"got {given!r:.50}; expected text")
    return given
