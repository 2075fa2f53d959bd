"""Parses program tests from rows and decides whether an outcome passes.

Each public layout is read and compared as its authors' grader does:

    {"input": "1 2\\n", "output": "3\\n"}                         our own; stdin and stdout are text
    {"function": "add", "input": [1, 2], "output": 3}           our own
    {"input": "1\\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}
                                                                LiveCodeBench, DeepCoder: one JSON value per line
    {"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}    APPS, TACO, PRIME (verl's `prime_code`); inputs may also
                                                                be text with one JSON value per line, and an output may
                                                                be wrapped in a list
    {"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}     PrimeIntellect
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import attrs

from rl_core.errors import DataError
from rl_core.interfaces import Row
from rl_environments.sandbox import ProgramOutcome, Test

_EXPECTED = (
    "a list of {'input': text, 'output': text} (stdin and stdout), {'function': name, 'input': [arguments], 'output': "
    "value}, {'check': code that raises on failure} or only that code, as text; or {'inputs': [...], 'outputs': [...], "
    "'fn_name': name}; or tests as LiveCodeBench writes them (docs/environments.md)"
)
_KEYS = ("input", "output", "function", "check", "fn_name", "testtype", "type", "metadata")
_SCRIPT, _CALL = ("stdin", "stdin_stdout"), ("functional", "function_call", "call_based")
_COLUMNS = ("tests", "reward_spec.ground_truth", "input_output", "public_test_cases", "verification_info")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.Import, ast.ImportFrom)
_NEARLY = {"rel_tol": 1e-6, "abs_tol": 1e-9}
_AS_NUMPY = {"rel_tol": 1e-5, "abs_tol": 1e-8}
"""The tolerance of numpy.allclose, with which the graders of APPS, TACO and PRIME compare printed numbers."""


@attrs.frozen(kw_only=True)
class ExpectedTest:
    """A test and its expected result, which never enters the sandbox."""

    test: Test
    output: Any = None
    """Expected text on stdout, or expected return value of the function. A test with a `check` does not use it."""
    is_of_apps: bool = False
    """Whether to compare as the graders of APPS, TACO and PRIME do: printed numbers may differ by a relative 1e-5,
    empty lines do not count, and a returned value may be the first item of the expected list."""

    def passes(self, outcome: ProgramOutcome) -> bool:
        """Whether the program ended without error and produced the expected result."""
        if not outcome.is_clean:
            return False
        if self.test.check is not None:
            return outcome.is_complete
        if self.test.function is None:
            return _is_printed(outcome.stdout, self.output, is_of_apps=self.is_of_apps)
        wrapped = isinstance(self.output, list | tuple) and self.output if self.is_of_apps else ()
        accepted = [self.output, *list(wrapped or ())[:1]]
        # Python's own equality, in which 1 equals True, is what the graders of public data sets use.
        return outcome.is_complete and any(
            is_equal(outcome.value, each) or (self.test.has_imports and outcome.value == each) for each in accepted
        )


def expected_tests(row: Row) -> list[ExpectedTest]:
    """Reads the tests from the first of `_COLUMNS` that the row has. A column may be JSON text, because a Parquet
    column has a single type.

    Raises:
        DataError: there are no tests, or one is invalid.
    """
    name, given = _given(row)
    try:
        found = [_numbered(number, item, row) for number, item in enumerate(_listed(_decoded(given), row), start=1)]
        _require_one_kind(found)
    except (TypeError, ValueError, KeyError, SyntaxError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else error
        raise DataError(f"a code row needs {name}: {_EXPECTED}; got {given!r:.200} ({problem})") from error
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
        return numbers and (value == expected or _is_close(value, expected, _NEARLY))
    if isinstance(value, list) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(is_equal, value, expected))
    if isinstance(value, dict) and isinstance(expected, Mapping):
        return value.keys() == expected.keys() and all(is_equal(value[key], expected[key]) for key in value)
    return value == expected


def _is_close(value: float | Decimal, expected: float | Decimal, tolerance: Mapping[str, float]) -> bool:
    try:
        return math.isclose(value, expected, **tolerance)
    except (OverflowError, ValueError):  # an integer that no float can represent, or no number
        return False


def _is_printed(printed: str, expected: str, *, is_of_apps: bool) -> bool:
    """Compares line by line, without surrounding whitespace. Lines of numbers are equal if the numbers are."""
    lines, right = ([line.strip() for line in text.strip().split("\n")] for text in (printed, expected))
    if is_of_apps:
        lines, right = list(filter(None, lines)), list(filter(None, right))
    return len(lines) == len(right) and all(
        line == other or _are_same_numbers(line.split(), other.split(), is_of_apps=is_of_apps)
        for line, other in zip(lines, right, strict=True)
    )


def _are_same_numbers(printed: Sequence[str], expected: Sequence[str], *, is_of_apps: bool) -> bool:
    # As in the authors' graders, only numbers that are not all integers may differ.
    has_fractions = any("." in text or "e" in text.lower() for text in (*printed, *expected))
    try:
        return len(printed) == len(expected) and all(
            one == other or (is_of_apps and has_fractions and _is_close(one, other, _AS_NUMPY))
            for one, other in zip(map(Decimal, printed), map(Decimal, expected), strict=True)
        )
    except InvalidOperation:  # not a number
        return False


def _given(row: Row) -> tuple[str, Any]:
    """Returns the name and the value of the column with the tests; the value is None if there is none."""
    spec = row.get("reward_spec")
    truth = spec.get("ground_truth") if isinstance(spec, Mapping) else None
    for name in _COLUMNS:
        value = truth if name == "reward_spec.ground_truth" else row.get(name)
        if value is not None:
            return name, value
    return "tests", None


def _decoded(given: Any) -> Any:
    """Parses JSON text, or a mapping as Python writes it."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError:
        if given.startswith(("{'", "[{'")):
            return ast.literal_eval(given)
        raise


