"""Runs each environment in the placement that the configuration or the environment's class chooses; by default in a
thread of its own.

| placement    | an episode has                  | a call that misses its deadline                                     |
|--------------|---------------------------------|---------------------------------------------------------------------|
| `thread`     | a thread                        | is cancelled; a thread that blocks is abandoned and counted         |
| `process`    | a process, reused afterwards    | kills the process and its whole process group                       |
| `in_process` | the event loop of all episodes  | is cancelled; a call that blocks stops every episode and deadline   |

With `process`, the environments of reward functions, which only score one response, share a few processes
(`scoring_processes`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import pickle
import resource
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

from rl_core.errors import ConfigError, DeadlineError, GenerationError
from rl_core.interfaces import (
    Action,
    Environment,
    PlacementKind,
    Prompt,
    Row,
    StepResult,
    ToolSchema,
    require_awaitable,
)
from rl_rollout.environment_calls import EnvironmentFailure, answered, next_structural_tag, offered_tools
from rl_rollout.environment_processes import EnvironmentProcess, ProcessEnvironment
from rl_rollout.environment_threads import LeftThreads, ThreadedEnvironment
from rl_rollout.interpreter_watch import WATCH
from rl_rollout.reward_functions import RewardFunctionsEnvironment
from rl_rollout.scoring_processes import ScoredEnvironment, ScoringProcesses

_START_S = 300.0
"""Deadline for a process to start and import the environment. It is long, because many processes may start at once."""
_PROCESSES_PER_CORE = 4
_FILES_PER_THREAD = 2
_OTHER_FILES = 512
MOST_LEFT_THREADS = 1000
"""The run stops when this many threads hang, because a hanging thread does not free its memory."""


class HangingThreads(GenerationError):
    """Too many threads hang in abandoned calls."""


class EnvironmentPool:
    """Provides an environment for each episode.

    consumes     episodes (`opened`)
    produces     environments
    waits for    a free thread or process, of which there are `num_workers`
    unblocked by an episode's end
    """

    def __init__(
        self, *, placement: PlacementKind | None = None, num_workers: int | None = None, max_episodes: int = 1024
    ) -> None:
        """
        Args:
            placement: placement of all environments; None: `Environment.placement`.
            num_workers: maximum number of threads or processes; None: one thread per episode, or four processes per CPU
                core.
            max_episodes: maximum number of episodes played at a time.
        """
        self._placement: PlacementKind | None = placement
        self._threads = asyncio.Semaphore(num_workers or max_episodes)
        self._processes = asyncio.Semaphore(num_workers or _PROCESSES_PER_CORE * (os.cpu_count() or 1))
        self._max_threads = num_workers or max_episodes
        self._idle: list[EnvironmentProcess] = []
        self._left = LeftThreads()
        self._scoring = ScoringProcesses(num_workers)

    @contextlib.asynccontextmanager
    async def opened(
        self, factory: type[Environment], row: Row, options: Mapping[str, Any], timeout_s: float
    ) -> AsyncIterator[EnvironmentCalls]:
        """Yields the environment of one episode, and closes it at the end of the context.

        Raises:
            ConfigError: the environment cannot run in its placement.
            HangingThreads: too many threads hang.
            DeadlineError: the process did not import the environment in time, or the environment did not close in time
                after an episode without errors.
            EnvironmentFailure: closing the environment failed after an episode without errors.
        """
        kind = placement_of(factory, self._placement)
        where = {"thread": self._in_thread, "process": self._in_process}.get(kind, _in_place)
        if kind == "process" and issubclass(factory, RewardFunctionsEnvironment):
            where = self._in_scoring_process
        async with where(factory, row, options, timeout_s) as environment:
            # A scored environment sets the deadline itself, because it also waits for a process.
            limit_s = math.inf if isinstance(environment, ScoredEnvironment) else timeout_s
            calls = EnvironmentCalls(environment, limit_s, factory)
            try:
                yield calls
            except BaseException:
                with contextlib.suppress(EnvironmentFailure, DeadlineError):
                    await calls.close()
                raise
            await calls.close()

    async def aclose(self) -> None:
        """Ends the processes that play no episode."""
        idle, self._idle = self._idle, []
        await asyncio.gather(self._scoring.aclose(), *(process.end() for process in idle))

    @contextlib.asynccontextmanager
    async def _in_scoring_process(
        self, factory: type[Environment], row: Row, options: Mapping[str, Any], timeout_s: float
    ) -> AsyncIterator[Environment]:
        """Falls back to a thread if the configuration sets no placement and the code cannot be imported elsewhere."""
        assert issubclass(factory, RewardFunctionsEnvironment)
        made_of = (pickled(factory), dict(row), dict(options))
        try:
            await self._scoring.import_once(made_of[0], options)
        except EnvironmentFailure as error:
            said = f"{factory.scored_by(options)} cannot be imported in another process ({error})"
            if self._placement is not None:
                raise ConfigError(f"{said}; choose the placement thread", key="environment.placement") from error
            self._scoring.note_once(f"{said}, so it runs in threads, where a call that never returns may end the run")
            async with self._in_thread(factory, row, options, timeout_s) as environment:
                yield environment
            return

        async def alone(action: Action) -> StepResult:
            async with self._in_process(factory, row, options, timeout_s) as environment:
                calls = EnvironmentCalls(environment, timeout_s, factory)
                await calls.reset()
                return await calls.step(action)

        yield ScoredEnvironment(self._scoring, made_of, timeout_s, factory.scored_by(options), alone)

    @contextlib.asynccontextmanager
    async def _in_thread(
        self, factory: type[Environment], row: Row, options: Mapping[str, Any], timeout_s: float
    ) -> AsyncIterator[Environment]:
        async with self._threads:
            if (count := self._left.count()) >= MOST_LEFT_THREADS:
                raise HangingThreads(
                    f"{count} threads of environments hang in calls that timed out or were cancelled, and a thread "
                    "cannot be ended: set environment.placement=process, or give the environment's own waits a timeout"
                )
            _allow_files(_FILES_PER_THREAD * (self._max_threads + count) + _OTHER_FILES)
            watched = partial(WATCH.calling, timeout_s)
            yield ThreadedEnvironment(lambda: factory(row, options), self._left, watched)

    @contextlib.asynccontextmanager
    async def _in_process(
        self, factory: type[Environment], row: Row, options: Mapping[str, Any], timeout_s: float
    ) -> AsyncIterator[Environment]:
        made_by = pickled(factory)
        async with self._processes:
            process = self._idle.pop() if self._idle else await EnvironmentProcess.start()
            try:
                await _loaded(process, made_by)
                yield ProcessEnvironment(process, made_by, row, options)
            finally:
                if process.is_usable:
                    self._idle.append(process)
                else:
                    await process.end()


class EnvironmentCalls:
    """Wraps an environment: each call has a deadline, and raises EnvironmentFailure if the environment raises."""

    def __init__(self, environment: Environment, timeout_s: float, factory: type[Environment]) -> None:
        self._environment = environment
        self._timeout_s = timeout_s
        self._factory = factory

    async def reset(self) -> Prompt:
        """See `Environment.reset`."""
        return await answered(self._environment.reset, self._timeout_s, "reset", self._environment)

    async def tools(self) -> Sequence[ToolSchema]:
        """See `Environment.tools`."""
        if not self._factory.offers_tools:
            return ()
        return await answered(self._environment.tools, self._timeout_s, "tools", self._environment)

    async def structural_tag(self, example_call: str | None) -> str | None:
        """See `Environment.structural_tag`."""
        if not self._factory.forces_responses:
            return None
        asked = partial(self._environment.structural_tag, example_call)
        return await answered(asked, self._timeout_s, "structural_tag", self._environment)

    async def step(self, action: Action) -> StepResult:
        """See `Environment.step`."""
        return await answered(lambda: self._environment.step(action), self._timeout_s, "step", self._environment)

    async def close(self) -> None:
        """See `Environment.close`."""
        await answered(self._environment.close, self._timeout_s, "close", self._environment)


class _InPlace(Environment):
    """Runs an environment in the event loop of all episodes. `reset` constructs it, as in the other placements."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._environment: Environment | None = None

    async def reset(self) -> Prompt:
        self._environment = self._make()
        return await require_awaitable(self._environment.reset(), "reset")

    async def tools(self) -> Sequence[ToolSchema]:
        return await offered_tools(self._made)

    async def structural_tag(self, example_call: str | None) -> str | None:
        return await next_structural_tag(self._made, example_call)

    async def step(self, action: Action) -> StepResult:
        return await require_awaitable(self._made.step(action), "step")

    async def close(self) -> None:
        if self._environment is not None:
            await self._environment.close()

    @property
    def _made(self) -> Environment:
        assert self._environment is not None, "reset was not called"
        return self._environment


