"""One rank on one dedicated thread of the controller's process: no Ray, and never on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl_core.errors import DeadlineError, RLError, WorkerError
from rl_core.interfaces import Backend, RankInfo, WorkerSpec
from rl_core.workers.rank import RankHost


class InlineRank:
    """Rank 0 of 1."""

    def __init__(self, role: str, timeout_s: float):
        self._role = role
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"rl-{role}")
        self._host: RankHost | None = None

    async def start(self, backend: Backend, spec: WorkerSpec) -> None:
        """Builds the worker."""
        self._host = await self._run("start", lambda: RankHost(backend, spec, RankInfo()))

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Awaits the worker's `method`. Raises WorkerError, DeadlineError; a user's mistake (RLError) comes through as it is."""
        host = self._started()
        return await self._run(method, lambda: host.call(method, *args, **kwargs))

    async def publish(self, *args: Any) -> Any:
        """Awaits `RankHost.publish`."""
        host = self._started()
        return await self._run("publish", lambda: host.publish(*args))

    async def close(self) -> None:
        """Ends the worker and its thread."""
        if self._host is not None:
            await self.call("close")
            self._host = None
        self._thread.shutdown(wait=False)

    def _started(self) -> RankHost:
        if self._host is None:
            raise WorkerError(f"{self._role} rank 0: not started, or already closed")
        return self._host

    async def _run(self, phase: str, function: Callable[[], Any]) -> Any:
        future = asyncio.get_running_loop().run_in_executor(self._thread, function)
        try:
            return await asyncio.wait_for(asyncio.shield(future), self._timeout_s)
        except TimeoutError as error:
            if future.done() and future.exception() is error:
                raise WorkerError(f"{self._role} rank 0 failed in {phase}: {type(error).__name__}: {error}") from error
            raise DeadlineError(
                f"{self._role} rank 0 did not finish {phase} within {self._timeout_s:g} s (trainer.worker_timeout_s)"
            ) from error
        except RLError:
            raise
        except Exception as error:
            raise WorkerError(f"{self._role} rank 0 failed in {phase}: {type(error).__name__}: {error}") from error
