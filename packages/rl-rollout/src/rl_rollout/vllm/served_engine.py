"""Wraps vLLM's AsyncLLM for training: records the weight version of every token, and serves only complete versions.

consumes     requests, pauses and weight versions from `routes`
produces     completions; the manifest of the weights that arrived
waits for    the engine's core process; weight updates have a deadline here, and requests have one in the client
unblocked by the core's outputs; quarantine and the core's death end all requests with an error
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import attrs
import msgspec
from vllm import SamplingParams as EngineSamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM

from rl_core.errors import GenerationError, WeightSyncError
from rl_core.interfaces import Completion, GenerateRequest, KeptTokens, PauseMode, Rendezvous, SamplingParams
from rl_core.tasks import all_of
from rl_rollout.transports.receivers import require_allowed
from rl_rollout.vllm.adapters import NamedAdapters
from rl_rollout.vllm.engine_cores import answers_of_all, require_single_calls
from rl_rollout.vllm.preparing import arguments_of, prepared

_MAX_SEED = 2**63
_SETTLE_S = 0.001
_LOOK_S = 0.2
_WARM_UP = (0, 1, 2, 3)
"""Token ids that every vocabulary has."""
_MAX_ERRORS = 4
"""Maximum number of workers whose errors a message lists."""


class Unavailable(Exception):
    """This server cannot serve now, for a reason that lies in the server. Another server may answer the request."""


class Lost(Exception):
    """The engine ended while it had the request. The request itself may have caused that."""


class ServedEngine:
    """Samples, scores and updates weights with one AsyncLLM. Call all methods on the event loop that created it."""

    def __init__(
        self, engine: AsyncLLM, named_adapters: NamedAdapters | None = None, *, receivers: AbstractSet[str]
    ) -> None:
        """
        Args:
            engine: an engine whose model is loaded.
            named_adapters: the adapters, if each weight version is an adapter of a fixed model; None if each weight
                version is a whole model.
            receivers: the weight receivers that may be loaded, as `package.module:Class`.
        """
        require_single_calls(engine)
        self._engine = engine
        self._named_adapters = named_adapters
        self._receivers = receivers
        self._max_model_len: int = engine.model_config.max_model_len
        self._returns_routes: bool = engine.model_config.enable_return_routed_experts
        self.returns_kept_tokens: bool = engine.model_config.return_sampling_mask
        # The engine's core has a copy of this record. Here vLLM 0.30 would refuse all requests at temperature 0 or
        # without top_k, because it would return whole vocabularies for them (`fixes.return_kept_tokens`).
        engine.model_config.return_sampling_mask = False
        self.vocab_size: int = engine.model_config.get_vocab_size()
        parallel = engine.vllm_config.parallel_config
        self._num_engines: int = parallel.data_parallel_size
        self.num_workers: int = parallel.world_size * self._num_engines
        """Number of workers that hold weights, of all data-parallel engines together."""
        self._spans: dict[str, list[tuple[int | None, int]]] = {}
        """Request id → a pair for each version that was replaced since the request started: the number of tokens that
        the request had at that time, and the replaced version. The number is None if the request was already finished;
        then this version sampled all tokens that no earlier pair counts."""
        self._aborted: set[str] = set()
        """Ids of requests that a caller has aborted. Any other request that ends with the finish reason `abort` was
        ended by quarantine or by the end of the core."""
        self._changing = asyncio.Lock()
        self._is_paused = False
        self._asleep: set[str] = set()
        self.is_updating = False
        self.version = -1
        self.quarantine: str | None = None
        """Why this server serves nothing until an update succeeds; None if it is not quarantined."""

    @property
    def num_running(self) -> int:
        """Number of samples with at least one sampled token."""
        return sum(not state.is_prefilling for state in self._engine.output_processor.request_states.values())

    @property
    def num_waiting(self) -> int:
        """Number of samples that wait for their first token."""
        return len(self._engine.output_processor.request_states) - self.num_running

    @property
    def fault(self) -> str | None:
        """Why nothing is served now, as a text that agents may read; None if the server serves. The text leaves out the
        exact reason, which only the run gets."""
        if self._engine.errored:
            return "this server's engine is dead"
        if self.quarantine is not None:
            return "this server lacks complete weights, and serves nothing until it has received them"
        return None

    async def warm_up(self) -> None:
        """Scores a prompt and samples from it on each data-parallel engine, so that compilation on first use (140 s on
        a busy machine) happens at the start."""

        async def sample(rank: int) -> None:
            params = _engine_params(SamplingParams(max_tokens=2, ignore_eos=True), seed=0)
            prompt, request_id = tokens_input(list(_WARM_UP)), f"warm-up-{uuid.uuid4().hex}"
            async for _ in self._engine.generate(prompt, params, request_id, data_parallel_rank=rank):
                pass

        ranks = range(self._num_engines)
        await all_of([*(self._score(_WARM_UP, None, rank) for rank in ranks), *(sample(rank) for rank in ranks)])

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        """See `InferenceClient.generate`.

        Raises:
            GenerationError: no server can answer the request.
            Unavailable: this server cannot serve now; another one may be able to.
            Lost: the engine ended while it had the request; another server may be able to answer it.
        """
        self._require_service()
        self._require_possible(request)
        return tuple(await all_of(self._sample(request, i) for i in range(request.num_samples)))

    async def score(self, sequences: Sequence[Sequence[int]], adapter: str | None = None) -> list[list[list[float]]]:
        """Returns, per data-parallel engine, sequence and token, log p(token t | tokens before it); 0.0 for the first
        token. Scores with the policy, or with the adapter whose name is `adapter`."""
        self._require_service()
        lora_request = None if adapter is None else self._adapters[adapter]

        async def by_engine(rank: int) -> list[list[float]]:
            return await all_of(self._score(tokens, lora_request, rank) for tokens in sequences)

        return await all_of(by_engine(rank) for rank in range(self._num_engines))

    async def load_adapter(self, name: str, path: str) -> None:
        """Loads the adapter at `path`. Requests that select `name`, including running ones, use it from now on.

        Raises:
            GenerationError: the adapter cannot be served; the name keeps its previous adapter. Or an engine failed
                while it loaded the adapter; the name now has no adapter. Or the caches could not be emptied; the server
                is now quarantined.
        """
        adapters = self._adapters
        async with self._changing:
            await self._engine.pause_generation(mode="keep", clear_cache=False)
            try:
                await adapters.load(name, path)
                # The cache is keyed by the adapter's name, so it may hold entries of the replaced adapter.
                if not await self._emptied_caches():
                    await self._enter_quarantine("the prefix cache could not be emptied after an adapter was replaced")
                    raise GenerationError(f"adapter {name!r}: {self.quarantine}")
            finally:
                await self._serve_unless_held()

    async def pause(self, mode: PauseMode) -> None:
        """See `InferenceClient.pause`. The prefix cache is kept until the weights change."""
        async with self._changing:
            if mode == "abort":
                self._aborted.update(self._spans)
            await self._engine.pause_generation(mode=mode, clear_cache=False)
            self._is_paused = True

    async def resume(self) -> None:
        """Resumes sampling if the server is neither asleep nor quarantined."""
        async with self._changing:
            self._is_paused = False
            await self._serve_unless_held()

    async def abort(self, sample_ids: Sequence[str] | None) -> list[str]:
        """Ends the requests with these sample ids (None: all requests); their callers get the tokens sampled so far.
        Returns the sample ids of the requests that were running."""
        under_way: dict[str, list[str]] = {}
        for request_id in self._spans:
            under_way.setdefault(request_id.rpartition("/")[0], []).append(request_id)
        chosen = (
            under_way if sample_ids is None else {name: under_way[name] for name in sample_ids if name in under_way}
        )
        asked = [request_id for request_ids in chosen.values() for request_id in request_ids]
        self._aborted.update(asked)
        await self._engine.abort(asked)
        return list(chosen)

    async def prepare_weights(self, rendezvous: Rendezvous, version: int, *, timeout_s: float) -> None:
        """Makes every worker receive the version while sampling continues. Raises WeightSyncError if a worker fails;
        the engine then still serves the previous version."""
        require_allowed(rendezvous.receiver, self._receivers)
        await prepared(self._engine, rendezvous, version, timeout_s=timeout_s)

    async def update_weights(self, rendezvous: Rendezvous, version: int, *, timeout_s: float) -> Mapping[str, Any]:
        """Pauses requests, receives the version if it is not prepared yet, and loads it. Returns the manifest of what
        arrived, as plain data, after every worker of every data-parallel engine has reported it.

        Tokens sampled so far keep the version that sampled them. Running requests continue with the new weights and a
        recomputed cache; the prefix cache is empty afterwards. If the engine returns routes (the experts that
        processed each token), running requests are aborted instead, and the generator continues them in new requests.
        Otherwise their prompts would keep the routes under the old weights, because vLLM 0.30 reads a prompt's routes
        only once, at the first sampled token.

        Raises:
            WeightSyncError: the version was refused or did not arrive in time, or its receiver is not allowed. If
                `quarantine` is set, nothing is served; otherwise the old version is still served.
        """
        require_allowed(rendezvous.receiver, self._receivers)
        async with self._changing:
            self.is_updating = True
            try:
                async with asyncio.timeout(timeout_s):
                    manifest = await self._update(rendezvous, version)
            except (TimeoutError, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError):
                    await self._enter_quarantine("an update was cancelled")
                    raise
                await self._enter_quarantine(f"an update did not end within {timeout_s:g} s")
                raise WeightSyncError(f"weight version {version}: {self.quarantine}") from error
            finally:
                self.is_updating = False
                await self._serve_unless_held()
        return manifest

    async def sleep(self, level: int) -> None:
        """Frees device memory: level 1 keeps the weights in host memory, level 2 drops them. Requests are frozen
        meanwhile."""
        async with self._changing:
            await self._engine.sleep(level, mode="keep")
            self._asleep = {"weights", "kv_cache"}

    async def wake(self, tags: Sequence[str] | None) -> None:
        """Allocates device memory again: all of it, or a part (`weights`, `kv_cache`). When all memory is allocated and
        the server is neither paused nor quarantined, requests continue."""
        async with self._changing:
            waking = self._asleep & set(self._asleep if tags is None else tags)
            if waking:
                await self._engine.wake_up(sorted(waking))
                self._asleep -= waking
                await self._engine.pause_generation(mode="keep", clear_cache=False)
            await self._serve_unless_held()

    async def check(self) -> None:
        """Returns when the core process has answered. During an update, which keeps the core process busy, only checks
        that the process is alive.

        Raises:
            Unavailable: the core process is dead.
        """
        self._require_core()
        if self.is_updating:
            return
        asking = asyncio.ensure_future(self._engine.is_paused())
        try:
            # When a core dies, vLLM never completes the pending call.
            while not (await asyncio.wait([asking], timeout=_LOOK_S))[0]:
                self._require_core()
            await asking
        finally:
            asking.cancel()

    async def _serve_unless_held(self) -> None:
        """Resumes the engine if it is neither paused, asleep nor quarantined. No other method resumes it."""
        if not self._is_paused and not self._asleep and self.quarantine is None:
            await self._engine.resume_generation()

    # --- samples ------------------------------------------------------------------------------------------------------

    async def _sample(self, request: GenerateRequest, index: int) -> Completion:
        request_id = f"{request.sample_id}/{index}"
        try:
            params = _engine_params(request.params, (request.seed + index) % _MAX_SEED)
        except (VLLMClientError, ValueError) as error:
            raise GenerationError(f"sample {request.sample_id}: vLLM refuses its parameters: {error}") from error
        # vLLM's `generate` registers the request before its first suspension, so `_end_version` finds the request
        # from the start.
        self._spans[request_id] = []
        prompt = tokens_input(list(request.prompt_tokens))
        outputs = self._engine.generate(prompt, params, request_id, session_id=request.session_id)
        try:
            # FINAL_ONLY yields exactly one output.
            (output,) = [output async for output in outputs]
            if output.outputs[0].finish_reason == "abort":
                self._require_asked_abort(request_id)
            return self._completion(output.outputs[0], self._spans[request_id])
        except VLLMClientError as error:
            hint = (
                "" if params.structured_outputs is None else "; try the tag with xgrammar.Grammar.from_structural_tag"
            )
            raise GenerationError(f"sample {request.sample_id}: vLLM refuses it: {error}{hint}") from error
        finally:
            del self._spans[request_id]
            self._aborted.discard(request_id)

    async def _score(self, tokens: Sequence[int], lora_request: LoRARequest | None, rank: int) -> list[float]:
        params = EngineSamplingParams(
            max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        prompt, request_id = tokens_input(list(tokens)), f"score-{uuid.uuid4().hex}"
        outputs = self._engine.generate(prompt, params, request_id, lora_request=lora_request, data_parallel_rank=rank)
        (output,) = [output async for output in outputs]
        given: Any = output.prompt_logprobs
        return [0.0] + [position[token].logprob for position, token in zip(given[1:], tokens[1:], strict=True)]

    def _completion(self, output: CompletionOutput, spans: Sequence[tuple[int | None, int]]) -> Completion:
        tokens = tuple(output.token_ids)
        # `repetition_detection` cut the sample.
        reason: Any = "length" if output.finish_reason == "repetition" else output.finish_reason
        if reason not in ("stop", "length", "abort"):
            raise GenerationError(f"the engine ended a sample with {reason!r}")
        flat: Any = output.logprobs
        versions: list[int] = []
        for end, version in (*spans, (None, self.version)):
            versions += [version] * ((len(tokens) if end is None else end) - len(versions))
        return Completion(
            tokens=tokens,
            logprobs=tuple(flat.logprobs[start] for start in flat.start_indices) if tokens else (),
            policy_versions=tuple(versions),
            stop_reason=reason,
            routed_experts=output.routed_experts,
            kept_tokens=self._kept_tokens(output, len(tokens)) if self.returns_kept_tokens else None,
        )

    def _kept_tokens(self, output: CompletionOutput, num_tokens: int) -> KeptTokens:
        kept = KeptTokens.of_each([] if output.sampling_mask is None else output.sampling_mask.token_ids)
        if len(kept.counts) != num_tokens:
            raise GenerationError(f"vLLM returned the kept tokens of {len(kept.counts)} of {num_tokens} sampled tokens")
        return kept

    @property
    def _adapters(self) -> NamedAdapters:
        if self._named_adapters is None:
            raise GenerationError(
                "this server was started for whole weights and serves no adapters; start it with "
                "trainer.policy.model.lora.merge_lora=false"
            )
        return self._named_adapters

    def _require_service(self) -> None:
        if self.quarantine is not None:
            raise Unavailable(self.quarantine)
        self._require_core()

    def _require_core(self) -> None:
        if self._engine.errored:
            raise Unavailable("the engine's core process is dead")

    def _require_asked_abort(self, request_id: str) -> None:
        if self.quarantine is not None:
            raise Unavailable(self.quarantine)
        if request_id not in self._aborted:
            raise Lost("the engine gave up its requests: one of its processes has died, or is ending")

    def _require_possible(self, request: GenerateRequest) -> None:
        prompt, length = request.prompt_tokens, len(request.prompt_tokens)
        if not prompt:
            raise GenerationError(f"sample {request.sample_id}: the prompt has no tokens")
        if not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
            raise GenerationError(
                f"sample {request.sample_id}: got token ids {min(prompt)} to {max(prompt)}, but the vocabulary has "
                f"{self.vocab_size}"
            )
        if length + request.params.max_tokens > self._max_model_len:
            raise GenerationError(
                f"sample {request.sample_id}: {length} prompt tokens and up to {request.params.max_tokens} new ones do "
                f"not fit into the {self._max_model_len} positions of the engine; lower max_generate_length, or raise "
                "generator.inference_engine.engine_init_kwargs.max_model_len if the model allows it"
            )

    # --- weights ------------------------------------------------------------------------------------------------------

    async def _update(self, rendezvous: Rendezvous, version: int) -> Mapping[str, Any]:
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        await self._outputs_processed()
        if self._returns_routes:
            await self.abort(None)
        manifest = await self._received(rendezvous, version)
        if not await self._emptied_caches():
            await self._enter_quarantine("the prefix cache could not be emptied after an update")
            raise WeightSyncError(f"weight version {version}: {self.quarantine}")
        self._end_version(version)
        self.quarantine = None
        return manifest

    async def _received(self, rendezvous: Rendezvous, version: int) -> Mapping[str, Any]:
        # No deadline here: `update_weights` has one. If a worker hangs, the core answers no heartbeats after that
        # deadline, and the server is restarted.
        arguments = ("rl_receive_weights", None, arguments_of(rendezvous, version), None)
        try:
            by_engine = await answers_of_all(self._engine, "collective_rpc", *arguments)
        except Exception as error:
            # Workers return their errors as data. If a call raises nevertheless, it is unknown what the workers hold.
            await self._enter_quarantine(f"an update broke off: {_described(error)}")
            raise WeightSyncError(f"weight version {version}: {self.quarantine}") from error
        answers = {self._worker(i, j): answer for i, those in enumerate(by_engine) for j, answer in enumerate(those)}
        fault, is_intact = _fault(answers, self.num_workers)
        if not is_intact:
            await self._enter_quarantine(f"an update to version {version} failed: {fault}")
        if fault is not None:
            raise WeightSyncError(f"weight version {version}: {fault}")
        return next(iter(answers.values()))["manifest"]

    def _worker(self, engine: int, rank: int) -> str:
        """Returns a worker's name for messages."""
        return f"rank {rank}" if self._num_engines == 1 else f"rank {rank} of data-parallel engine {engine}"

    async def _emptied_caches(self) -> bool:
        """Drops what every data-parallel engine has computed and keeps: keys and values, including those of running
        requests, and the outputs of encoders (of images). Returns False if an engine could not drop keys and values."""
        is_empty = all(await answers_of_all(self._engine, "reset_prefix_cache", True, False))
        # By the engine's core, whose scheduler has a list of the outputs that the workers hold. If only the workers
        # dropped them, the next request with the same image would end the core: "Encoder cache miss".
        await answers_of_all(self._engine, "reset_encoder_cache")
        return is_empty

    async def _enter_quarantine(self, reason: str) -> None:
        """Stops serving and aborts all running requests, including those of agents, so that another server can take
        them."""
        self.quarantine = reason
        states = self._engine.output_processor.request_states.values()
        await self._engine.abort([*{*self._spans, *(state.external_req_id for state in states)}])

    async def _outputs_processed(self) -> None:
        """Returns when every token that the core has sampled is recorded in its request's state.

        The core answers in order: when it has answered the pause, all outputs are in the queue. vLLM's output handler
        takes them one at a time: when it has taken an empty output that is put after them, it has processed all others.
        """
        queue = self._engine.engine_core.outputs_queue  # pyright: ignore[reportAttributeAccessIssue]
        queue.put_nowait(EngineCoreOutputs())
        while not queue.empty():
            self._require_core()
            await asyncio.sleep(_SETTLE_S)

    def _end_version(self, version: int) -> None:
        states = {state.external_req_id: state for state in self._engine.output_processor.request_states.values()}
        for request_id, spans in self._spans.items():
            state = states.get(request_id)
            # A request without a state is finished, but `_sample` has not yet removed it from `_spans`.
            spans.append((None if state is None else state.detokenizer.num_output_tokens(), self.version))  # pyright: ignore
        self.version = version


