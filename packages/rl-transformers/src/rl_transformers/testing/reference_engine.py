"""The simplest correct inference engine, for tests and comparison. It computes a full forward pass per token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from rl_core import plugins
from rl_core.errors import DeadlineError, GenerationError, WeightSyncError
from rl_core.interfaces import (
    Completion,
    EngineHealth,
    GenerateRequest,
    InferenceClient,
    KeptTokens,
    Manifest,
    PauseMode,
    Rendezvous,
    SamplingParams,
    StopReason,
)
from rl_core.rank_kit.weight_buckets import tensor_record, unpack_bucket

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@attrs.define(eq=False)
class _Running:
    """One running request."""

    request: GenerateRequest
    task: asyncio.Task[tuple[Completion, ...]] | None = None
    is_aborted: bool = False


class ReferenceEngine(InferenceClient):
    """An engine without key/value cache and batching, which computes on the event loop. Accepts weights
    through any transport.

    Sleeping releases the weights, and the engine generates nothing until new weights arrive.
    """

    can_sleep = True

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        timeout_s: float = 240.0,
        return_kept_tokens: bool = False,
    ) -> None:
        self.model = model.eval()
        self._return_kept_tokens = return_kept_tokens
        self._tokenizer = tokenizer
        self._timeout_s = timeout_s
        self._version = -1
        self._running: dict[str, _Running] = {}
        # Input and logits of the latest forward pass. If samples of a prompt are one token long, one pass serves all.
        self._last: tuple[list[int], Tensor] | None = None
        self._may_sample = asyncio.Event()
        self._may_sample.set()
        self._is_closed = False
        self._is_asleep = False
        self._lacks_weights = False
        self._shapes: dict[str, torch.Size] = {}

    @classmethod
    def from_checkpoint(cls, path: str, *, return_kept_tokens: bool = False) -> ReferenceEngine:
        """Loads the model in float32, and its tokenizer."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        return cls(model, AutoTokenizer.from_pretrained(path), return_kept_tokens=return_kept_tokens)

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        if self._is_closed:
            raise GenerationError("the engine was closed")
        if self._lacks_weights:
            raise GenerationError("the engine has received no weights since it slept")
        self._require_possible(request)
        running = self._running.get(request.sample_id)
        if running is None:
            running = self._running[request.sample_id] = _Running(request)
            running.task = asyncio.ensure_future(self._samples(running))
        assert running.task is not None
        try:
            return await asyncio.wait_for(asyncio.shield(running.task), self._timeout_s)
        except TimeoutError:
            raise DeadlineError(f"waited {self._timeout_s:g} s for request {request.sample_id!r}") from None

    async def pause(self, mode: PauseMode = "keep") -> None:
        if mode == "wait":
            await asyncio.gather(*[r.task for r in self._running.values() if r.task])
        self._may_sample.clear()
        if mode == "abort":
            await self.abort()

    async def resume(self) -> None:
        self._may_sample.set()

    async def abort(self, sample_ids: Sequence[str] | None = None) -> None:
        was_paused = not self._may_sample.is_set()
        aborted = [r for name, r in self._running.items() if sample_ids is None or name in sample_ids]
        for running in aborted:
            running.is_aborted = True
        self._may_sample.set()
        if was_paused:
            # Paused requests wake up; aborted ones end, and the others wait again.
            self._may_sample.clear()
        await asyncio.gather(*[running.task for running in aborted if running.task])

    async def update_weights(self, rendezvous: Rendezvous, version: int) -> Manifest:
        receiver = plugins.load_receiver(rendezvous.receiver)(rendezvous)
        if self._is_asleep:
            raise WeightSyncError(f"version {version} was sent to an engine that is asleep")
        buckets = await asyncio.to_thread(lambda: list(receiver.receive(version)))
        tensors = dict(pair for bucket in buckets for pair in unpack_bucket(bucket))
        parameters = dict(self.model.named_parameters())
        if {n: t.shape for n, t in tensors.items()} != {n: p.shape for n, p in parameters.items()}:
            unmatched = sorted(tensors.keys() ^ parameters.keys())
            problem = f"only one of the two has {', '.join(unmatched)}" if unmatched else "shapes differ"
            raise WeightSyncError(f"version {version} does not fit the model: {problem}")
        self.load(tensors)
        self._version = version
        return Manifest(version=version, tensors={name: tensor_record(tensor) for name, tensor in tensors.items()})

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Copies weights into the model. The names and shapes must already have been checked."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[name])
        self._last = None
        self._lacks_weights = False

    async def sleep(self) -> None:
        """See `Sleepable`."""
        if self._running:
            raise GenerationError(f"the engine cannot sleep while {len(self._running)} requests are running")
        if not self._is_asleep:
            self._is_asleep = self._lacks_weights = True
            self._shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
            for parameter in self.model.parameters():
                parameter.data = torch.empty(0, dtype=parameter.dtype)

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        """See `Sleepable`. Allocates memory for the weights, filled with NaN. There is no cache to restore."""
        if self._is_asleep and (tags is None or "weights" in tags):
            self._is_asleep = False
            for name, parameter in self.model.named_parameters():
                parameter.data = torch.full(self._shapes[name], float("nan"), dtype=parameter.dtype)

    async def health(self) -> EngineHealth:
        return EngineHealth(version=self._version, num_running=len(self._running), num_waiting=0)

    async def close(self) -> None:
        self._is_closed = True
        for running in self._running.values():
            if running.task:
                running.task.cancel()

    def _require_possible(self, request: GenerateRequest) -> None:
        if request.params.structural_tag is not None or request.params.extra_args:
            raise GenerationError("the reference engine accepts neither structural_tag nor extra_args")
        length = len(request.prompt_tokens) + request.params.max_tokens
        limit: int = self.model.config.max_position_embeddings
        if not request.prompt_tokens or length > limit:
            raise GenerationError(
                f"got {len(request.prompt_tokens)} prompt tokens + max_tokens {request.params.max_tokens} = {length}; "
                f"expected at least 1 prompt token, and a sum of at most {limit}"
            )

    async def _samples(self, running: _Running) -> tuple[Completion, ...]:
        try:
            return tuple([await self._sample(running, i) for i in range(running.request.num_samples)])
        finally:
            del self._running[running.request.sample_id]

    async def _sample(self, running: _Running, index: int) -> Completion:
        request, params = running.request, running.request.params
        generator = torch.Generator().manual_seed(request.seed + index)
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        kept: list[list[int]] = []
        reason: StopReason | None = None
        while reason is None:
            await asyncio.sleep(0)
            await self._wait_for_permission(running)
            if running.is_aborted:
                reason = "abort"
                break
            logits_V = self._logits([*request.prompt_tokens, *tokens])
            token, logprob = draw_slowly(logits_V, params, generator)
            kept.append(self.kept_ids(logits_V, params))
            tokens.append(token)
            logprobs.append(logprob)
            versions.append(self._version)
            reason = self._stop_reason(tokens, params)
        return Completion(
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            policy_versions=tuple(versions),
            stop_reason=reason,
            kept_tokens=KeptTokens.of_each(kept) if self._return_kept_tokens else None,
        )

    def kept_ids(self, logits_V: Tensor, params: SamplingParams) -> list[int]:
        """The ids among which a token is sampled; none if that is the whole vocabulary."""
        if params.temperature == 0:
            return []
        is_kept_V = slow_distribution(logits_V, params) > -torch.inf
        return [] if is_kept_V.all() else is_kept_V.nonzero()[:, 0].tolist()

    async def _wait_for_permission(self, running: _Running) -> None:
        while not self._may_sample.is_set() and not running.is_aborted:
            await self._may_sample.wait()

    @torch.no_grad()
    def _logits(self, tokens: list[int]) -> Tensor:
        if self._last is None or self._last[0] != tokens:
            model: Any = self.model
            self._last = (tokens, model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1])
        return self._last[1]

    def _stop_reason(self, tokens: list[int], params: SamplingParams) -> StopReason | None:
        eos = self._tokenizer.eos_token_id
        text = self._tokenizer.decode(tokens, skip_special_tokens=True) if params.stop else ""
        is_stop_token = tokens[-1] in params.stop_token_ids or (tokens[-1] == eos and not params.ignore_eos)
        if is_stop_token or any(stop in text for stop in params.stop):
            return "stop"
        return "length" if len(tokens) == params.max_tokens else None


