"""Runs environments in processes: starts and calls them from the controller. Each process runs `environment_process`.

A process plays one episode at a time, so that killing it affects no other episode. It is reused for further episodes
until it dies, or until the controller stops waiting for a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from rl_core.interfaces import Action, Environment, Prompt, Row, StepResult, ToolSchema
from rl_rollout.environment_calls import EnvironmentFailure
from rl_rollout.environment_process import LENGTH, CallAnswer, Request
from rl_rollout.held_interpreter import place_in

_END_S = 5.0
"""Longest wait for a killed process to end. In Python 3.11, asyncio also waits until the process's pipes are closed,
but a process that has left the group may keep them open."""


_STACKS_TRIES, _STACKS_S = 10, 0.01
"""How often, and after how many seconds, to look for the stacks that a process writes at a signal."""


def request_of(call: str, arguments: tuple[Any, ...], number: int = 0) -> bytes:
    """Returns a request in the form in which it is sent."""
    request = pickle.dumps(Request(call=call, arguments=pickle.dumps(arguments), number=number))
    return LENGTH.pack(len(request)) + request


async def answer_from(answers: asyncio.StreamReader) -> CallAnswer:
    """Reads the next answer. Raises IncompleteReadError if the process has ended."""
    (length,) = LENGTH.unpack(await answers.readexactly(LENGTH.size))
    return pickle.loads(await answers.readexactly(length))


def value_in(answer: CallAnswer) -> Any:
    """Returns the value of an answer. Raises what its failure says: KeyboardInterrupt or EnvironmentFailure."""
    if answer.failure is None:
        return answer.value
    if answer.failure[0] == "KeyboardInterrupt":
        raise KeyboardInterrupt
    raise EnvironmentFailure(*answer.failure)


class EnvironmentProcess:
    """A process in its own session and process group. So Ctrl-C does not reach it, and killing the group also kills the
    processes that the environment started."""

    def __init__(self, process: asyncio.subprocess.Process, stacks: IO[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stacks = stacks
        self._requests, self.answers = process.stdin, process.stdout
        self.is_usable = True
        self.busy_at = ""
        """The function that ran when a call was abandoned."""

    @classmethod
    async def start(cls) -> Self:
        """Starts Python with `environment_process`."""
        descriptor, name = tempfile.mkstemp()
        Path(name).unlink()
        stacks = os.fdopen(descriptor, "rb")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rl_rollout.environment_process",
            str(stacks.fileno()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Else texts would have another `hash` in each process, and equal responses other rewards.
            env={"PYTHONHASHSEED": "0", **os.environ},
            start_new_session=True,
            pass_fds=[stacks.fileno()],
        )
        return cls(process, stacks)

    async def ask(self, call: str, *arguments: Any) -> Any:
        """Sends a request and returns the answer. If the wait is cancelled, kills the process, because it cannot take
        another request.

        Raises:
            EnvironmentFailure: the environment raised something, or its process ended.
            KeyboardInterrupt: the environment raised KeyboardInterrupt.
        """
        if not self.is_usable:
            raise EnvironmentFailure("EnvironmentEnded", "the environment's process has ended")
        self.is_usable = False
        try:
            answer = await self._exchange(request_of(call, arguments))
        except BaseException:
            self.note_place()
            self.kill()
            raise
        self.is_usable = True
        return value_in(answer)

    async def send(self, request: bytes) -> None:
        """Sends a request without waiting for the answer, which arrives in `answers`. Raises ConnectionError if the
        process has ended."""
        self._requests.write(request)
        await self._requests.drain()

    def note_place(self) -> None:
        """Sets `busy_at`, if the process still runs."""
        with contextlib.suppress(OSError):
            self._process.send_signal(signal.SIGUSR1)
            for _ in range(_STACKS_TRIES):
                self.busy_at = place_in(os.pread(self._stacks.fileno(), 1 << 20, 0).decode(errors="replace"))
                if self.busy_at:
                    break
                time.sleep(_STACKS_S)

    async def end(self) -> None:
        """Kills the process group, and waits for the process to end, but not for processes that have left the group."""
        self.is_usable = False
        self.kill()
        self._stacks.close()
        self._requests.close()
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            # asyncio has no public way to close the pipe of the answers.
            self._process._transport.close()  # pyright: ignore[reportAttributeAccessIssue]

    def kill(self) -> None:
        """Sends SIGKILL to the process group; a process that has left the group survives."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _exchange(self, request: bytes) -> CallAnswer:
        try:
            await self.send(request)
            return await answer_from(self.answers)
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self._process.wait()
            raise EnvironmentFailure("EnvironmentEnded", f"the environment's process ended with code {code}") from None


class ProcessEnvironment(Environment):
    """Runs the environment of one episode in a process that has loaded the environment's class."""

    def __init__(self, process: EnvironmentProcess, factory: bytes, row: Row, options: Mapping[str, Any]) -> None:
        self._process = process
        self._made_of = (factory, dict(row), dict(options))

    @property
    def busy_at(self) -> str:
        """The function that ran when a call was abandoned."""
        return self._process.busy_at

    async def reset(self) -> Prompt:
        """Constructs the environment in the process and calls its `reset`."""
        return await self._process.ask("reset", *self._made_of)

    async def tools(self) -> Sequence[ToolSchema]:
        """See `offered_tools`."""
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
