"""The environment `code`: rows, programs in responses, rewards, and episodes through the generator."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import zlib
from typing import Any, ClassVar

import pytest

from rl_core import plugins
from rl_core.errors import ConfigError, DataError
from rl_core.testing.environments import EnvironmentConformance
from rl_environments.code import CodeEnvironment, program_in
from rl_environments.code_tests import expected_tests, is_equal
from rl_environments.sandbox import probe_sandbox
from tests.environments.boxes import SLOTS
from tests.environments.episodes import judged, played

SUM = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 -7\n", "output": "-2"}, {"input": "0 0", "output": "0\n\n"}]
ROW = {"prompt": [{"role": "user", "content": "Add two numbers."}], "tests": SUM}
RIGHT = "Here:\n```python\nprint(sum(map(int, input().split())))\n```\n"
POSITIVE_ONLY = "```\nprint(max(0, sum(map(int, input().split()))))\n```"
ENDLESS = "```python\nwhile True: pass\n```"
OPTIONS = {"slots": SLOTS, "limits": {"cpu_s": 10, "wall_s": 60}}


@pytest.fixture(autouse=True, scope="module")
def _sandbox() -> None:
    try:
        asyncio.run(probe_sandbox())
    except ConfigError as error:
        pytest.skip(str(error))


class TestCodeEnvironment(EnvironmentConformance):
    factory = CodeEnvironment
    row: ClassVar[dict[str, Any]] = ROW
    options: ClassVar[dict[str, Any]] = {**OPTIONS, "reward": "fraction"}
    rewards: ClassVar[dict[Any, float]] = {RIGHT: 1.0, POSITIVE_ONLY: 2 / 3, "no program": 0.0, "```\nprint(\n```": 0.0}


async def test_an_episode_runs_through_the_generator_and_a_hanging_program_earns_no_reward():
    options = {"slots": SLOTS, "reward": "fraction", "limits": {"cpu_s": 1}, "max_tests": 2}
    responses = [RIGHT, POSITIVE_ONLY, ENDLESS, "I do not know."]
    trajectories = await played(CodeEnvironment, {**ROW, "prompt": "Add."}, responses, options)
    assert [trajectory.failure for trajectory in trajectories] == [None] * 4
    rewards = {trajectory.turns[0].response: trajectory.reward for trajectory in trajectories}
    assert rewards == {RIGHT: 1.0, POSITIVE_ONLY: 0.5, ENDLESS: 0.0, "I do not know.": 0.0}
    timed_out = {trajectory.turns[0].response: trajectory.metrics["timed_out"] for trajectory in trajectories}
    assert timed_out[ENDLESS] == 1.0
    assert timed_out[RIGHT] == 0.0


async def test_without_partial_credit_all_tests_have_to_pass():
    for response, reward, passed in ((RIGHT, 1.0, 1.0), (POSITIVE_ONLY, 0.0, 1 / 3)):
        result = await judged(CodeEnvironment, ROW, response, **OPTIONS)
        assert result.reward == result.metrics["accuracy"] == reward
        assert result.metrics["passed"] == passed, "tests after the first failing one must not run"
    assert any(name.startswith("sandbox_") for name in result.metrics)


async def test_functions_and_checks_are_tests_too():
    tests = [
        {"function": "add", "input": [1, 2], "output": 3},
        {"function": "add", "input": [[1], [2]], "output": [1, 2]},
        {"check": "assert add('a', 'b') == 'ab'"},
        "assert add(0.1, 0.2) > 0.3",
    ]
    row = {"prompt": "add", "tests": tests}
    good = await judged(CodeEnvironment, row, "```python\ndef add(a, b):\n    return a + b\n```", **OPTIONS)
    assert good.reward == 1.0
    bad = await judged(CodeEnvironment, row, "```python\ndef add(a, b): return 3\n```", reward="fraction", **OPTIONS)
    assert bad.reward == 0.5  # the first and the last pass: 3 == 3 and 3 > 0.3


ADD = "class Solution:\n    def add(self, a: int, b: List[int]) -> int:\n        return a + b"
FIRST = "def first(xs):\n    return xs[0]"
TOTAL = "def total(xs):\n    return sum(xs)"
DEEP = "def deep(n):\n    return 0 if n == 0 else 1 + deep(n - 1)"
PAIR = "class Solution:\n    def pair(self, xs):\n        return (xs[0], xs[1])"
MEAN = "print(sum(map(float, input().split())) / 2)"
ECHO = "import sys\nprint(sys.stdin.read().strip())"
LCB = {"testtype": "functional", "metadata": {"func_name": "add"}}
STDIN = {"testtype": "stdin", "metadata": {"func_name": None}}


@pytest.mark.parametrize(
    ("column", "tests", "right", "wrong"),
    [
        # LiveCodeBench and DeepCoder
        ("tests", [{"input": "1\n2", "output": "3", **LCB}], ADD, ADD.replace("+", "-")),
        ("tests", [{"input": "1\n2", "output": "3", **LCB, "metadata": '{"func_name": "add"}'}], ADD, "x = 3"),
        ("tests", [{"input": "[1, 2, 3]", "output": "6", "testtype": "functional", "fn_name": "total"}], TOTAL, FIRST),
        ("tests", [{"input": "30000", "output": "30000", "testtype": "functional", "fn_name": "deep"}], DEEP, TOTAL),
        ("tests", [{"input": "[1]", "output": "[1]", **LCB, "metadata": {"func_name": "first"}}],
         "def first(xs): return xs", FIRST),
        ("tests", [{"input": "1 2", "output": "1.5", **STDIN}], MEAN, "print(1.500001)"),
        ("tests", [{"input": "1 2\n", "output": " 1.50 \n\n", **STDIN}], MEAN, "print(1, 5)"),
        ("public_test_cases", [{"input": "5", "output": "5", "testtype": "stdin"}], "print(input())", "print(6)"),
        # APPS, TACO and PRIME, and PrimeIntellect
        ("input_output", {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}, ADD, ADD.replace("+", "-")),
        ("input_output", {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}, ADD.replace("List[int]", "int"), ""),
        ("input_output", {"fn_name": "pair", "inputs": [[[1, 2]]], "outputs": [[[1, 2]]]}, PAIR, FIRST),
        ("tests", [{"input": "[1, 0]", "output": "true", "fn_name": "first"}], FIRST, "first = len"),
        ("tests", {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]}, ADD, ADD.replace("+", "*")),
        ("tests", {"fn_name": "total", "inputs": ["[1, 2]"], "outputs": ["[3]"]}, TOTAL, FIRST),
        ("tests", {"fn_name": "double", "inputs": ['"ab"'], "outputs": ['"abab"']}, "double = lambda x: 2 * x", ECHO),
        ("tests", {"inputs": [["1 2", "3"]], "outputs": [["1 2", "3"]]}, ECHO, "print(input())"),
        ("tests", {"inputs": ["1 2\n"], "outputs": ["1.50001\n"]}, MEAN, "print(1.49)"),
        ("tests", {"inputs": ["1\n\n2\n"], "outputs": ["1\n2\n"], "fn_name": None}, ECHO, "print(2, 1)"),
        ("tests", {"inputs": ["100000"], "outputs": ["100001"]}, "print(100001)", ECHO),
        ("verification_info", {"language": "python", "test_cases": [
            {"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}]}, ADD, "add = max"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_text", [False, True])
async def test_tests_of_public_data_sets_judge_as_their_authors_do(column, tests, right, wrong, is_text):
    row = {"prompt": "", column: json.dumps(tests) if is_text else tests}
    if column == "public_test_cases":
        row["private_test_cases"] = json.dumps([{"input": "7", "output": "7", "testtype": "stdin"}])
    for program, reward in ((right, 1.0), (wrong, 0.0)):
        assert (await judged(CodeEnvironment, row, f"```python\n{program}\n```", **OPTIONS)).reward == reward, program


async def test_names_are_given_only_where_the_authors_give_them_and_are_no_solution():
    own = {"prompt": "", "tests": [{"function": "add", "input": [1, 2], "output": 3}]}
    assert (await judged(CodeEnvironment, own, f"```\n{ADD}\n```", **OPTIONS)).reward == 0.0  # `List` is unknown
    public = {"prompt": "", "tests": {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}}
    assert (await judged(CodeEnvironment, public, "```\nprint(3)\n```", **OPTIONS)).reward == 0.0  # operator.add


def test_pickled_tests_are_refused_with_a_remedy():
    private = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(SUM)))).decode()
    with pytest.raises(DataError, match=r"pickle, which can run code.*remove the column to use only public_test_cases"):
        CodeEnvironment.require_row({"prompt": "", "public_test_cases": "[]", "private_test_cases": private})


def test_a_mapping_may_be_written_as_python_writes_it_and_a_column_of_private_tests_may_be_empty():
    written = str({"language": "python", "test_cases": [{"type": "stdin_stdout", "fn_name": None, **SUM[0]}]})
    assert len(expected_tests({"verification_info": written})) == 1
    assert len(expected_tests({"public_test_cases": json.dumps(SUM[:1]), "private_test_cases": ""})) == 1
    with pytest.raises(DataError, match="malformed"):
        expected_tests({"verification_info": "{'language': open('x')}"})


def test_the_name_of_a_function_may_be_in_the_rows_metadata():
    row = {"public_test_cases": '[{"input": "1", "output": "2", "testtype": "functional"}]'}
    (test,) = expected_tests({**row, "metadata": '{"func_name": "f"}'})
    assert (test.test.function, test.test.arguments, test.output) == ("f", [1], 2)
    with pytest.raises(DataError, match=r"test 1: a functional test needs the function's name"):
        expected_tests({**row, "metadata": "{}"})


async def test_limits_may_be_written_with_an_exponent():
    limits = {"cpu_s": 10.0, "wall_s": 60, "address_space_bytes": 1e9, "disk_bytes": 5e7, "file_bytes": 1e6}
    assert (await judged(CodeEnvironment, ROW, RIGHT, slots=SLOTS, limits=limits)).reward == 1.0


async def test_a_number_that_no_float_can_hold_is_a_wrong_answer():
    row = {"prompt": "half", "tests": [{"function": "f", "input": [], "output": 0.5}]}
    assert (await judged(CodeEnvironment, row, "```\ndef f(): return 10**400\n```", **OPTIONS)).reward == 0.0


async def test_a_program_that_cannot_be_compiled_is_counted():
    result = await judged(CodeEnvironment, ROW, "```python\nprint(\n```", **OPTIONS)
    assert (result.reward, result.metrics["syntax_error"], result.metrics["has_program"]) == (0.0, 1.0, 1.0)


async def test_a_program_that_fails_after_printing_the_answer_does_not_pass():
    row = {"prompt": "", "tests": [{"input": "", "output": "1"}]}
    for ending in ("1/0", "raise SystemExit(1)", "import os; os.abort()"):
        result = await judged(CodeEnvironment, row, f"```\nprint(1, flush=True)\n{ending}\n```", **OPTIONS)
        assert result.reward == 0.0, ending
    assert (await judged(CodeEnvironment, row, "```\nprint(1)\nexit()\n```", **OPTIONS)).reward == 1.0


async def test_programs_cannot_find_answers_or_secret_environment_variables(monkeypatch):
    """Searches the interpreter's objects, the stack frames and the environment variables for the expected output."""
    monkeypatch.setenv("SECRET_ANSWER", "swordfish")
    program = """
import gc, os, sys
def found():
    seen = [repr(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple))]
    frame = sys._getframe()
    while frame:
        seen.append(repr(frame.f_locals))
        frame = frame.f_back
    return any(bytes.fromhex("73776f726466697368").decode() in text for text in [*seen, repr(os.environ)])
print(bytes.fromhex("73776f726466697368").decode() if found() else "not found")
"""
    row = {"prompt": "", "tests": [{"input": "", "output": "swordfish"}]}
    assert (await judged(CodeEnvironment, row, f"```python\n{program}\n```", **OPTIONS)).reward == 0.0
    row["tests"][0]["output"] = "not found"
    assert (await judged(CodeEnvironment, row, f"```python\n{program}\n```", **OPTIONS)).reward == 1.0


