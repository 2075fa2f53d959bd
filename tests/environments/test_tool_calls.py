"""The calls of one turn run side by side, and a call that fails is answered with its error."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rl_core.errors import GenerationError
from rl_environments.tools import Answer, BrokenCall, Call, ToolFunction, calling, run_calls


def add(a: int, b: int = 1) -> int:
    """The sum."""
    return a + b


def fail() -> None:
    """Raises."""
    raise ValueError("no\nluck")


def leave() -> None:
    """Tries to end the process."""
    raise SystemExit(3)


async def cancel() -> None:
    """Raises CancelledError although no task was cancelled."""
    raise asyncio.CancelledError


async def own_timeout() -> None:
    """Raises a TimeoutError of its own."""
    raise TimeoutError("mine")


async def sleep_long() -> None:
    """Sleeps."""
    await asyncio.sleep(600)


def table() -> dict[str, Any]:
    """Returns a value that is not text."""
    return {"ü": [1, None]}


def surrogate() -> str:
    """Returns a lone surrogate."""
    return "a\ud800b"


def tools(*functions: Callable[..., Any]) -> dict[str, ToolFunction]:
    return {each.__name__: ToolFunction.of(each) for each in functions}


def run(calls: list[Call | BrokenCall], *functions: Callable[..., Any], **limits: Any) -> list[Answer]:
    settings: dict[str, Any] = {"timeout_s": 60.0, "max_calls": 16, "max_characters": 1000, **limits}
    return asyncio.run(run_calls(calls, tools(*functions), **settings))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (Call(name="ad", arguments={}), "Error: there is no function 'ad'; available: add"),
        (Call(name="add", arguments={}), "Error: argument 'a' is missing"),
        (Call(name="add", arguments={"a": "x"}), "Error: argument 'a' is \"x\""),
        (Call(name="add", arguments={"a": 1, "c": 1}), "Error: there is no argument 'c'"),
        (BrokenCall(problem="the call is not JSON"), "Error: the call is not JSON"),
        (Call(name="fail", arguments={}), "Error: ValueError: no\nluck"),
        (Call(name="leave", arguments={}), "Error: SystemExit: 3"),
        (Call(name="cancel", arguments={}), "Error: CancelledError"),
        (Call(name="own_timeout", arguments={}), "Error: TimeoutError: mine"),
    ],
)
def test_a_wrong_call_is_answered_with_its_fault(call: Call | BrokenCall, text: str):
    (answer,) = run([call], add, fail, leave, cancel, own_timeout)
    assert answer.is_wrong
    assert answer.text.startswith(text)


def test_a_result_is_shown_as_text_or_json_and_answers_are_in_the_order_of_the_calls():
    calls: list[Call | BrokenCall] = [Call(name="table", arguments={}), Call(name="add", arguments={"a": 1})]
    assert run([*calls, Call(name="surrogate", arguments={})], table, add, surrogate) == [
        Answer(name="table", text='{"ü": [1, null]}'),
        Answer(name="add", text="2"),
        Answer(name="surrogate", text="a?b"),
    ]


def test_a_function_that_a_decorator_hides_is_awaited():
    def plain(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return call

    async def double(a: int) -> int:
        """Twice the number."""
        await asyncio.sleep(0)
        return 2 * a

    calls: list[Call | BrokenCall] = [
        Call(name="double", arguments={"a": 4}),
        Call(name="own_timeout", arguments={}),
        Call(name="sleep_long", arguments={}),
    ]
    answers = run(calls, *map(plain, (double, own_timeout, sleep_long)), timeout_s=1.0)
    assert [each.text for each in answers] == ["8", "Error: TimeoutError: mine", "Error: no answer within 1 s"]


def test_calls_of_one_turn_run_side_by_side():
    """Each call waits for all the others. If calls ran one after another, the first would fail after 60 s."""
    barrier = threading.Barrier(3)

    def meet() -> str:
        """Waits for the others."""
        barrier.wait(timeout=60)
        return "met"

    answers = run([Call(name="meet", arguments={})] * 3, meet, timeout_s=200.0)
    assert [answer.text for answer in answers] == ["met"] * 3


def test_a_late_call_is_reported_and_delays_no_other_call():
    """A busy machine may pause the call of `add` beyond a short deadline; a call that hangs misses every deadline."""
    released, returned = threading.Event(), threading.Event()

    def hang() -> str:
        """Blocks until the test releases it."""
        released.wait(timeout=250)
        returned.set()
        return "late"

    calls: list[Call | BrokenCall] = [Call(name=name, arguments={}) for name in ("hang", "sleep_long")]
    calls.append(Call(name="add", arguments={"a": 1}))
    try:
        for timeout_s in (0.5, 5.0, 50.0):
            hung, slept, added = run(calls, hang, sleep_long, add, timeout_s=timeout_s)
            assert not returned.is_set(), "the event loop must not wait for the thread that hangs"
            late = f"Error: no answer within {timeout_s:g} s"
            assert [hung.text, slept.text] == [late] * 2
            if added.text != late:
                break
    finally:
        released.set()
    assert added == Answer(name="add", text="2")


def test_too_many_hanging_functions_are_an_error_and_returned_ones_do_not_count(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calling, "MOST_LEFT_THREADS", 2)
    calling._left_threads.clear()
    released = threading.Event()

    def hang() -> None:
        """Blocks until the test releases it."""
        released.wait(timeout=250)

    hanging: list[Call | BrokenCall] = [Call(name="hang", arguments={})] * 2
    try:
        run(hanging, hang, timeout_s=0.1)
        with pytest.raises(GenerationError, match=r"2 tool calls hang past their deadline.*'add'"):
            run([Call(name="add", arguments={"a": 1})], add)
    finally:
        released.set()
    for thread in list(calling._left_threads):
        thread.join(timeout=100)
    assert run([Call(name="add", arguments={"a": 1})], add)[0].text == "2"


def test_calls_beyond_the_limit_are_not_made_and_long_answers_are_cut():
    made = []

    def note() -> str:
        """Notes."""
        made.append(1)
        return "x" * 30

    answers = run([Call(name="note", arguments={})] * 3, note, max_calls=2, max_characters=10)
    assert len(made) == 2
    assert answers[0].text == "x" * 10 + "… (20 more characters)"
    assert answers[2].text.startswith("Error: at")
