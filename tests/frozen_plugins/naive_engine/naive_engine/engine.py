"""The engine: every token is one forward pass of everything before it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_core import plugins
from rl_core.errors import DeadlineError, GenerationError, WeightSyncError
from rl_core.interfaces import (
    Completion,
    EngineHealth,
    GenerateRequest,
    Manifest,
    Rendezvous,
    SamplingParams,
    StopReason,
)
from rl_core.weights import tensor_record, unpack_bucket


class NaiveEngine:
    """InferenceClient."""

    def __init__(self, model: Any, tokenizer: Any, *, max_num_seqs: int, timeout_s: float) -> None:
        self._model, self._tokenizer, self._timeout_s = model.eval(), tokenizer, timeout_s
        self._version = -1
        self._running: dict[str, asyncio.Task[tuple[Completion, ...]]] = {}
        self._aborted: set[str] = set()
        self._free = asyncio.Semaphore(max_num_seqs)
        self._may_sample = asyncio.Event()
        self._may_sample.set()

    @classmethod
    def from_checkpoint(
        cls,
        path: str,
        *,
        dtype: str = "float32",
        max_num_seqs: int = 1024,
        timeout_s: float = 60.0,
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> NaiveEngine:
        """Loads model and tokenizer."""
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), **(model_kwargs or {}))
        tokenizer = AutoTokenizer.from_pretrained(path)
        return cls(model, tokenizer, max_num_seqs=max_num_seqs, timeout_s=timeout_s)

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        length = len(request.prompt_tokens) + request.params.max_tokens
        limit = self._model.config.max_position_embeddings
        if not request.prompt_tokens or length > limit:
            raise GenerationError(f"{len(request.prompt_tokens)} prompt tokens, {length} in all, the limit is {limit}")
        task = self._running.get(request.sample_id)
        if task is None:
            task = self._running[request.sample_id] = asyncio.ensure_future(self._samples(request))
        try:
            return await asyncio.wait_for(asyncio.shield(task), self._timeout_s)
        except TimeoutError:
            raise DeadlineError(f"waited {self._timeout_s:g} s for request {request.sample_id!r}") from None

    async def pause(self, mode: Literal["keep", "abort", "wait"] = "keep") -> None:
        if mode == "wait":
            await asyncio.gather(*self._running.values())
        self._may_sample.clear()
        if mode == "abort":
            await self.abort()

    async def resume(self) -> None:
        self._may_sample.set()

    async def abort(self, sample_ids: Sequence[str] | None = None) -> None:
        names = [name for name in self._running if sample_ids is None or name in sample_ids]
        self._aborted.update(names)
        await asyncio.gather(*[self._running[name] for name in names])

    async def update_weights(self, rendezvous: Rendezvous, version: int) -> Manifest:
        receiver = plugins.load("rl_core.weight_transports", rendezvous.receiver)(rendezvous)
        buckets = await asyncio.to_thread(lambda: list(receiver.receive(version)))
        tensors = dict(pair for bucket in buckets for pair in unpack_bucket(bucket))
        parameters = dict(self._model.named_parameters())
        if {name: t.shape for name, t in tensors.items()} != {name: p.shape for name, p in parameters.items()}:
            wrong = sorted(tensors.keys() ^ parameters.keys())
            raise WeightSyncError(f"version {version} does not fit the model: {wrong or 'shapes differ'}")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(tensors[name])
        self._version = version
        return Manifest(version=version, tensors={name: tensor_record(tensor) for name, tensor in tensors.items()})

    async def health(self) -> EngineHealth:
        return EngineHealth(version=self._version, num_running=len(self._running), num_waiting=0)

    async def close(self) -> None:
        for task in self._running.values():
            task.cancel()

    async def _samples(self, request: GenerateRequest) -> tuple[Completion, ...]:
        try:
            async with self._free:
                return tuple([await self._sample(request, index) for index in range(request.num_samples)])
        finally:
            del self._running[request.sample_id]
            self._aborted.discard(request.sample_id)

    async def _sample(self, request: GenerateRequest, index: int) -> Completion:
        random = torch.Generator().manual_seed(request.seed + index)
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        reason: StopReason | None = None
        while reason is None:
            # Other requests and the trainer's calls come in between.
            await asyncio.sleep(0)
            while not self._may_sample.is_set() and request.sample_id not in self._aborted:
                await asyncio.sleep(0.001)
            if request.sample_id in self._aborted:
                reason = "abort"
                break
            token, logprob = _draw(self._logits([*request.prompt_tokens, *tokens]), request.params, random)
            tokens.append(token)
            logprobs.append(logprob)
            versions.append(self._version)
            reason = self._stop_reason(tokens, request.params)
        return Completion(
            tokens=tuple(tokens), logprobs=tuple(logprobs), policy_versions=tuple(versions), stop_reason=reason
        )

    @torch.no_grad()
    def _logits(self, tokens: list[int]) -> Tensor:
        return self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].float()

    def _stop_reason(self, tokens: list[int], params: SamplingParams) -> StopReason | None:
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else (self._tokenizer.eos_token_id,))}
        text = self._tokenizer.decode(tokens, skip_special_tokens=True) if params.stop else ""
        if tokens[-1] in ends or any(stop in text for stop in params.stop):
            return "stop"
        return "length" if len(tokens) == params.max_tokens else None


def _draw(logits_V: Tensor, params: SamplingParams, random: torch.Generator) -> tuple[int, float]:
    """A token, and its log-prob in the distribution that it was drawn from."""
    if params.temperature == 0:
        logprobs_V = logits_V.log_softmax(-1)
        token = int(logprobs_V.argmax())
        return token, float(logprobs_V[token])
    logprobs_V = _filtered((logits_V.double() / params.temperature).log_softmax(-1), params)
    token = int(torch.multinomial(logprobs_V.exp(), 1, generator=random))
    return token, float(logprobs_V[token])


def _filtered(logprobs_V: Tensor, params: SamplingParams) -> Tensor:
    """Top-k, then top-p of what is left, then min-p; the rest is log 0."""
    sorted_V, order_V = logprobs_V.sort(descending=True)
    if params.top_k > 0:
        sorted_V[params.top_k :] = -torch.inf
    probs_V = sorted_V.exp() / sorted_V.exp().sum()
    if params.top_p < 1:
        # A token is kept while those before it do not reach top_p.
        sorted_V[probs_V.cumsum(-1) - probs_V >= params.top_p] = -torch.inf
    sorted_V[probs_V < params.min_p * probs_V[0]] = -torch.inf
    return torch.full_like(logprobs_V, -torch.inf).index_put_((order_V,), sorted_V.log_softmax(-1))