def _fault(answers: Mapping[str, Mapping[str, Any]], num_workers: int) -> tuple[str | None, bool]:
    """Returns why an update failed (None if it succeeded), and whether all workers hold the same complete version, new
    or old.

    Args:
        answers: fields of `worker_extension.Outcome`, by the worker's name.
        num_workers: number of workers that hold weights.
    """
    failures = [(worker, answer) for worker, answer in answers.items() if answer["error"] is not None]
    if len(answers) != num_workers:
        return f"{len(answers)} of {num_workers} workers answered", False
    if failures:
        is_intact = len(failures) == len(answers) and all(answer["is_intact"] for _, answer in failures)
        errors = [
            answer["error"] if num_workers == 1 else f"{worker}: {answer['error']}" for worker, answer in failures
        ]
        return "; ".join(errors[:_MAX_ERRORS]), is_intact
    (first, manifest), *others = ((worker, answer["manifest"]) for worker, answer in answers.items())
    different = [worker for worker, other in others if other != manifest]
    return (f"{different[0]} received other weights than {first}", False) if different else (None, True)


def _described(error: BaseException) -> str:
    return ", ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def _engine_params(params: SamplingParams, seed: int) -> EngineSamplingParams:
    """Raises ValueError for `extra_args` that are not fields of vLLM's parameters, have another type, or whose values
    vLLM refuses. A wrong type would end the engine's input thread."""
    fields = attrs.asdict(params)
    fields |= {name: list(fields[name]) for name in ("stop", "stop_token_ids")}  # vLLM requires lists
    tag, extra = fields.pop("structural_tag"), fields.pop("extra_args")
    if unknown := extra.keys() - set(EngineSamplingParams.__struct_fields__):
        raise ValueError(f"vLLM has no sampling parameters {', '.join(sorted(unknown))}")
    ours = {
        **fields,
        "structured_outputs": None if tag is None else StructuredOutputsParams(structural_tag=tag),
        "seed": seed,
        "logprobs": 0,
        "flat_logprobs": True,
        # Text is needed only to find stop strings.
        "detokenize": bool(params.stop),
        "skip_special_tokens": True,
        "output_kind": RequestOutputKind.FINAL_ONLY,
        "skip_clone": True,
    }
    typed = msgspec.convert({**extra, **fields}, EngineSamplingParams, str_keys=True) if extra else None
    return EngineSamplingParams(**{name: getattr(typed, name) for name in extra}, **ours)