def _listed(given: Any, row: Row) -> Iterator[Any]:
    """Yields one item per test; converts a mapping with a list of inputs and a list of outputs."""
    if isinstance(given, Mapping) and "test_cases" in given:
        if given.get("language", "python") != "python":
            raise ValueError(f"got the language {given['language']!r}; only Python programs can be run")
        given = _decoded(given["test_cases"])
    if not isinstance(given, Mapping):
        if _given(row)[0] == "public_test_cases":
            given = [*given, *_private_tests(row.get("private_test_cases"))]
        yield from () if given is None else given
        return
    inputs, outputs, name = given["inputs"], given["outputs"], given.get("fn_name")
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple):
        raise TypeError("inputs and outputs must be lists")
    _require_known(given, ("inputs", "outputs", "fn_name"))
    if len(inputs) != len(outputs):
        raise ValueError(f"got {len(inputs)} inputs and {len(outputs)} outputs; expected one output per input")
    for one, other in zip(inputs, outputs, strict=True):
        yield {"input": one, "output": other, "type": "function_call" if name else "stdin_stdout", "fn_name": name}


def _private_tests(given: Any) -> Sequence[Any]:
    try:
        return _decoded(given or None) or ()
    except ValueError:
        raise ValueError(
            "private_test_cases is no JSON; LiveCodeBench compresses a pickle, which can run code and is not opened "
            "here. Convert it once, if you trust its source: json.loads(pickle.loads(zlib.decompress(base64.b64decode("
            "text)))); or remove the column to use only public_test_cases"
        ) from None


def _numbered(number: int, item: Any, row: Row) -> ExpectedTest:
    try:
        return _expected_test(item, row)
    except (TypeError, ValueError, KeyError, SyntaxError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"test {number}: {problem}") from error


def _expected_test(item: Any, row: Row) -> ExpectedTest:
    if isinstance(item, str):
        if not item.lstrip().startswith("{"):
            return _checking(item)
        item = json.loads(item)
    if not isinstance(item, Mapping):
        raise TypeError(f"got a test of type {type(item).__name__}; expected a mapping or text")
    item = {key: value for key, value in item.items() if value is not None}
    _require_known(item, _KEYS)
    if "check" in item:
        _require_known(item, ("check",))
        return _checking(_text(item["check"]))
    name, is_public = _function(item, row), not {"testtype", "type", "metadata", "fn_name"}.isdisjoint(item)
    is_of_apps = "type" in item or "fn_name" in item
    if name is None:
        test = Test(stdin=_joined(item["input"]), has_imports=is_public)
        return ExpectedTest(test=test, output=_joined(item["output"]), is_of_apps=is_of_apps)
    if not _text(name).isidentifier():
        raise ValueError(f"got the function {name!r:.50}; expected a name, such as 'add'")
    arguments, output = _call(item["input"], item["output"], has_lines="function" not in item)
    test = Test(function=name, arguments=arguments, has_imports=is_public)
    return ExpectedTest(test=test, output=output, is_of_apps=is_of_apps)


