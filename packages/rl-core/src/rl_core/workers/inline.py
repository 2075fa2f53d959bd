"""A single rank in a dedicated thread of the controller's process, without Ray and outside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Concatenate, Self

from rl_core.batch import Batch
from rl_core.errors import DeadlineError, RLError, WorkerError, raised_at
from rl_core.interfaces import Backend, Plan, RankInfo, Worker, WorkerSpec
from rl_core.tasks import code_of
from rl_core.workers.memory import keep_freed_memory
from rl_core.workers.rank import Abilities, P, Part, R, RankHost


class _Thread:
    """Runs calls in order in a daemon thread: unlike an executor, it lets the process exit during a long call."""

    def __init__(self, name: str):
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Queues a call. The future gets what the function returns or raises."""
        future: Future[Any] = Future()
        self._calls.put((function, future))
        return future

    def end(self) -> None:
        """Ends the thread after the queued calls."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            function, future = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del call, function, future  # else they would keep the call's arguments and result alive


class InlineRank:
    """The only rank of a group, in a thread of this process. Implements `Ranks`."""

    def __init__(self, role: str, timeout_s: float):
        self._role = role
        self._timeout_s = timeout_s
        self._timeout_key = "trainer.worker_start_timeout_s"
        self._stuck_in: str | None = None
        self._thread = _Thread(f"rl-rank-{role}")
        self._host: RankHost | None = None
        self.abilities = Abilities()

    @classmethod
    async def start(cls, backend: Backend, spec: WorkerSpec, *, timeout_s: float, start_timeout_s: float) -> Self:
        """Builds the worker within `start_timeout_s`; `timeout_s` is the deadline of later calls."""
        keep_freed_memory()
        rank = cls(spec.role, start_timeout_s)
        try:
            host = await rank._run("start", lambda: RankHost(backend, spec, RankInfo()))
        except BaseException:
            rank._thread.end()
            raise
        rank._host, rank.abilities = host, host.abilities
        rank._timeout_s, rank._timeout_key = timeout_s, "trainer.worker_timeout_s"
        return rank

    async def call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """See `Ranks.call`. A thread cannot be killed: after a DeadlineError it keeps running, and all later
        calls raise WorkerError."""
        if self._host is None:
            raise WorkerError(f"{self._role} rank 0 cannot run {method.__name__}: it is closed; start a new group")
        host = self._host
        return [await self._run(method.__name__, lambda: host.bound(method)(*args, **kwargs))]

    async def call_on_parts(
        self,
        method: Callable[Concatenate[Any, Batch, Plan, P], R],
        batch: Batch,
        parts: Sequence[Part],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R | None]:
        """See `Ranks.call_on_parts`."""
        return [*await self.call(method, *parts[0].of(batch), *args, **kwargs)]

    async def close(self) -> None:
        """Closes the worker and ends its thread. A worker that missed a deadline is still busy, and is left as it is:
        an error here would replace the DeadlineError, which names the call that hangs."""
        if self._host is None:
            return
        try:
            if self._stuck_in is None:
                await self.call(Worker.close)
        finally:
            self._host = None
            self._thread.end()

    async def _run(self, phase: str, function: Callable[[], Any]) -> Any:
        if self._stuck_in is not None:
            raise WorkerError(f"{self._role} rank 0 cannot run {phase}: it is still busy with {self._stuck_in}")
        future = asyncio.wrap_future(self._thread.submit(lambda: self._answer(phase, function)))
        try:
            return await asyncio.wait_for(asyncio.shield(future), self._timeout_s)
        except TimeoutError as error:
            if future.done() and future.exception() is error:  # the function raised it, not the deadline
                raise WorkerError(f"{self._role} rank 0 failed in {phase}: {type(error).__name__}: {error}") from error
            self._stuck_in = phase
            raise DeadlineError(
                f"{self._role} rank 0 did not finish {phase} within {self._timeout_s:g} s ({self._timeout_key})"
            ) from error
        except RLError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error} {raised_at(error)}"
            raise WorkerError(f"{self._role} rank 0 failed in {phase}: {what}") from error

    def _answer(self, phase: str, function: Callable[[], Any]) -> Any:
        """Calls `function` and returns its result. Runs in the rank's thread. Raises ForeignCodeError for a
        BaseException such as the SystemExit of a loss that calls `sys.exit()`, which would otherwise end the run as if
        it had finished."""
        with code_of(f"{self._role} rank 0 in {phase}"):
            return function()
