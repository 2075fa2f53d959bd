"""The controller's side of environments in processes; `environment_process.py` is the other side.

A process plays one episode at a time, so that ending it affects no other episode. It is reused until it dies, or until
a call of its episode is abandoned.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rl_core.interfaces import Action, Prompt, Row, StepResult, ToolSchema
from rl_rollout.environment_calls import EnvironmentFailure
from rl_rollout.environment_process import LENGTH, Answer, Request


class EnvironmentProcess:
    """One process in its own session and process group, so that the processes that the environment started are killed
    with it, and Ctrl-C does not reach it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._requests, self._answers = process.stdin, process.stdout
        self.is_usable = True

    @classmethod
    async def start(cls) -> Self:
        """Starts Python with `environment_process`."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rl_rollout.environment_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        return cls(process)

    async def ask(self, call: str, *arguments: Any) -> Any:
        """Returns the answer. If the wait is cancelled, the process is ended, because it cannot take another request.

        Raises:
            EnvironmentFailure: the environment raised something, or its process ended.
            KeyboardInterrupt: the environment raised it.
        """
        if not self.is_usable:
            raise EnvironmentFailure("EnvironmentEnded", "the environment's process has ended")
        self.is_usable = False
        try:
            answer = await self._exchange(pickle.dumps(Request(call=call, arguments=arguments)))
        except BaseException:
            self.kill()
            raise
        self.is_usable = True
        if answer.failure is None:
            return answer.value
        if answer.failure[0] == "KeyboardInterrupt":
            raise KeyboardInterrupt
        raise EnvironmentFailure(*answer.failure)

    async def end(self) -> None:
        """Kills the process group, and waits for the process to end."""
        self.is_usable = False
        self.kill()
        self._requests.close()
        await self._process.wait()

    def kill(self) -> None:
        """Sends SIGKILL to the process group; a process that has left the group survives."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _exchange(self, request: bytes) -> Answer:
        try:
            self._requests.write(LENGTH.pack(len(request)) + request)
            await self._requests.drain()
            (length,) = LENGTH.unpack(await self._answers.readexactly(LENGTH.size))
            return pickle.loads(await self._answers.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self._process.wait()
            raise EnvironmentFailure("EnvironmentEnded", f"the environment's process ended with code {code}") from None


class ProcessEnvironment:
    """The environment of one episode, in a process that has loaded its factory."""

    def __init__(self, process: EnvironmentProcess, factory: bytes, row: Row, options: Mapping[str, Any]) -> None:
        self._process = process
        self._made_of = (factory, dict(row), dict(options))

    async def reset(self) -> Prompt:
        """Also constructs the environment."""
        return await self._process.ask("reset", *self._made_of)

    async def tools(self) -> Sequence[ToolSchema]:
        """Its tools; none if it is not `Tools`."""
        return await self._process.ask("tools")

    async def structural_tag(self, example_call: str | None) -> str | None:
        """See `next_structural_tag`."""
        return await self._process.ask("structural_tag", example_call)

    async def step(self, action: Action) -> StepResult:
        """See `Environment.step`."""
        return await self._process.ask("step", action)

    async def close(self) -> None:
        """Closes the environment; does nothing if its process has ended."""
        if self._process.is_usable:
            await self._process.ask("close")