def test_the_program_is_the_last_closed_python_block_after_the_thinking():
    assert program_in("```python\na\n```\nthen\n```py\nb\n```\n```text\nc\n```") == "b\n"
    assert program_in("```\na\n```") == "a\n"
    assert program_in("<think>\n```python\na\n```\n</think> none") is None
    assert program_in("<think>hm</think>```python\nb\n```") == "b\n"
    assert program_in("<think>\n```python\na\n```\nhm, no") is None
    assert program_in("```python\na\n") is None
    assert program_in("```json\n{}\n```") is None
    assert program_in("") is None
    assert program_in("1. so:\n   ```python\n   if x:\n     y\n\n   z\n   ```") == "if x:\n  y\n\nz\n"
    assert program_in('  ```\n  a = """\n b\n  """\n  ```') == 'a = """\nb\n"""\n'


def test_rows_have_tests_in_several_forms():
    lists = {"inputs": ["1", "2"], "outputs": ["a", "b"]}
    calls = {"inputs": [[1], [2]], "outputs": [3, 4], "fn_name": "f"}
    assert [test.output for test in expected_tests({"tests": json.dumps(lists)})] == ["a", "b"]
    assert [test.test.arguments for test in expected_tests({"reward_spec": {"ground_truth": calls}})] == [[1], [2]]
    assert expected_tests({"tests": SUM})[0].test.stdin == "1 2\n"
    (text,) = expected_tests({"tests": [{"function": "f", "input": "[1, [2]]", "output": '"x"', "check": None}]})
    assert (text.test.arguments, text.output) == ([1, [2]], "x")


