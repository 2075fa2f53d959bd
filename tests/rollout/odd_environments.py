"""Environments that block, raise, exit, and die. Other processes import this module, so it imports little."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError
from rl_core.interfaces import Environment, StepResult


class Blocks(Environment):
    """Blocks the thread for `row["blocks_s"]` in each step. Records the thread and the event loop of every call in
    `row["notes"]`.
    """

    offers_tools = True

    def __init__(self, row: Any, options: Any) -> None:
        self._row = row
        self._note("made", None)

    async def reset(self) -> Any:
        self._note("reset", asyncio.get_running_loop())
        return self._row["prompt"]

    async def tools(self) -> list[Any]:
        self._note("tools", asyncio.get_running_loop())
        return []

    async def step(self, action: Any) -> StepResult:
        self._note("step", asyncio.get_running_loop())
        time.sleep(self._row.get("blocks_s", 0.0))
        return StepResult(reward=0.25, done=True)

    async def close(self) -> None:
        self._note("close", asyncio.get_running_loop())

    def _note(self, what: str, loop: Any) -> None:
        self._row["notes"].append((what, threading.get_ident(), loop))


class Throws(Blocks):
    """Raises the error `row["raises"]` in the call `row["where"]`, after a short wait if `row["waits"]`."""

    def __init__(self, row: Any, options: Any) -> None:
        super().__init__(row, options)
        self._throw("made")

    async def reset(self) -> Any:
        await self._throw_in("reset")
        return await super().reset()

    async def tools(self) -> list[Any]:
        await self._throw_in("tools")
        return await super().tools()

    async def step(self, action: Any) -> StepResult:
        await self._throw_in("step")
        return await super().step(action)

    async def close(self) -> None:
        await self._throw_in("close")
        return await super().close()

    async def _throw_in(self, where: str) -> None:
        if self._row["where"] == where and self._row.get("waits"):
            await asyncio.sleep(0.001)
        self._throw(where)

    def _throw(self, where: str) -> None:
        if self._row["where"] == where:
            raise RAISED[self._row["raises"]]


RAISED = {
    "SystemExit": SystemExit(0),
    "CancelledError": asyncio.CancelledError("not yours"),
    "GeneratorExit": GeneratorExit("gone"),
    "TimeoutError": TimeoutError("its own"),
    "ConfigError": ConfigError("its own"),
    "KeyboardInterrupt": KeyboardInterrupt("pressed"),
}


class HasASynchronousMethod(Blocks):
    """The method that `row["synchronous"]` names, `reset` or `step`, returns its result instead of an awaitable."""

    def reset(self) -> Any:
        return self._row["prompt"] if self._row["synchronous"] == "reset" else super().reset()

    def step(self, action: Any) -> Any:
        return StepResult(reward=1.0, done=True) if self._row["synchronous"] == "step" else super().step(action)


class EndsItsLoop(Blocks):
    """Its step starts a task that calls `sys.exit`, unless `row["exits"]` is False."""

    async def step(self, action: Any) -> StepResult:
        if not self._row.get("exits", True):
            return await super().step(action)

        async def leave() -> None:
            sys.exit(3)

        self._task = asyncio.create_task(leave())
        await asyncio.sleep(1000)
        raise AssertionError


class InItsOwnProcess(Environment):
    """Each step fails as `row["does"]` says, or returns the id of its process as the reward. Before a step blocks, it
    creates a file in the directory `row["blocks"]`."""

    placement = "process"

    def __init__(self, row: Any, options: Any) -> None:
        self._row = row
        self._turns = 0

    async def reset(self) -> Any:
        print("printed text must not reach the answers")
        return self._row["prompt"]

    async def step(self, action: Any) -> StepResult:
        self._turns += 1
        if self._row["does"] == "blocks":
            Path(self._row["blocks"], str(os.getpid())).touch()
            time.sleep(1000)
        if self._row["does"] == "dies":
            os._exit(7)
        if self._row["does"] == "does not pickle":
            return StepResult(reward=0.0, done=True, observation=lambda: "no")  # pyright: ignore[reportArgumentType]
        return StepResult(reward=float(os.getpid()), done=True, metrics={"turns": self._turns})


class KnownOnlyHere:
    """A value of a row that only the process that made it can unpickle."""

    def __reduce__(self) -> Any:
        return _unpickled_in, (os.getpid(),)


def _unpickled_in(pid: int) -> KnownOnlyHere:
    if os.getpid() != pid:
        raise ModuleNotFoundError("No module named 'of_the_recipe'")
    return KnownOnlyHere()


class LeavesADaemon(InItsOwnProcess):
    """Forks a process that leaves the process group, and so survives, with the environment's pipes open."""

    async def reset(self) -> Any:
        self._daemon = os.fork()
        if not self._daemon:
            os.setsid()
            time.sleep(600.0)
            os._exit(0)
        return self._row["prompt"]

    async def step(self, action: Any) -> StepResult:
        return StepResult(reward=0.0, done=True, metrics={"daemon": self._daemon})
