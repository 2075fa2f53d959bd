"""Declares the fields of request bodies under /rl. A body with a missing or unknown field, a wrong type or a value out
of range is refused before it reaches the engine, because some values would end the engine's input thread."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from rl_core.interfaces import GenerateRequest, PauseMode, Rendezvous, SamplingParams

MAX_SAMPLES = 4096
"""Maximum number of samples of one request."""

Name = Annotated[str, Meta(min_length=1, max_length=512)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
Seconds = Annotated[float, Meta(gt=0, le=7 * 24 * 3600)]


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """The empty body of a route without arguments."""


class Sampling(Body):
    """See `SamplingParams`."""

    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)]
    temperature: Annotated[float, Meta(ge=0)]
    top_p: Annotated[float, Meta(gt=0, le=1)]
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)]
    min_p: Annotated[float, Meta(ge=0, le=1)]
    stop: list[Name]
    stop_token_ids: list[Count]
    ignore_eos: bool
    extra_args: dict[str, Any]
    structural_tag: str | None

    def __post_init__(self) -> None:
        if math.isinf(self.temperature):
            raise ValueError("expected a finite temperature")


class GenerateBody(Body):
    """See `GenerateRequest`."""

    sample_id: Name
    prompt_tokens: bytes
    """Token ids as little-endian int32 values."""
    params: Sampling
    seed: int
    num_samples: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)]
    session_id: Name | None

    def request(self) -> GenerateRequest:
        """Converts the body to the engine's request. Raises ValueError if `prompt_tokens` is not a whole number of
        int32 values."""
        params = msgspec.structs.asdict(self.params)
        tuples = {name: tuple(params[name]) for name in ("stop", "stop_token_ids")}
        return GenerateRequest(
            sample_id=self.sample_id,
            prompt_tokens=tuple(np.frombuffer(self.prompt_tokens, dtype="<i4").tolist()),
            params=SamplingParams(**{**params, **tuples}),
            seed=self.seed,
            num_samples=self.num_samples,
            session_id=self.session_id,
        )


class ScoreBody(Body):
    """Sequences of int32 token ids to score, and the name of the adapter to score them with; None: the policy."""

    sequences: Annotated[list[bytes], Meta(max_length=MAX_SAMPLES)]
    adapter: Name | None


class AdapterBody(Body):
    """An adapter in a directory on the server's machine."""

    name: Name
    path: Annotated[str, Meta(min_length=1, max_length=4096)]


class SamplesBody(Body):
    """Ids of requests to cancel."""

    sample_ids: list[Name]


class AbortBody(Body):
    """Ids of requests to abort; None: all requests."""

    sample_ids: list[Name] | None


class PauseBody(Body):
    """See `InferenceClient.pause`."""

    mode: PauseMode


class UpdateBody(Body):
    """See `Rendezvous`."""

    receiver: str
    data: dict[str, Any]
    adapter: dict[str, Any] | None
    version: Count
    timeout_s: Seconds
    delta: dict[str, Any] | None = None

    def rendezvous(self) -> Rendezvous:
        """Converts the body to a `Rendezvous`. The transport's name stays empty, because it is not sent."""
        return Rendezvous(transport="", receiver=self.receiver, data=self.data, adapter=self.adapter, delta=self.delta)


class SleepBody(Body):
    """Sleep level: 1 keeps the weights in host memory, 2 drops them."""

    level: Literal[1, 2]


class WakeBody(Body):
    """Parts of memory to allocate again; None: all."""

    tags: list[Literal["weights", "kv_cache"]] | None