@pytest.mark.parametrize(
    "tests",
    [None, [], {}, "no JSON", [3], [{"input": 1, "output": "1"}], [{"input": "1"}], {"inputs": ["1"], "outputs": []},
     [{"function": "f", "input": 5, "output": 5}], [{"function": "f", "input": [{1}], "output": 5}], 7,
     # A kind, a key or a name that is not understood
     [{"input": "1", "output": "1", "timeout": 3}], {"inputs": ["1"], "outputs": ["1"], "fn": "f"},
     [{"input": "1", "output": "1", "testtype": "interactive"}],
     [{"input": "1", "output": "1", "testtype": "functional"}],
     [{"input": "1", "output": "1", "testtype": "stdin", "fn_name": "f"}], [{"check": "assert 1", "output": "1"}],
     {"language": "rust", "test_cases": [{"input": "1", "output": "1"}]},
     # One program cannot pass both tests
     [{"input": "1", "output": "1"}, {"function": "f", "input": [], "output": 1}],
     # Text that is no JSON, and a mapping that JSON cannot hold
     {"inputs": ["1 2"], "outputs": ["3"], "fn_name": "f"}, {"inputs": ["1"], "outputs": ["three"], "fn_name": "f"},
     {"inputs": [[{"1": 2}]], "outputs": [3], "fn_name": "f"}, [{"function": "f", "input": "1\n2", "output": "3"}],
     {"inputs": ["1"], "outputs": ["NaN"], "fn_name": "f"}, [{"function": "f", "input": [], "output": {1: 2}}],
     {"inputs": "12", "outputs": "34"}, {"inputs": [[1]], "outputs": [2], "fn_name": "f(x)"},
     # A check that cannot fail
     ["f(1) ==", "def check(candidate):\n    assert candidate(1) == 2", "x == 2", '["x"]'],
    ],
)  # fmt: skip
def test_a_row_without_usable_tests_is_refused_before_the_run(tests):
    with pytest.raises(DataError, match="a code row needs"):
        CodeEnvironment.require_row({"prompt": "", "tests": tests})


