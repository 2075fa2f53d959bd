"""Computes a request only once in the server, even if the client sends it several times."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import attrs

from rl_core.errors import GenerationError

_MAX_KEPT_BYTES = 256 * 2**20


@attrs.define(eq=False)
class _Call:
    body: bytes
    task: asyncio.Task[bytes]


class Calls:
    """Joins a repeated request to the running one, or returns the finished answer.

    Finished answers are kept, because a client repeats its request if the answer was lost on the way. When they exceed
    `max_kept_bytes`, the oldest are dropped. Failed requests are not kept; if repeated, they are computed again.
    """

    def __init__(self, *, max_kept_bytes: int = _MAX_KEPT_BYTES) -> None:
        self._max_kept_bytes = max_kept_bytes
        self._running: dict[str, _Call] = {}
        self._finished: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()
        self._kept_bytes = 0

    async def answer(self, sample_id: str, body: bytes, compute: Callable[[], Coroutine[Any, Any, bytes]]) -> bytes:
        """Runs `compute` and returns its answer. If the id is known, waits for its running `compute` instead, or
        returns its kept answer.

        Args:
            sample_id: the request's id.
            body: the encoded request. Raises GenerationError if the id was used with another body.
            compute: computes the answer; goes on if the client's connection is lost.
        """
        finished = self._finished.get(sample_id)
        if finished is not None:
            _require_same(sample_id, finished[0], body)
            return finished[1]
        call = self._running.get(sample_id)
        if call is None:
            call = _Call(body, asyncio.ensure_future(compute()))
            self._running[sample_id] = call
            call.task.add_done_callback(lambda task: self._done(sample_id, body, task))
        _require_same(sample_id, call.body, body)
        await asyncio.wait({call.task})
        if call.task.cancelled():
            raise GenerationError(f"sample {sample_id} was cancelled")
        return call.task.result()

    def cancel(self, sample_ids: Iterable[str]) -> None:
        """Cancels requests whose answer is no longer needed."""
        for sample_id in sample_ids:
            if sample_id in self._running:
                self._running[sample_id].task.cancel()

    def _done(self, sample_id: str, body: bytes, task: asyncio.Task[bytes]) -> None:
        del self._running[sample_id]
        if not task.cancelled() and task.exception() is None:
            self._keep(sample_id, body, task.result())

    def _keep(self, sample_id: str, body: bytes, answer: bytes) -> None:
        self._finished[sample_id] = body, answer
        self._kept_bytes += len(body) + len(answer)
        while self._kept_bytes > self._max_kept_bytes:
            _, (old_body, old_answer) = self._finished.popitem(last=False)
            self._kept_bytes -= len(old_body) + len(old_answer)


def _require_same(sample_id: str, known: bytes, body: bytes) -> None:
    if known != body:
        raise GenerationError(f"sample id {sample_id!r} was used for another request; every request needs its own")
