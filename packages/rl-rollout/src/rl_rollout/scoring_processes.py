"""Scores responses in a few processes that each score many at a time, in threads.

A process whose interpreter is held, or that ends, is replaced. Its other responses are then scored again, each alone in
a process of its own (`ProcessEnvironment`), so that only the response whose code hangs or ends the process fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from rl_core.errors import DeadlineError
from rl_core.interfaces import Action, Environment, Prompt, Row, StepResult
from rl_rollout.environment_calls import EnvironmentFailure
from rl_rollout.environment_processes import EnvironmentProcess, answer_from, request_of, value_in

_LOGGER = logging.getLogger(__name__)
MOST_PROCESSES = 4
_BUSY = 8
"""Another process starts when each has this many responses to score."""
GRACE_S = 5.0
"""A process ends a call at its deadline itself. One that has not done so this much later is held by a thread."""


Made = tuple[bytes, Row, Mapping[str, Any]]
"""An environment's pickled factory, its row and its options."""


class ProcessLost(Exception):
    """The process ended, or was ended because a thread held its interpreter."""


class ScoringProcess:
    """A process that scores several responses at a time."""

    def __init__(self, process: EnvironmentProcess) -> None:
        self._process = process
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._writing = asyncio.Lock()
        self._loaded: dict[bytes, asyncio.Future[Any]] = {}
        self.is_usable = True
        self.num_users = 0
        """Number of those that were given the process and have not finished with it."""
        self._reading = asyncio.create_task(self._read())

    async def load(self, factory: bytes, options: Mapping[str, Any]) -> None:
        """Imports the environment and what its options name, once.

        Raises:
            EnvironmentFailure: that is impossible.
            ProcessLost: the process ended.
        """
        if factory not in self._loaded:
            self._loaded[factory] = _quiet(asyncio.ensure_future(self._load(factory, options)))
        await asyncio.shield(self._loaded[factory])

    async def score(self, arguments: tuple[Any, ...], timeout_s: float) -> StepResult:
        """Scores a response; see `EnvironmentHost.score`.

        Raises:
            EnvironmentFailure: the environment raised, or missed its deadline.
            ProcessLost: the process ended, or did not answer.
        """
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                return await self._ask("score", (*arguments, timeout_s))
        except TimeoutError as error:
            self._lose()
            raise ProcessLost from error
        except EnvironmentFailure as error:
            if error.kind == "DeadlineError":  # its thread may run on, so this process gets nothing more to do
                self.is_usable = False
            raise
        finally:
            if not self.is_usable and not self._waiting:
                self._process.kill()

    async def end(self) -> None:
        """Ends the process."""
        self._lose()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._process.end()

    async def _load(self, factory: bytes, options: Mapping[str, Any]) -> None:
        await self._ask("load", (sys.path, factory))
        await self._ask("check", (factory, dict(options)))

    async def _ask(self, call: str, arguments: tuple[Any, ...]) -> Any:
        if not self.is_usable:
            raise ProcessLost
        number = next(self._numbers)
        self._waiting[number] = answer = _quiet(asyncio.get_running_loop().create_future())
        try:
            async with self._writing:  # one request in memory at a time: rows may have megabytes of tests
                await self._process.send(request_of(call, arguments, number))
            return value_in(await answer)
        except ConnectionError as error:
            raise ProcessLost from error
        finally:
            del self._waiting[number]

    async def _read(self) -> None:
        try:
            while True:
                answer = await answer_from(self._process.answers)
                waiting = self._waiting.get(answer.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._lose()

    def _lose(self) -> None:
        self.is_usable = False
        self._process.kill()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ProcessLost())


