"""Requests one response, and joins its parts if the engine returns several parts.

After `pause("abort")`, a running request returns the tokens sampled so far, which are only a part of the response. A
new request, whose prompt ends with this part, samples the rest; the part keeps its tokens, log-probs and versions. A
response that must match a grammar is sampled again from its start instead, because the rest alone does not match it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from rl_core.errors import GenerationError
from rl_core.interfaces import Completion, GenerateRequest, KeptTokens, Sampler
from rl_core.seeds import seed_of
from rl_rollout.local.stop_strings import StopStringWatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_EMPTY_PARTS = 100
"""After this many consecutive aborts without a token, the request fails instead of being repeated forever."""


async def whole_response(client: Sampler, request: GenerateRequest, tokenizer: PreTrainedTokenizerBase) -> Completion:
    """Returns the whole response to a request of one sample. Its stop reason is never `abort`.

    Part i > 0 has the id `<sample_id>.<i>` and a seed derived from the request's.

    Raises:
        GenerationError: the engine refuses the request, returns a wrong number of samples, or keeps aborting it.
    """
    parts: list[Completion] = []
    num_empty = 0
    while True:
        completions = await client.generate(_rest(request, parts))
        if len(completions) != 1:
            raise GenerationError(f"request {request.sample_id!r}: got {len(completions)} samples, expected 1")
        parts.append(_without_start(completions[0]) if request.params.structural_tag else completions[0])
        num_tokens = sum(len(part.tokens) for part in parts)
        if parts[-1].stop_reason == "abort" and num_tokens == request.params.max_tokens:
            parts[-1] = attrs.evolve(parts[-1], stop_reason="length")
        if parts[-1].stop_reason != "abort":
            return _joined(request, parts, tokenizer)
        num_empty = 0 if parts[-1].tokens else num_empty + 1
        if num_empty == _MAX_EMPTY_PARTS:
            raise GenerationError(f"request {request.sample_id!r} was aborted {num_empty} times without a token")


def _without_start(completion: Completion) -> Completion:
    """Drops the tokens of an unfinished response, because in a new request the engine applies the grammar from the
    first sampled token."""
    if completion.stop_reason != "abort":
        return completion
    return Completion(tokens=(), logprobs=(), policy_versions=(), stop_reason="abort")


def _rest(request: GenerateRequest, parts: Sequence[Completion]) -> GenerateRequest:
    if not parts:
        return request
    done = tuple(token for part in parts for token in part.tokens)
    return attrs.evolve(
        request,
        sample_id=f"{request.sample_id}.{len(parts)}",
        prompt_tokens=request.prompt_tokens + done,
        params=attrs.evolve(request.params, max_tokens=request.params.max_tokens - len(done)),
        # With the same seed, the random numbers of the first part would repeat.
        seed=seed_of(request.seed, len(parts)),
    )


def _joined(request: GenerateRequest, parts: Sequence[Completion], tokenizer: PreTrainedTokenizerBase) -> Completion:
    if len(parts) == 1:
        return parts[0]
    last = parts[-1]
    tokens = tuple(token for part in parts for token in part.tokens)
    end = _first_stop(tokens, request.params.stop, tokenizer)
    routes, kept = last.routed_experts, [part.kept_tokens for part in parts if part.kept_tokens is not None]
    # The last token has no routes, because the engine never computed it as an input.
    return Completion(
        tokens=tokens[:end],
        logprobs=tuple(logprob for part in parts for logprob in part.logprobs)[:end],
        policy_versions=tuple(version for part in parts for version in part.policy_versions)[:end],
        stop_reason=last.stop_reason if end is None else "stop",
        routed_experts=routes if routes is None or end is None else routes[: len(request.prompt_tokens) + end - 1],
        kept_tokens=KeptTokens.joined(kept).first(end) if kept else None,
    )


def _first_stop(tokens: Sequence[int], stop: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns the number of tokens up to the end of the first stop string, or None. The engine does not find a stop
    string that spans two parts."""
    if not stop:
        return None
    watch = StopStringWatch(tokenizer, stop)
    return next((length for length, token in enumerate(tokens, start=1) if watch.sees_stop(token)), None)
