"""An engine that returns scripted tokens. It serves tests of generators, which must work with any tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from rl_core.errors import GenerationError
from rl_core.interfaces import Completion, GenerateRequest, Sampler, StopReason

Script = Callable[[GenerateRequest], Sequence[int]]
"""Returns the tokens of the response to a request. Tokens beyond the request's `max_tokens` are cut off."""


@attrs.frozen(eq=False)
class Exchange:
    """A request and one of its completions."""

    request: GenerateRequest
    completion: Completion


class ScriptedClient(Sampler):
    """An engine without a model.

    A response ends where its script ends, or after the first of `end_tokens` in it. The log-probs of the
    first 2**20 tokens all differ. The policy version of a completion is the value of `version` at the time of sampling.
    Routes depend only on position, token, layer and version.
    """

    def __init__(
        self,
        script: Script,
        *,
        end_tokens: Sequence[int] = (),
        abort_after: Callable[[GenerateRequest], int | None] = lambda request: None,
        route_layers: int | None = None,
    ) -> None:
        """
        Args:
            abort_after: returns the number of tokens after which a request is aborted; None: it is not aborted.
            route_layers: number of layers, with two experts per token, whose routes are returned; None: no routes.
        """
        self._script = script
        self._end_tokens = frozenset(end_tokens)
        self._abort_after = abort_after
        self._route_layers = route_layers
        self._num_sampled = 0
        self.version = 0
        self.exchanges: list[Exchange] = []

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        """See `Sampler.generate`."""
        if request.sample_id in {exchange.request.sample_id for exchange in self.exchanges[-1000:]}:
            raise GenerationError(f"sample_id {request.sample_id!r} was sent twice")
        await asyncio.sleep(0)
        completions = tuple(self._completion(request) for _ in range(request.num_samples))
        self.exchanges += [Exchange(request, completion) for completion in completions]
        return completions

    def _completion(self, request: GenerateRequest) -> Completion:
        tokens, reason = self._tokens(request)
        numbers = range(self._num_sampled, self._num_sampled + len(tokens))
        self._num_sampled += len(tokens)
        return Completion(
            tokens=tokens,
            # All these log-probs are exact in float32.
            logprobs=tuple(-(1 + number % 2**20) / 2**16 for number in numbers),
            policy_versions=(self.version,) * len(tokens),
            stop_reason=reason,
            routed_experts=self._routes(request.prompt_tokens + tokens),
        )

    def _tokens(self, request: GenerateRequest) -> tuple[tuple[int, ...], StopReason]:
        tokens = tuple(self._script(request))[: request.params.max_tokens]
        end = next((length for length, token in enumerate(tokens, start=1) if token in self._end_tokens), None)
        limit = self._abort_after(request)
        if limit is not None and limit < (end or len(tokens)):
            return tokens[:limit], "abort"
        return (tokens[:end], "stop") if end else (tokens, "length")

    def _routes(self, tokens: tuple[int, ...]) -> np.ndarray | None:
        return None if self._route_layers is None else expected_routes(tokens[:-1], self._route_layers, self.version)


def expected_routes(tokens: Sequence[int], num_layers: int, version: int) -> np.ndarray:
    """The routes that a `ScriptedClient` returns for `tokens` at a version, uint8 [tokens, layers, 2]."""
    position, token = np.arange(len(tokens))[:, None, None], np.asarray(tokens)[:, None, None]
    layer, choice = np.arange(num_layers)[None, :, None], np.arange(2)[None, None]
    return ((7 * position + 3 * token + 5 * layer + 11 * choice + 101 * version) % 251).astype(np.uint8)
