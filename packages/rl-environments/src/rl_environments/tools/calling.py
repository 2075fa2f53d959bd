"""Runs the calls of one turn concurrently, each with a deadline. Every call gets an answer.

A call can go wrong in many ways: it cannot be parsed, names an unknown function or has invalid arguments, or its
function raises or takes too long. In all these cases the answer says what was wrong, so that the policy can correct it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import json
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import attrs

from rl_core.errors import GenerationError, nearest
from rl_environments.tools.call_formats import BrokenCall, Call
from rl_environments.tools.functions import ToolFunction, WrongArguments

MOST_LEFT_THREADS = 200
"""A function that hangs past its deadline cannot be stopped, so its thread stays. If a process has this many such
threads, further calls of synchronous functions raise GenerationError, which fails their samples."""
_left_threads: set[threading.Thread] = set()


@attrs.frozen(kw_only=True)
class Answer:
    """The answer to a call."""

    name: str | None
    """The function's name; None if the call could not be parsed."""
    text: str
    is_wrong: bool = False
    """Whether the call went wrong, as listed in the module's docstring."""


async def run_calls(
    calls: Sequence[Call | BrokenCall],
    tools: Mapping[str, ToolFunction],
    *,
    timeout_s: float,
    max_calls: int,
    max_characters: int,
) -> list[Answer]:
    """Returns an answer to each call, in the order of the calls.

    Args:
        timeout_s: deadline of each call.
        max_calls: maximum number of calls; further calls are not run, and their answers say so.
        max_characters: maximum length of an answer; a longer one is cut and says so.

    Raises:
        GenerationError: too many earlier calls still hang after their deadline.
    """

    async def answer(number: int, call: Call | BrokenCall) -> Answer:
        if number >= max_calls:
            return _wrong(call, f"at most {max_calls} calls in one turn; this one was not made")
        return await _answer(call, tools, timeout_s)

    answers = await asyncio.gather(*[answer(number, call) for number, call in enumerate(calls)])
    return [attrs.evolve(each, text=_cut(each.text, max_characters)) for each in answers]


async def _answer(call: Call | BrokenCall, tools: Mapping[str, ToolFunction], timeout_s: float) -> Answer:
    if isinstance(call, BrokenCall):
        return _wrong(call, call.problem)
    tool = tools.get(call.name)
    if tool is None:
        known = ", ".join(tools)
        return _wrong(call, f"there is no function {call.name!r:.80}; available: {known}.{nearest(call.name, tools)}")
    try:
        arguments = tool.checked(call.arguments, is_text=call.is_text)
    except WrongArguments as error:
        return _wrong(call, str(error))
    try:
        async with asyncio.timeout(timeout_s):
            outcome = await _outcome(tool.function, arguments, call.name)
    except TimeoutError:
        # The deadline has passed. A TimeoutError that the function itself raises is returned by `_outcome`.
        return _wrong(call, f"no answer within {timeout_s:g} s")
    if isinstance(outcome, BaseException):
        return _wrong(call, f"{type(outcome).__name__}: {outcome}".rstrip(": "))
    return Answer(name=call.name, text=_as_text(outcome))


async def _outcome(function: Callable[..., Any], arguments: Mapping[str, Any], name: str) -> Any:
    """Calls the function and returns its return value or the exception that it raised."""
    if inspect.iscoroutinefunction(function):
        return await _awaited(lambda: function(**arguments))
    returned = await _in_a_thread(function, arguments, name)
    # A decorator may hide that the function is async.
    return await _awaited(lambda: returned) if inspect.isawaitable(returned) else returned


async def _awaited(call: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await call()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return error
    except (Exception, SystemExit) as error:
        return error


async def _in_a_thread(function: Callable[..., Any], arguments: Mapping[str, Any], name: str) -> Any:
    """Like `_outcome`, in a new thread that is never joined: a hanging thread of a pool would block the end of the
    event loop."""
    _left_threads.intersection_update([thread for thread in _left_threads if thread.is_alive()])
    if len(_left_threads) >= MOST_LEFT_THREADS:
        raise GenerationError(
            f"{len(_left_threads)} tool calls hang past their deadline, so {name!r} was not called: give the "
            "function its own deadline, or run the environment with environment.placement=process"
        )
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            outcome: Any = context.run(function, **arguments)
        except BaseException as error:
            outcome = error
        with contextlib.suppress(RuntimeError):  # the event loop may be closed, if the episode has ended
            loop.call_soon_threadsafe(_set, answered, outcome)

    thread = threading.Thread(target=run, name=f"tool-{name}", daemon=True)
    thread.start()
    try:
        return await answered
    except asyncio.CancelledError:
        _left_threads.add(thread)
        raise


def _set(answered: asyncio.Future[Any], outcome: Any) -> None:
    if not answered.done():
        answered.set_result(outcome)


def _wrong(call: Call | BrokenCall, problem: str) -> Answer:
    return Answer(name=call.name if isinstance(call, Call) else None, text=f"Error: {problem}", is_wrong=True)


def _as_text(result: Any) -> str:
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return str(result)


def _cut(text: str, max_characters: int) -> str:
    text = text.encode("utf-8", "replace").decode()  # replaces lone surrogates, which tokenizers refuse
    left = len(text) - max_characters
    return text if left <= 0 else f"{text[:max_characters]}… ({left} more characters)"
