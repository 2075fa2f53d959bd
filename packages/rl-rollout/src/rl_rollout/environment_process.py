"""The program that runs in an environment process: `python -m rl_rollout.environment_process`.

consumes     requests of the controller (`environment_processes.py`) on standard input, one at a time; only requests
             `score` run concurrently
produces     one answer per request on standard output; what the environment prints goes to standard error; at SIGUSR1,
             the stacks of all threads in the file that the controller names
waits for    the next request
unblocked by the controller's next request; when the controller ends, this process and those that it started end, even
             during a call
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import pickle
import signal
import struct
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

import attrs

from rl_core.interfaces import Environment, as_environment, require_awaitable
from rl_rollout.environment_calls import EnvironmentFailure, answered, caught, next_structural_tag, offered_tools
from rl_rollout.environment_threads import LeftThreads, ThreadedEnvironment

LENGTH = struct.Struct("<Q")


@attrs.frozen(kw_only=True)
class Request:
    """A request of the controller to call a method of `EnvironmentHost`."""

    call: str
    arguments: bytes
    """A pickled tuple. Pickled on its own, because a value of the user's may fail to be unpickled."""
    number: int = 0
    """Names the request among those that run concurrently."""


@attrs.frozen(kw_only=True)
class CallAnswer:
    """The result of a request: a value or a failure."""

    number: int = 0
    value: Any = None
    failure: tuple[str, str] | None = None
    """Type and message of the exception; None: the call succeeded."""


class EnvironmentHost:
    """Holds the environments of consecutive episodes, one at a time."""

    def __init__(self) -> None:
        self._factories: dict[bytes, type[Environment]] = {}
        self._environment: Environment | None = None
        self._left = LeftThreads()

    async def load(self, path: list[str], factory: bytes) -> None:
        """Imports the pickled class of the environments, with the controller's `sys.path`."""
        if factory not in self._factories:
            sys.path[:] = path
            self._factories[factory] = as_environment(pickle.loads(factory))

    async def reset(self, factory: bytes, row: Any, options: Any) -> Any:
        """Constructs the environment and calls its `reset`."""
        self._environment = self._factories[factory](row, options)
        return await require_awaitable(self._environment.reset(), "reset")

    async def tools(self) -> Any:
        """See `offered_tools`."""
        return await offered_tools(self._made)

    async def structural_tag(self, example_call: str | None) -> Any:
        """See `next_structural_tag`."""
        return await next_structural_tag(self._made, example_call)

    async def step(self, action: Any) -> Any:
        """See `Environment.step`."""
        return await require_awaitable(self._made.step(action), "step")

    async def close(self) -> None:
        """Closes the environment and cancels the tasks that it left running, so that they do not run during the next
        episode."""
        environment, self._environment = self._environment, None
        try:
            if environment is not None:
                await environment.close()
        finally:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    async def check(self, factory: bytes, options: Any) -> None:
        """Checks the options with the environment's own check, which imports what they name."""
        self._factories[factory].require_options(options)

    async def score(self, factory: bytes, row: Any, options: Any, action: Any, timeout_s: float) -> Any:
        """Plays an episode of one turn in a thread, concurrently with others: constructs the environment, passes it the
        action and closes it. `timeout_s` is the deadline of each call."""
        environment = ThreadedEnvironment(lambda: self._factories[factory](row, options), self._left)
        try:
            await answered(environment.reset, timeout_s, "reset", environment)
            return await answered(lambda: environment.step(action), timeout_s, "step", environment)
        finally:
            await environment.close()

    @property
    def _made(self) -> Environment:
        assert self._environment is not None, "reset was not called"
        return self._environment

    async def answer(self, asked: Request) -> bytes:
        """Carries out a request and returns the pickled answer. A request whose arguments cannot be unpickled, or a
        result that cannot be pickled, becomes a failure."""
        try:
            value = await caught(lambda: getattr(self, asked.call)(*pickle.loads(asked.arguments)))
            return pickle.dumps(CallAnswer(number=asked.number, value=value))
        except EnvironmentFailure as error:
            failure = (error.kind, error.args[1])
        except KeyboardInterrupt:
            failure = ("KeyboardInterrupt", "")
        except Exception as error:
            failure = (type(error).__name__, f"its answer cannot be pickled: {error}")
        return pickle.dumps(CallAnswer(number=asked.number, failure=failure))


def _read(source: BinaryIO, loop: asyncio.AbstractEventLoop, requests: asyncio.Queue[bytes]) -> None:
    while len(header := source.read(LENGTH.size)) == LENGTH.size:
        request = source.read(*LENGTH.unpack(header))
        loop.call_soon_threadsafe(requests.put_nowait, request)
    # The controller is gone: nobody waits for whatever the environment does, here or in processes that it started. They
    # are in this process's group, which has its number.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


async def _serve(source: BinaryIO, sink: BinaryIO) -> None:
    host, requests, tasks = EnvironmentHost(), asyncio.Queue[bytes](), set[asyncio.Task[None]]()

    async def carry_out(asked: Request) -> None:
        answer = await host.answer(asked)
        sink.write(LENGTH.pack(len(answer)) + answer)
        sink.flush()

    threading.Thread(target=_read, args=(source, asyncio.get_running_loop(), requests), daemon=True).start()
    while True:
        asked: Request = pickle.loads(await requests.get())
        if asked.call == "score":
            task = asyncio.create_task(carry_out(asked))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        else:
            await carry_out(asked)


def main() -> None:
    """Serves until the controller ends."""
    faulthandler.register(signal.SIGUSR1, file=int(sys.argv[1]), all_threads=True)
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # The environment must not read from the requests or print between the answers.
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    asyncio.run(_serve(source, sink))


if __name__ == "__main__":
    # Pickle stores the name of a class's module, and the controller could not find `CallAnswer` in a module `__main__`.
    from rl_rollout import environment_process

    environment_process.main()