def draw_slowly(logits_V: Tensor, params: SamplingParams, generator: torch.Generator) -> tuple[int, float]:
    """Draws one token. Returns the token and its log-prob under the distribution from which it was drawn; at
    temperature 0, under the distribution at temperature 1."""
    if params.temperature == 0:
        logprobs_V = logits_V.float().log_softmax(-1)
        token = int(logprobs_V.argmax())
    else:
        logprobs_V = slow_distribution(logits_V, params)
        token = int(torch.multinomial(logprobs_V.exp(), 1, generator=generator))
    return token, float(logprobs_V[token])


def slow_distribution(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Returns the log-probs, float64 [V], after temperature, top-k, top-p and min-p, computed token by token from the
    definitions of these filters."""
    logprobs = (logits_V.double() / params.temperature).log_softmax(-1)
    kept = sorted(range(len(logprobs)), key=lambda token: -float(logprobs[token]))
    if params.top_k > 0:
        kept = kept[: params.top_k]
    mass = float(logprobs[kept].exp().sum())
    if params.top_p < 1:
        reached, count = 0.0, 0
        while reached < params.top_p:
            reached += float(logprobs[kept[count]].exp()) / mass
            count += 1
        kept = kept[:count]
    threshold = params.min_p * float(logprobs[kept[0]].exp())
    kept = [token for token in kept if float(logprobs[token].exp()) >= threshold]
    filtered = torch.full_like(logprobs, -torch.inf)
    filtered[kept] = logprobs[kept].log_softmax(-1)
    return filtered