def _require_known(given: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = [key for key, value in given.items() if value is not None and key not in known]
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; expected {', '.join(known)}")


def _function(item: Mapping[str, Any], row: Row) -> Any:
    """Returns the name of the function that the test calls; None if the test runs the program as a script."""
    kind = item.get("testtype", item.get("type"))
    if kind not in (None, *_SCRIPT, *_CALL):
        raise ValueError(f"unknown kind {kind!r}; expected one of {', '.join((*_SCRIPT, *_CALL))}")
    names = (item.get("function"), item.get("fn_name"), _named(item.get("metadata")))
    name = next(filter(None, names), None)
    if kind in _SCRIPT and name is not None:
        raise ValueError(f"got the kind {kind!r} and the function {name!r}; a test of a function is functional")
    if kind in _CALL:
        name = name or _named(row.get("metadata"))
        if name is None:
            raise ValueError("a functional test needs the function's name, as metadata.func_name or fn_name")
    return name


def _named(metadata: Any) -> Any:
    """Returns `func_name` of a metadata column, which may be JSON text."""
    try:
        metadata = _decoded(metadata)
    except ValueError:
        return None
    return metadata.get("func_name") if isinstance(metadata, Mapping) else None


def _call(given: Any, output: Any, *, has_lines: bool) -> tuple[Any, Any]:
    """Returns the arguments and the expected value. Text has one JSON value per line, one per argument; in our own
    layout it is the JSON list of the arguments."""
    if isinstance(given, str):
        try:
            lines = [json.loads(line) for line in given.split("\n") if line.strip()] if has_lines else None
            given, output = json.loads(given) if lines is None else lines, _decoded(output)
        except ValueError as error:
            expected = "one JSON value per line" if has_lines else "a JSON list of arguments"
            raise ValueError(f"input and output as text must be JSON, the input {expected}: {error}") from error
    if isinstance(given, Mapping) or not isinstance(given, Sequence):
        raise TypeError(f"got arguments of type {type(given).__name__}; expected a list")
    json.dumps(given)
    if not is_equal(json.loads(json.dumps(output)), output):
        raise ValueError(f"the output {output!r:.80} is no JSON value, so nothing that a function returns equals it")
    first = given[0] if given else None
    if isinstance(first, Mapping) and first and all(str(key).lstrip("-").isdecimal() for key in first):
        raise ValueError("the first argument is a mapping with integer keys, which JSON turns to text")
    return list(given), output


def _checking(code: str) -> ExpectedTest:
    """Raises ValueError if no program could fail the check, for example because it only defines functions."""
    if not any(map(_may_raise, ast.parse(code).body)):
        raise ValueError(f"the check {code!r:.80} can never fail: it needs an assert or a call outside of functions")
    return ExpectedTest(test=Test(check=code))


def _may_raise(node: ast.AST) -> bool:
    if isinstance(
        node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda | ast.Import | ast.ImportFrom
    ):
        return False
    is_raising = isinstance(node, ast.Assert | ast.Raise | ast.Call)
    return is_raising or any(map(_may_raise, ast.iter_child_nodes(node)))


def _require_one_kind(tests: Sequence[ExpectedTest]) -> None:
    kinds = {test.test.function is None for test in tests if test.test.check is None}
    if len(kinds) == 2:
        raise ValueError("some tests call a function and some read stdout; one program cannot be both")


def _joined(given: Any) -> str:
    """Returns text, or lines as text."""
    is_list_of_text = isinstance(given, list | tuple) and all(isinstance(line, str) for line in given)
    return "\n".join(given) if is_list_of_text else _text(given)


def _text(given: Any) -> str:
    if not isinstance(given, str):
        raise TypeError(f"got {given!r:.50}; expected text")
    return given
