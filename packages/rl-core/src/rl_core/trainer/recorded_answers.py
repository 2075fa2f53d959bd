"""Records the engines' answers while a group is played, so that a resumed run can continue the group.

A resumed run plays a group in progress again, and its generator sends the same requests, because group, sample and turn
determine prompt, parameters and seed. A request with a recorded answer gets this answer, without an engine. An
unfinished response (stop reason `abort`) is a recorded answer too: the generator continues it in a new request, so its
tokens keep their log-probs and versions. Any other request goes to the engine, for example if an environment makes
another observation than before.

Generators need no code for this, because a context variable, which the tasks of a group inherit, identifies the group
of each request.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from rl_core.interfaces import Completion, GenerateRequest, Sampler
from rl_core.trainer.stored_groups import Answers


class GroupAnswers:
    """Records the answers that a group in progress has got so far.

    consumes     the requests of the group's samples (`answer`)
    produces     `so_far`, for a checkpoint
    waits for    the engine, unless an earlier run recorded the answer
    unblocked by the engine's answer, which is unfinished after `InferenceClient.abort`
    """

    def __init__(self, start_version: int, recorded: Answers | None = None) -> None:
        """`start_version`: the policy version with which the group started. `recorded`: answers of an earlier run."""
        self.start_version = start_version
        self._recorded = dict(recorded or {})
        """Answers of an earlier run that no request of this run has used yet. Each is used once."""
        self._given: dict[str, tuple[Completion, ...]] = {}
        self._running: dict[str, asyncio.Future[None]] = {}

    @property
    def so_far(self) -> Answers:
        """Request → its answer, in this run or an earlier one; empty if no answer has tokens."""
        answers = {**self._recorded, **self._given}
        return answers if any(one.tokens for answer in answers.values() for one in answer) else {}

    @property
    def running(self) -> Mapping[str, asyncio.Future[None]]:
        """The `sample_id` of each request that an engine is working on → a future that is done when `so_far` has the
        answer, or when the request failed."""
        return self._running

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which `RecordingSampler` records requests in this object, also requests of tasks that are created
        in the context."""
        token = _GROUP.set(self)
        try:
            yield
        finally:
            _GROUP.reset(token)

    async def answer(self, request: GenerateRequest, client: Sampler) -> tuple[Completion, ...]:
        """Returns the recorded answer to this request or, if there is none, the answer of `client`, which is then
        recorded. Raises whatever `client` raises."""
        key = request_key(request)
        if key in self._recorded:
            self._given[key] = self._recorded.pop(key)
            return self._given[key]
        answered = self._running[request.sample_id] = asyncio.get_running_loop().create_future()
        try:
            self._given[key] = await client.generate(request)
            return self._given[key]
        finally:
            self._running.pop(request.sample_id, None)
            answered.set_result(None)


_GROUP: ContextVar[GroupAnswers | None] = ContextVar("the group that is being played", default=None)


class RecordingSampler:
    """The sampler of a run in which generation runs ahead. It records answers within `GroupAnswers.recording`, that is,
    while a training group is played, but not in evaluations."""

    def __init__(self, client: Sampler) -> None:
        self._client = client

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        """See `Sampler.generate`."""
        group = _GROUP.get()
        if group is None:
            return await self._client.generate(request)
        return await group.answer(request, self._client)


def request_key(request: GenerateRequest) -> str:
    """A digest of everything in the request except its ids. It is the same in every process."""
    asked = (tuple(request.prompt_tokens), request.params, request.seed, request.num_samples)
    return hashlib.blake2b(repr(asked).encode(), digest_size=16).hexdigest()