@contextlib.asynccontextmanager
async def _in_place(
    factory: type[Environment], row: Row, options: Mapping[str, Any], _: float
) -> AsyncIterator[Environment]:
    yield _InPlace(lambda: factory(row, options))


async def _loaded(process: EnvironmentProcess, factory: bytes) -> None:
    try:
        await answered(lambda: process.ask("load", sys.path, factory), _START_S, "import")
    except DeadlineError as error:
        raise DeadlineError(
            f"waited {_START_S:g} s for a process to start and import the environment; lower environment.num_workers, "
            "or import less in the environment's module"
        ) from error
    except EnvironmentFailure as error:
        raise ConfigError(
            f"the environment cannot be imported in its own process: {error}", key="environment.placement"
        ) from error


def placement_of(
    factory: type[Environment], configured: PlacementKind | None = None, key: str | None = None
) -> PlacementKind:
    """Returns where environments run: the configured placement, else the one that their class declares.

    Args:
        factory: the environments' class.
        configured: the placement from the configuration; None: not configured.
        key: the configuration key that chose the class, for messages.

    Raises:
        ConfigError: an unknown placement, or `process` for a class that cannot be pickled.
    """
    placement = factory.placement
    known = get_args(PlacementKind)
    if placement not in known:
        raise ConfigError(
            f"{factory.__name__}.placement is {placement!r:.80}; expected one of {', '.join(known)}; set "
            "it as an attribute of the class itself, because it is read before an episode starts",
            key=key,
        )
    placement = configured or placement
    if placement == "process":
        pickled(factory, key)
    return placement


def pickled(factory: type[Environment], key: str | None = None) -> bytes:
    """Pickles the class, as its author wrote it, for another process. Raises ConfigError if it cannot be pickled, or if
    it is defined in the main script, which other processes cannot import."""
    try:
        if factory.__module__ == "__main__":
            raise pickle.PicklingError("it is defined in the script that was started, which no other process imports")
        return pickle.dumps(vars(factory).get("adapted_from", factory))
    except Exception as error:
        raise ConfigError(
            f"{factory.__name__} has placement 'process', but cannot be pickled for another process: {error}. "
            "Define it at the top level of a module that can be imported, or choose placement 'thread'",
            key=key,
        ) from error


def _allow_files(count: int) -> None:
    """Increases this process's limit of open files to `count`, or as far towards it as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
        if wanted > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