class ScoringProcesses:
    """The processes of a pool: started when they are needed, at most `MOST_PROCESSES`."""

    def __init__(self, num_workers: int | None) -> None:
        """`num_workers`: the most responses that are scored at a time; None: no limit."""
        self._most = min(MOST_PROCESSES, os.cpu_count() or 1, num_workers or MOST_PROCESSES)
        self._limit = asyncio.Semaphore(num_workers or sys.maxsize)
        self._starting = asyncio.Lock()
        self._all: list[ScoringProcess] = []
        self._imports: dict[bytes, asyncio.Future[None]] = {}
        self._noted: set[str] = set()

    async def import_once(self, factory: bytes, options: Mapping[str, Any]) -> None:
        """Imports the environment, and what its options name, in a process. Raises EnvironmentFailure if that fails."""
        if factory not in self._imports:
            self._imports[factory] = _quiet(asyncio.ensure_future(self._import(factory, options)))
        await asyncio.shield(self._imports[factory])

    def note_once(self, note: str) -> None:
        """Logs a note the first time."""
        if note not in self._noted:
            self._noted.add(note)
            _LOGGER.warning("%s", note)

    async def score(
        self, made_of: tuple[bytes, Row, Mapping[str, Any]], action: Action, timeout_s: float
    ) -> StepResult:
        """Scores a response in the process that has the least to do. Raises the same as `ScoringProcess.score`."""
        async with self._limit, self._one() as process:
            await process.load(made_of[0], made_of[2])
            return await process.score((*made_of, action), timeout_s)

    async def aclose(self) -> None:
        """Ends all processes."""
        processes, self._all = self._all, []
        await asyncio.gather(*(process.end() for process in processes))

    async def _import(self, factory: bytes, options: Mapping[str, Any]) -> None:
        try:
            async with self._one() as process:
                await process.load(factory, options)
        except ProcessLost:
            raise EnvironmentFailure("EnvironmentEnded", "the process that imported it ended") from None

    @contextlib.asynccontextmanager
    async def _one(self) -> AsyncIterator[ScoringProcess]:
        async with self._starting:
            ended = [process for process in self._all if not process.is_usable and not process.num_users]
            self._all = [process for process in self._all if process not in ended]
            await asyncio.gather(*(process.end() for process in ended))
            usable = [process for process in self._all if process.is_usable]
            least = min(usable, key=lambda process: process.num_users, default=None)
            if least is None or (least.num_users >= _BUSY and len(usable) < self._most):
                least = ScoringProcess(await EnvironmentProcess.start())
                self._all.append(least)
            least.num_users += 1
        try:
            yield least
        finally:
            least.num_users -= 1


def _quiet(result: asyncio.Future[Any]) -> asyncio.Future[Any]:
    """The same future; its error is not reported if nobody waits for it any more, as after Ctrl-C."""
    result.add_done_callback(lambda done: done.cancelled() or done.exception())
    return result


class ScoredEnvironment(Environment):
    """The episode of one turn of an environment that only scores the response."""

    def __init__(
        self,
        processes: ScoringProcesses,
        made_of: Made,
        timeout_s: float,
        name: str,
        alone: Callable[[Action], Awaitable[StepResult]],
    ) -> None:
        """`name`: what scores, for messages. `alone`: scores a response in a process of its own."""
        self._processes, self._made_of, self._timeout_s = processes, made_of, timeout_s
        self._name, self._alone = name, alone

    async def reset(self) -> Prompt:
        """Returns the row's prompt."""
        return self._made_of[1]["prompt"]

    async def step(self, action: Action) -> StepResult:
        """Scores the response.

        Raises:
            EnvironmentFailure: the environment raised, missed its deadline, or ended its process.
        """
        try:
            try:
                return await self._processes.score(self._made_of, action, self._timeout_s)
            except ProcessLost:
                return await self._alone(action)
        except (EnvironmentFailure, DeadlineError) as error:
            kind = error.kind if isinstance(error, EnvironmentFailure) else type(error).__name__
            message = str(error.args[-1])
            is_known = kind not in ("DeadlineError", "EnvironmentEnded") or ", in " in message
            raise EnvironmentFailure(kind, message if is_known else f"{message}, in {self._name}") from error
