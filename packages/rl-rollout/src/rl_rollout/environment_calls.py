"""Functions that call an environment in any placement (thread, process, event loop). They set a deadline, check the
tools, and convert any exception to an EnvironmentFailure, which fails only one sample."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, Self, TypeVar

from rl_core.errors import DataError, DeadlineError, RLError, raised_at
from rl_core.interfaces import (
    Environment,
    ToolSchema,
    require_awaitable,
    require_tools,
)
from rl_core.tasks import is_foreign

T = TypeVar("T")


class EnvironmentFailure(Exception):
    """Holds the type and message of an exception that an environment raised. Both are strings, because the exception
    may be any `BaseException` and may have been raised in another process."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Describes `error`. If `error` is not an RLError, names the line of code that raised it."""
        place = "" if isinstance(error, RLError) else raised_at(error)
        return cls(type(error).__name__, f"{error} {place}".strip())

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.args[1]}"


async def answered(
    call: Callable[[], Awaitable[T]], timeout_s: float, name: str, environment: object | None = None
) -> T:
    """Calls the environment and returns its answer. Sets no deadline for a call that returns without awaiting anything:
    a deadline could not end such a call. If none of an episode's calls awaits anything, setting four deadlines would
    take a quarter of the episode's time.

    `environment` may have an attribute `busy_at`, which names the function that runs when the deadline has passed.

    Raises:
        EnvironmentFailure: the environment raised.
        DeadlineError: the environment did not answer in time.
    """
    begun = asyncio.get_running_loop().time()
    coroutine = caught(call)
    try:
        waits_for = coroutine.send(None)
    except StopIteration as answer:
        return answer.value
    deadline = asyncio.timeout_at(begun + timeout_s)
    try:
        async with deadline:
            return await _rest(coroutine, waits_for)
    except TimeoutError as error:
        if not deadline.expired():
            raise
        place = getattr(environment, "busy_at", "")
        raise DeadlineError(
            f"waited {timeout_s:g} s (environment.timeout_s) for the environment's `{name}`{place and f', in {place}'}"
        ) from error


@types.coroutine
def _rest(coroutine: Coroutine[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    """Runs the rest of a coroutine that has started and now awaits `waits_for`."""
    try:
        while True:
            try:
                yield waits_for
            except BaseException as error:
                waits_for = coroutine.throw(error)
            else:
                waits_for = coroutine.send(None)
    except StopIteration as answer:
        return answer.value


async def caught(call: Callable[[], Awaitable[T]]) -> T:
    """Awaits `call` and returns its result. KeyboardInterrupt and the cancellation of this task are raised unchanged;
    any other exception is converted to EnvironmentFailure."""
    task = asyncio.current_task()
    try:
        return await call()
    except EnvironmentFailure:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or is_foreign(error, task):
            raise EnvironmentFailure.of(error) from error
        raise


async def offered_tools(environment: Environment) -> Sequence[ToolSchema]:
    """Returns the functions that the environment offers after its `reset`. Raises DataError if a tool is invalid."""
    return require_tools(await require_awaitable(environment.tools(), "tools"))


async def next_structural_tag(environment: Environment, example_call: str | None) -> str | None:
    """Returns the grammar of the environment's next response, or None. Raises DataError if the environment returns
    another type."""
    tag = await require_awaitable(environment.structural_tag(example_call), "structural_tag")
    if not isinstance(tag, str | None):
        raise DataError(
            f"the environment's `structural_tag` returned {type(tag).__name__}, expected JSON text or None; see "
            "rl_core.interfaces.Environment"
        )
    return tag
