"""Runs environments in threads: each episode has its own thread and event loop, from construction to `close`."""

from __future__ import annotations

import asyncio
import inspect
import logging
import selectors
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from rl_core.errors import ConfigError
from rl_core.interfaces import Action, Environment, Prompt, StepResult, ToolSchema, require_awaitable
from rl_rollout.environment_calls import EnvironmentFailure, caught, next_structural_tag, offered_tools
from rl_rollout.held_interpreter import place_in

T = TypeVar("T")
_LOGGER = logging.getLogger(__name__)
_GRACE_S = 1.0
"""Seconds that a thread with an abandoned call may take to begin closing the environment. A thread that takes longer is
abandoned too."""


class LeftThreads:
    """Counts threads that hang in an abandoned call, because a thread cannot be killed."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def add(self, thread: threading.Thread) -> None:
        """Adds a hanging thread."""
        self._threads.append(thread)

    def count(self) -> int:
        """Number of threads that still hang."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return len(self._threads)


class ThreadedEnvironment(Environment):
    """Runs one environment in its own thread.

    If a caller stops waiting for a call, the call is cancelled at its next `await` in the thread. A thread that blocks
    cannot be killed and is abandoned: it closes the environment when its call returns, and does not keep the process
    alive.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        left: LeftThreads,
        watched: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Starts the thread, in which each call runs in the context `watched()`.

        Raises ConfigError if the machine cannot start another thread.
        """
        self._make = make
        self._left = left
        self._watched = watched
        self.busy_at = ""
        self._environment: Environment | None = None
        self._was_given_up = False
        try:
            # A poll selector needs no file descriptor, unlike epoll, and accepts any descriptor, unlike select.
            self._loop = asyncio.SelectorEventLoop(selectors.PollSelector())
        except OSError as error:
            raise _no_room(error) from error
        self._closed = asyncio.Event()
        self._beginning = threading.Lock()
        self._begun_last: list[tuple[Coroutine[Any, Any, Any], Future[Any]]] = []
        """The last two scheduled calls, which `_run` cancels if the loop ends before they start. Two can be waiting to
        start: an abandoned call, and `close`."""
        self._thread = threading.Thread(target=self._run, name="environment", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._loop.close()
            raise _no_room(error) from error

    async def reset(self) -> Prompt:
        """Constructs the environment and calls its `reset`, both in the thread, because construction may block too."""

        async def make_and_reset() -> Prompt:
            self._environment = self._make()
            return await require_awaitable(self._environment.reset(), "reset")

        return await self._in_thread(make_and_reset)

    async def tools(self) -> Sequence[ToolSchema]:
        """See `offered_tools`."""
        return await self._in_thread(lambda: offered_tools(self._made))

    async def structural_tag(self, example_call: str | None) -> str | None:
        """See `next_structural_tag`."""
        return await self._in_thread(lambda: next_structural_tag(self._made, example_call))

    async def step(self, action: Action) -> StepResult:
        """See `Environment.step`."""
        return await self._in_thread(lambda: require_awaitable(self._made.step(action), "step"))

    async def close(self) -> None:
        """Closes the environment and ends the thread. If an abandoned call still blocks the thread, returns after 1 s;
        the thread closes the environment and ends as soon as that call returns."""
        has_begun: Future[None] = Future()
        if self._loop.is_closed():
            return
        closing = self._begun(self._close(has_begun))
        if self._was_given_up:
            try:
                await asyncio.wait_for(asyncio.wrap_future(has_begun), _GRACE_S)
            except TimeoutError:
                self._leave(closing)
                return
            except asyncio.CancelledError:
                self._leave(closing)
                raise
        try:
            await asyncio.wrap_future(closing)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Otherwise the environment has ended its thread's loop, and there is nothing left to close.

    def _leave(self, closing: Future[None]) -> None:
        self._left.add(self._thread)
        others = self._left.count() - 1
        _LOGGER.warning(
            "an environment's thread is still busy with a call that timed out or was cancelled; the thread is "
            "abandoned (%d others hang too)",
            others,
        )
        closing.add_done_callback(_log_failure)

    @property
    def _made(self) -> Environment:
        assert self._environment is not None, "reset was not called"
        return self._environment

    def _place(self) -> str:
        """The function that runs in the thread, as `place_in` returns it."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        frames = reversed(traceback.extract_stack(frame)) if frame else ()
        return place_in("".join(f'  File "{one.filename}", line {one.lineno} in {one.name}\n' for one in frames))

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._until_closed())
        except BaseException as error:
            # A task that the environment started has raised this. The end of the loop cancels the running call.
            _LOGGER.warning("an environment ended its own thread: %s: %s", type(error).__name__, error)
        finally:
            with self._beginning:
                for coroutine, future in self._begun_last:
                    # The loop ended before this scheduled call started: cancel it, or its caller would wait forever.
                    if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                        coroutine.close()
                        future.cancel()

    async def _until_closed(self) -> None:
        await self._closed.wait()

    async def _close(self, has_begun: Future[None]) -> None:
        if has_begun.set_running_or_notify_cancel():
            has_begun.set_result(None)
        try:
            if self._environment is not None:
                await caught(self._environment.close)
        finally:
            self._closed.set()

    def _begun(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Schedules `coroutine` in the thread, and returns the future of its result. The future is cancelled if the
        environment has ended the thread's loop."""
        with self._beginning:
            try:
                future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            except RuntimeError:  # the loop is closed
                coroutine.close()
                future = Future()
                future.cancel()
            self._begun_last = [*self._begun_last[-1:], (coroutine, future)]
            return future

    async def _in_thread(self, call: Callable[[], Awaitable[T]]) -> T:
        async def in_thread() -> T | KeyboardInterrupt:
            with self._watched():
                try:
                    return await caught(call)
                except KeyboardInterrupt as error:
                    return error  # raising it here would end this thread's loop

        if self._loop.is_closed():
            raise EnvironmentFailure("EnvironmentEnded", "the environment ended its own thread")
        try:
            answer = await asyncio.wrap_future(self._begun(in_thread()))
        except asyncio.CancelledError:
            self._was_given_up = True
            self.busy_at = self._place()
            raise
        if isinstance(answer, KeyboardInterrupt):
            raise answer
        return answer


def _no_room(error: Exception) -> ConfigError:
    return ConfigError(
        f"could not start a thread for another environment ({error}): limit the number of threads with this key, or "
        "raise the machine's limits (ulimit -u, ulimit -n)",
        key="environment.num_workers",
    )


def _log_failure(closing: Future[None]) -> None:
    if not closing.cancelled() and closing.exception() is not None:
        _LOGGER.warning("closing an abandoned environment failed", exc_info=closing.exception())
