"""How an episode's environment is called: in the place that its factory names, with a deadline, its tools checked."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, get_args

from rl_core.errors import ConfigError, DataError, DeadlineError
from rl_core.interfaces import (
    Action,
    Environment,
    EnvironmentFactory,
    Placement,
    PlacementKind,
    Prompt,
    Row,
    StepResult,
    ToolSchema,
    require_tools,
)

T = TypeVar("T")
_LOGGER = logging.getLogger(__name__)
_GRACE_S = 1.0
"""So long a thread whose call was given up may take to come back and close its environment before it is left alone."""


def open_environment(factory: EnvironmentFactory, row: Row, options: Mapping[str, Any]) -> Environment:
    """An environment for one episode, where its factory's `placement` says. Raises ConfigError as `placement_of`."""
    if placement_of(factory) == "thread":
        return ThreadedEnvironment(lambda: factory(row, options))
    return factory(row, options)


def placement_of(factory: EnvironmentFactory, where: str = "") -> PlacementKind:
    """Where the factory's environments run.

    Args:
        where: opens the message: the configuration key that chose the factory.

    Raises:
        ConfigError: a placement that is none, or that this generator cannot do.
    """
    placement = factory.placement if isinstance(factory, Placement) else "in_process"
    name = getattr(factory, "__name__", type(factory).__name__)
    known = get_args(PlacementKind)
    if placement not in known:
        raise ConfigError(
            f"{where}{name}.placement is {placement!r:.80}; expected one of {', '.join(known)}, as an "
            "attribute of the class or function itself: it is read before an episode starts"
        )
    if placement == "process":
        raise ConfigError(
            f"{where}{name}.placement is 'process', and the generator `environment` starts no processes for "
            "environments; use 'thread', in which the environment may start its own and wait for it"
        )
    return placement


async def offered_tools(environment: Environment) -> Sequence[ToolSchema]:
    """The functions that the environment offers after its `reset`. Raises DataError if they are not tools."""
    tools = getattr(environment, "tools", None)
    # Data of that name is the environment's own affair.
    if not callable(tools):
        return ()
    offered = tools()
    if not inspect.isawaitable(offered):
        raise DataError(
            f"the environment's `tools` returned {type(offered).__name__}; it is `async def tools(self)`, see "
            "rl_core.interfaces.Tools"
        )
    return require_tools(await offered)


async def within(call: Awaitable[T], timeout_s: float, name: str) -> T:
    """The environment's answer. Raises DeadlineError."""
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await call
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise DeadlineError(f"waited {timeout_s:g} s (environment.timeout_s) for the environment's `{name}`") from error


class ThreadedEnvironment:
    """An environment that lives in a thread of its own, with an event loop of its own, from its making to its `close`.

    A call that is given up is cancelled in the thread, which has an effect once it awaits something. A thread that
    blocks cannot be ended: it is left alone, closes the environment when it comes back, and does not keep the process
    from ending.
    """

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._environment: Environment | None = None
        self._loop = asyncio.new_event_loop()
        self._closed = asyncio.Event()
        self._was_given_up = False
        threading.Thread(target=self._run, name="environment", daemon=True).start()

    async def reset(self) -> Prompt:
        """Makes the environment too: that may block as any call may."""

        async def make_and_reset() -> Prompt:
            self._environment = self._make()
            return await self._environment.reset()

        return await self._in_thread(make_and_reset)

    async def tools(self) -> Sequence[ToolSchema]:
        """Its tools; none if it is not `Tools`."""
        return await self._in_thread(lambda: offered_tools(self._made))

    async def step(self, action: Action) -> StepResult:
        """See `Environment.step`."""
        return await self._in_thread(lambda: self._made.step(action))

    async def close(self) -> None:
        """Closes it and ends the thread; later, if the thread is busy with a call that was given up."""
        has_begun: Future[None] = Future()
        closing = asyncio.run_coroutine_threadsafe(self._close(has_begun), self._loop)
        if self._was_given_up:
            try:
                await asyncio.wait_for(asyncio.wrap_future(has_begun), _GRACE_S)
            except TimeoutError:
                _LOGGER.warning("an environment's thread is still busy with a call that was given up; it is left alone")
                closing.add_done_callback(_log_failure)
                return
        await asyncio.wrap_future(closing)

    @property
    def _made(self) -> Environment:
        assert self._environment is not None, "reset comes first"
        return self._environment

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        await self._closed.wait()

    async def _close(self, has_begun: Future[None]) -> None:
        if has_begun.set_running_or_notify_cancel():
            has_begun.set_result(None)
        try:
            if self._environment is not None:
                await self._environment.close()
        finally:
            self._closed.set()

    async def _in_thread(self, call: Callable[[], Awaitable[T]]) -> T:
        async def in_thread() -> T:
            return await call()

        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(in_thread(), self._loop))
        except asyncio.CancelledError:
            self._was_given_up = True
            raise


def _log_failure(closing: Future[None]) -> None:
    if not closing.cancelled() and closing.exception() is not None:
        _LOGGER.warning("closing an environment that was left alone failed", exc_info=closing.exception())
