"""Implements the `local` engine: a thread of this process runs a Hugging Face causal language model with continuous
batching.

It does not use transformers' continuous batching (5.19, `ContinuousBatchingManager`), which draws with
`torch.multinomial` from torch's global generator, so a sample would depend on other running requests. That manager also
has no per-request seed and no stop strings, and its `pause` for changing weights keeps the cache of the old weights.

consumes     requests from the event loop; weight versions from a transport's receiver
produces     completions, returned to the event loop in batches
waits for    a command or work (no deadline, because the thread is idle then)
unblocked by `_post` and `close`; callers wait with a deadline
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import torch

from rl_core.errors import DeadlineError, GenerationError, RLError
from rl_core.interfaces import (
    Completion,
    EngineHealth,
    GenerateRequest,
    InferenceClient,
    Manifest,
    PauseMode,
    Rendezvous,
)
from rl_core.rank_kit.weight_deltas import HeldWeights
from rl_rollout.local.model import StagedWeights, eos_tokens, stage
from rl_rollout.local.rows import Ended, Sample
from rl_rollout.local.scheduler import Scheduler
from rl_rollout.local.stop_strings import StopStringWatch
from rl_transformers.expert_choices import ExpertChoices

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")
ROUTES_KEY = "generator.inference_engine.enable_return_routed_experts"
Load = Callable[[], "tuple[PreTrainedModel, PreTrainedTokenizerBase | None]"]


@attrs.define(eq=False)
class _Call:
    """A running request and the callers that wait for its answer: several callers if the request was repeated."""

    request: GenerateRequest
    completions: dict[int, Completion] = attrs.field(factory=dict)
    waiters: list[asyncio.Future[tuple[Completion, ...]]] = attrs.field(factory=list)


class LocalEngine(InferenceClient):
    """Computes with a model in this process. Create it with `start`, and call its methods on the event loop that called
    `start`."""

    can_score = True
    can_prepare_weights = True

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._calls: dict[str, _Call] = {}
        self._new_calls: list[_Call] = []
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._failure: BaseException | None = None
        self._closed = False
        self._answers: set[asyncio.Future[Any]] = set()
        self._held = HeldWeights()
        # One thread: a sync that missed its deadline still uses `_held`, so the next sync waits for its end.
        self._staging = ThreadPoolExecutor(1, "rl-rollout-local-staging")
        self._staged: tuple[Rendezvous, StagedWeights] | None = None
        self._when_still: list[Callable[[], None]] = []
        self._thread: threading.Thread
        # The thread sets these before `start` returns.
        self._scheduler: Scheduler
        self._tokenizer: PreTrainedTokenizerBase | None
        self._eos_tokens: tuple[int, ...]
        self._max_positions: int | None
        self._vocab_size: int

    @classmethod
    async def start(
        cls,
        load: Load,
        *,
        max_num_seqs: int,
        timeout_s: float,
        num_threads: int | None = None,
        return_routed_experts: bool = False,
        return_kept_tokens: bool = False,
    ) -> LocalEngine:
        """Loads the model on the engine's thread and returns when it can serve.

        Args:
            load: returns the model and its tokenizer. If the tokenizer is None, requests with stop strings are refused.
            max_num_seqs: maximum number of samples that decode together.
            timeout_s: deadline of every call.
            num_threads: number of torch threads of the engine; None: torch's default.
            return_routed_experts: whether completions include the routed experts of each token.
            return_kept_tokens: whether completions include what top-p, top-k and min-p kept for each token.

        Raises:
            Exception: any error of `load`.
            ConfigError: `return_routed_experts` is set, but the engine cannot read the model's routes.
            DeadlineError: loading took longer than `timeout_s`.
        """
        engine = cls(timeout_s=timeout_s)
        ready = engine._new_answer()
        engine._thread = threading.Thread(
            target=engine._run,
            args=(load, num_threads, return_routed_experts, ready),
            kwargs={"max_num_seqs": max_num_seqs, "return_kept_tokens": return_kept_tokens},
            name="rl-rollout-local-engine",
            daemon=True,
        )
        engine._thread.start()
        try:
            await engine._wait(ready, "the local engine to load its model")
        except BaseException:  # not only Exception: the run may be cancelled meanwhile
            engine._closed = True
            with engine._wake:
                engine._wake.notify()
            raise
        return engine

    # --- InferenceClient ----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        """See `InferenceClient.generate`. A request with the `sample_id` of a running request joins it."""
        self._require_alive()
        call = self._calls.get(request.sample_id)
        if call is None:
            self._require_possible(request)
            call = self._calls[request.sample_id] = _Call(request)
            if not self._new_calls:
                # All requests of this iteration of the event loop start as one batch.
                self._loop.call_soon(self._submit_new_calls)
            self._new_calls.append(call)
        elif call.request != request:
            raise GenerationError(
                f"sample_id {request.sample_id!r} is running with a different request; a retry must repeat the request"
            )
        waiter: asyncio.Future[tuple[Completion, ...]] = self._loop.create_future()
        call.waiters.append(waiter)
        try:
            return await waiter
        finally:
            call.waiters.remove(waiter)
            if not call.waiters and self._calls.get(request.sample_id) is call:
                self._abandon(call)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See `InferenceClient.pause`. Returns when no sample is being computed any more."""
        self._submit_new_calls()
        still = self._new_answer()

        def pause() -> None:
            self._give_back(self._scheduler.pause(mode))
            self._when_still.append(lambda: self._answer(still, None))

        self._post(pause)
        await self._wait(still, f"the local engine to pause ({mode})")

    async def resume(self) -> None:
        await self._ask(lambda: self._scheduler.resume(), "the local engine to resume")

    async def abort(self, sample_ids: Sequence[str] | None = None) -> None:
        """See `InferenceClient.abort`; ids of requests that are not running are ignored."""
        self._submit_new_calls()
        calls = None if sample_ids is None else {self._calls[name] for name in sample_ids if name in self._calls}
        await self._ask(lambda: self._give_back(self._scheduler.abort(calls)), "the local engine to abort requests")

    async def prepare_weights(self, rendezvous: Rendezvous, version: int) -> None:
        """See `WeightPreparing`."""
        self._require_alive()
        self._staged = None
        staging = self._loop.run_in_executor(self._staging, stage, rendezvous, version, self._held)
        self._staged = (rendezvous, await self._wait(staging, f"weight version {version} to arrive"))

    async def update_weights(self, rendezvous: Rendezvous, version: int) -> Manifest:
        """See `InferenceClient.update_weights`. Serves the old version until the new one is complete and verified."""
        if self._staged is None or self._staged[0] != rendezvous or self._staged[1].version != version:
            await self.prepare_weights(rendezvous, version)
        assert self._staged is not None
        (_, staged), self._staged = self._staged, None
        await self._ask(
            lambda: self._scheduler.update_weights(staged), f"the local engine to load weight version {version}"
        )
        return staged.manifest

    @property
    def vocab_size(self) -> int:
        """See `Scoring`."""
        return self._vocab_size

    async def score(self, sequences: Sequence[Sequence[int]]) -> Mapping[str, Sequence[Sequence[float]]]:
        """See `Scoring.score`."""
        scores: list[list[float]] = []

        def score() -> None:
            scores.extend(self._scheduler.score(sequences))

        await self._ask(score, f"the local engine to score {len(sequences)} sequences")
        return {"local": scores}

    async def health(self) -> EngineHealth:
        self._require_alive()
        scheduler = self._scheduler
        return EngineHealth(
            version=scheduler.version,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + len(self._new_calls),
        )

    async def close(self) -> None:
        """Stops the thread; running requests fail. A second call only waits for the thread to end."""
        if not self._closed:
            self._closed = True
            self._fail_calls(GenerationError("the local engine was closed"))
            self._staging.shutdown(wait=False)
            with self._wake:
                self._wake.notify()
        await asyncio.to_thread(self._thread.join, self._timeout_s)
        if self._thread.is_alive():
            raise DeadlineError(f"waited {self._timeout_s:g} s for the local engine's thread to end")

    # --- event loop side ----------------------------------------------------------------------------------------------

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise _engine_failed(self._failure)
        if self._closed:
            raise GenerationError("the local engine was closed")

    def _require_possible(self, request: GenerateRequest) -> None:
        length, params, who = len(request.prompt_tokens), request.params, f"request {request.sample_id!r}"
        if not length or params.max_tokens < 1 or request.num_samples < 1:
            raise GenerationError(
                f"{who}: {length} prompt tokens, max_tokens {params.max_tokens}, num_samples {request.num_samples}; "
                "each must be at least 1"
            )
        if self._max_positions is not None and length + params.max_tokens > self._max_positions:
            raise GenerationError(
                f"{who}: {length} prompt tokens + max_tokens {params.max_tokens} = {length + params.max_tokens} exceed "
                f"the model's {self._max_positions} positions"
            )
        lowest, highest = min(request.prompt_tokens), max(request.prompt_tokens)
        if lowest < 0 or highest >= self._vocab_size:
            raise GenerationError(
                f"{who}: got token ids {lowest}…{highest}, but the model's vocabulary is 0…{self._vocab_size - 1}"
            )
        if params.extra_args:
            raise GenerationError(
                f"{who}: the local engine has no further sampling parameters, but extra_args sets "
                f"{', '.join(params.extra_args)}"
            )
        if params.structural_tag is not None:
            raise GenerationError(
                f"{who}: the local engine cannot constrain a response by a grammar (structural_tag); choose "
                "generator.inference_engine.backend=vllm"
            )
        if params.stop and self._tokenizer is None:
            raise GenerationError(f"{who}: stop strings need a tokenizer, but the model directory has none")

    def _submit_new_calls(self) -> None:
        calls, self._new_calls = self._new_calls, []
        if calls and self._failure is None and not self._closed:
            self._post(lambda: self._scheduler.submit(sample for call in calls for sample in self._samples(call)))
            self._loop.call_later(self._timeout_s, self._expire, calls)

    def _samples(self, call: _Call) -> list[Sample]:
        request, params = call.request, call.request.params
        stop_tokens = params.stop_token_ids if params.ignore_eos else (*self._eos_tokens, *params.stop_token_ids)
        return [
            Sample(
                owner=call,
                index=i,
                prompt_tokens=request.prompt_tokens,
                params=params,
                seed=request.seed + i,
                stop_tokens=stop_tokens,
                watch=StopStringWatch(self._tokenizer, params.stop) if params.stop and self._tokenizer else None,
            )
            for i in range(request.num_samples)
        ]

    def _expire(self, calls: Sequence[_Call]) -> None:
        for call in calls:
            if self._calls.get(call.request.sample_id) is call:
                error = DeadlineError(
                    f"waited {self._timeout_s:g} s for request {call.request.sample_id!r} of the local engine"
                )
                self._abandon(call)
                _fail(call.waiters, error)

    def _abandon(self, call: _Call) -> None:
        del self._calls[call.request.sample_id]
        if call in self._new_calls:
            self._new_calls.remove(call)
        elif self._failure is None and not self._closed:
            self._post(lambda: self._give_back(self._scheduler.abort({call})))

    def _finish(self, ended: Ended) -> None:
        for sample, completion in ended:
            call: _Call = sample.owner
            call.completions[sample.index] = completion
            if len(call.completions) == call.request.num_samples and self._calls.get(call.request.sample_id) is call:
                del self._calls[call.request.sample_id]
                completions = tuple(call.completions[i] for i in range(call.request.num_samples))
                for waiter in call.waiters:
                    if not waiter.done():
                        waiter.set_result(completions)

    def _fail_calls(self, error: Exception) -> None:
        calls, self._calls = list(self._calls.values()), {}
        _fail([waiter for call in calls for waiter in call.waiters], error)
        _fail(list(self._answers), error)

    async def _ask(self, command: Callable[[], object], what: str) -> None:
        """Runs `command` on the engine's thread and waits for its end. Raises the command's RLError; any other
        exception of the command stops the engine."""
        answer = self._new_answer()

        def run() -> None:
            try:
                command()
            except RLError as error:
                self._answer(answer, error)
            else:
                self._answer(answer, None)

        self._post(run)
        await self._wait(answer, what)

    def _new_answer(self) -> asyncio.Future[None]:
        answer: asyncio.Future[None] = self._loop.create_future()
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)
        return answer

    async def _wait(self, future: asyncio.Future[T], what: str) -> T:
        try:
            done, _ = await asyncio.wait([future], timeout=self._timeout_s)
        except asyncio.CancelledError:
            future.cancel()
            raise
        if not done:
            future.cancel()
            raise DeadlineError(f"waited {self._timeout_s:g} s for {what}")
        return future.result()

    def _post(self, command: Callable[[], None]) -> None:
        self._require_alive()
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    # --- engine thread side -------------------------------------------------------------------------------------------

    def _run(
        self,
        load: Load,
        num_threads: int | None,
        return_routed_experts: bool,
        ready: asyncio.Future[None],
        **settings: Any,
    ) -> None:
        try:
            if num_threads is not None:
                torch.set_num_threads(num_threads)
            model, self._tokenizer = load()
            self._eos_tokens = eos_tokens(model, self._tokenizer)
            text_config = model.config.get_text_config(decoder=True)
            self._max_positions = getattr(text_config, "max_position_embeddings", None)
            self._vocab_size = text_config.vocab_size
            choices = ExpertChoices.of(model, where=ROUTES_KEY) if return_routed_experts else None
            self._scheduler = Scheduler(model, choices=choices, **settings)
        except Exception as error:
            self._failure = error
            self._answer(ready, error)
            return
        self._answer(ready, None)
        try:
            self._serve()
        except Exception as error:
            self._failure = error
            self._call_loop(self._fail_calls, _engine_failed(error))

    def _serve(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._commands or self._closed or self._scheduler.has_work)
                commands = [self._commands.popleft() for _ in range(len(self._commands))]
            if self._closed:
                return
            for command in commands:
                command()
            if self._scheduler.has_work:
                self._give_back(self._scheduler.step())
            if not self._scheduler.has_work:
                while self._when_still:
                    self._when_still.pop()()

    def _give_back(self, ended: Ended) -> None:
        if ended:
            self._call_loop(self._finish, ended)

    def _answer(self, answer: asyncio.Future[None], error: Exception | None) -> None:
        self._call_loop(_settle, answer, error)

    def _call_loop(self, function: Callable[..., object], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # If the program closed its event loop without calling `close`, nothing waits for the answer.
            if not self._loop.is_closed():
                raise


def _settle(answer: asyncio.Future[None], error: Exception | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(None)
    else:
        answer.set_exception(error)


def _fail(waiters: Sequence[asyncio.Future[Any]], error: Exception) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_exception(error)


def _engine_failed(cause: BaseException) -> GenerationError:
    error = GenerationError(f"the local engine failed and no longer serves requests: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
