"""Records the engines' answers while a group is played, so that a resumed run can continue the group.

A resumed run starts the groups that were in progress at the checkpoint from their beginning. Its generator sends the
same requests, because group, sample, turn and earlier answers determine prompt, parameters and seed. A request with a
recorded answer gets this answer, and no engine receives the request. Any other request goes to an engine: it is new, or
differs because an environment returned a different observation this time. Unfinished responses (stop reason `abort`)
are recorded too: the generator continues them in new requests, so their tokens keep their log-probs and versions.

Generators do not have to support this: a context variable, which a group's tasks inherit, identifies the group that
sends a request.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from rl_core.interfaces import Completion, GenerateRequest, Sampler
from rl_core.tasks import code_of
from rl_core.trainer.state.stored_groups import Answers


class GroupAnswers:
    """The answers that a group in progress has received so far.

    consumes     the requests of the group's samples (`answer`)
    produces     `so_far`, for a checkpoint
    waits for    the engine, unless an earlier run recorded the answer
    unblocked by the engine's answer; `InferenceClient.abort`, which makes the engine answer with an unfinished response
    """

    def __init__(self, start_version: int, recorded: Answers | None = None) -> None:
        """`start_version`: the policy version with which the group started. `recorded`: answers of an earlier run."""
        self.start_version = start_version
        self._recorded = dict(recorded or {})
        """Answers of an earlier run that this run has not requested yet. Each is used once."""
        self._given: dict[str, tuple[Completion, ...]] = {}
        self._running: dict[str, asyncio.Future[None]] = {}

    @property
    def so_far(self) -> Answers:
        """All answers by request, including those of an earlier run; empty if none of them has tokens."""
        answers = {**self._recorded, **self._given}
        return answers if any(one.tokens for answer in answers.values() for one in answer) else {}

    @property
    def running(self) -> Mapping[str, asyncio.Future[None]]:
        """The `sample_id` of each request that an engine has → a future that is done when `so_far` has the answer, or
        when the request failed. Requests for forced responses (`SamplingParams.structural_tag`) are left out: an
        unfinished forced response cannot be continued, so nothing is gained by aborting it."""
        return self._running

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which `RecordingSampler` records answers in this object, also for tasks created in the context."""
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
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if request.params.structural_tag is None:
            self._running[request.sample_id] = answered
        try:
            self._given[key] = await client.generate(request)
            return self._given[key]
        finally:
            self._running.pop(request.sample_id, None)
            answered.set_result(None)


_GROUP: ContextVar[GroupAnswers | None] = ContextVar("the group that is being played", default=None)


class RecordingSampler(Sampler):
    """The sampler of a run that generates ahead. Records the answers to requests of a group (`GroupAnswers.recording`),
    but no answers to requests of evaluations."""

    def __init__(self, client: Sampler) -> None:
        self._client = client

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        """See `Sampler.generate`."""
        group = _GROUP.get()
        with code_of(f"the engine client {type(self._client).__name__}"):
            if group is None:
                return await self._client.generate(request)
            return await group.answer(request, self._client)


def request_key(request: GenerateRequest) -> str:
    """A digest of everything in a request except its ids. Equal requests have the same digest in every process."""
    asked = (tuple(map(int, request.prompt_tokens)), request.params, request.seed, request.num_samples)
    return hashlib.blake2b(repr(asked).encode(), digest_size=16).hexdigest()