def test_values_are_compared_as_json_values():
    assert is_equal([1, 2], (1, 2))
    assert is_equal(0.1 + 0.2, 0.3)
    assert is_equal(2, 2.0)
    assert is_equal({"a": [1.0]}, {"a": [1]})
    assert not is_equal(10**400, 1.5)
    assert not is_equal([1.5], [10**400])
    for different in ((1, True), (True, 1), (None, 0), ("1", 1), (1.0, "1.0"), ([1], [1, 2]), ({"a": 1}, {"b": 1})):
        assert not is_equal(*different), different


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rewards": "all"}, r"environment.options.rewards: not an option .* Did you mean 'reward'\?"),
        ({"reward": "some"}, "environment.options.reward: got 'some'; expected one of all, fraction"),
        ({"limits": {"cpu": 3}}, "environment.options.limits: got .*cpu_s"),
        ({"limits": {"cpu_s": 0.5}}, "environment.options.limits.cpu_s: got 0.5; expected an integer"),
        ({"limits": {"cpu_s": float("inf")}}, "environment.options.limits.cpu_s: got inf; expected an integer"),
        ({"limits": {"files": float("nan")}}, "environment.options.limits.files: got nan; expected an integer"),
        ({"readable": "/srv/data"}, "environment.options.readable: got '/srv/data'; expected a list of paths"),
        ({"python": 3}, "environment.options.python: got 3; expected text"),
        ({"code": {"max_tests": 0}}, "environment.options.code.max_tests: got 0; expected at least 1"),
        ({"slots": "2"}, "environment.options.slots: got '2'; expected an integer"),
        ({"slots": 304}, "environment.options.slots: got 304; expected between 1 and 303"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        CodeEnvironment(ROW, options)


def test_options_of_other_environments_are_left_to_them():
    assert CodeEnvironment(ROW, {"code": {"reward": "fraction"}, "mathematics": {"timeout_s": 3}})


def test_the_code_environment_is_installed_under_its_name():
    assert plugins.load("rl_core.environments", "code") is CodeEnvironment
