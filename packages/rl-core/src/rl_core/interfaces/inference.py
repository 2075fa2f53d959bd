"""Contracts of inference: the client that samples token ids for prompts of token ids (`InferenceClient`), and the
plug-in that starts engines as an `EngineSpec` describes (`EnginePlugin`)."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import attrs
import numpy as np

from rl_core.errors import ConfigError, PluginError
from rl_core.interfaces.training import LoraConfig
from rl_core.interfaces.weights import Manifest, Rendezvous

if TYPE_CHECKING:
    from pathlib import Path


@attrs.frozen(kw_only=True)
class SamplingParams:
    """Settings of sampling, and the conditions that end generation."""

    max_tokens: int = 1024
    temperature: float = 1.0
    """Divides the logits. 0: the most likely token is chosen, and log-probs are those at temperature 1."""
    top_p: float = 1.0
    top_k: int = -1
    """Only the k most likely tokens can be sampled; -1: all tokens."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Generation ends when the text of the response contains one of these strings. The response includes the token
    that completed the string."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end generation in addition to the model's end-of-sequence token. The stopping token is part of the
    response."""
    ignore_eos: bool = False
    extra_args: Mapping[str, Any] = attrs.field(factory=dict)
    """Further parameters of the engine's own sampling, by the engine's names. Only for engines whose plug-in
    `accepts_extra_args`."""
    structural_tag: str | None = None
    """Grammar that the whole response must match: a structural tag of xgrammar, as JSON text. The reported log-probs
    are then those of the constrained distribution. Only for engines whose plug-in `accepts_structural_tags`."""


@attrs.frozen(kw_only=True)
class GenerateRequest:
    """A request for samples of one prompt of token ids. A retry has the same `sample_id` and never produces a second
    sample."""

    sample_id: str
    prompt_tokens: tuple[int, ...]
    params: SamplingParams
    seed: int
    """Equal requests with equal seeds get the same sample, whatever else the engine computes at the same time (up to
    rounding of the logits)."""
    num_samples: int = 1
    """Number of independent samples of the prompt. Sample i uses seed + i."""
    session_id: str | None = None
    """The same for all requests of an episode, so that a router can send them to the same engine."""


StopReason = Literal["stop", "length", "abort"]


@attrs.frozen(kw_only=True)
class KeptTokens:
    """For each of some tokens, the ids that top-p, top-k and min-p kept, among which the token was sampled."""

    counts: np.ndarray = attrs.field(eq=attrs.cmp_using(eq=np.array_equal))
    """int32 [tokens]: number of ids of each token. 0: all ids of the vocabulary, or the token was not sampled."""
    ids: np.ndarray = attrs.field(eq=attrs.cmp_using(eq=np.array_equal))
    """int32 [sum of counts]: the ids of one token after another. The ids of a token include the token."""

    @classmethod
    def none(cls, num_tokens: int) -> KeptTokens:
        """The record of tokens for which nothing was excluded."""
        return cls(counts=np.zeros(num_tokens, np.int32), ids=np.zeros(0, np.int32))

    @classmethod
    def of_each(cls, ids: Sequence[Sequence[int] | np.ndarray]) -> KeptTokens:
        """Makes the record from the ids of each token."""
        counts = np.fromiter(map(len, ids), np.int32, count=len(ids))
        return cls(counts=counts, ids=np.concatenate([np.zeros(0, np.int32), *(np.asarray(i, np.int32) for i in ids)]))

    @classmethod
    def joined(cls, parts: Sequence[KeptTokens]) -> KeptTokens:
        """The record of the tokens of all parts."""
        empty = cls.none(0)
        counts, ids = (np.concatenate([getattr(part, name) for part in (empty, *parts)]) for name in ("counts", "ids"))
        return cls(counts=counts, ids=ids)

    def first(self, num_tokens: int | None) -> KeptTokens:
        """The record of the first tokens; None: of all."""
        counts = self.counts[:num_tokens]
        return KeptTokens(counts=counts, ids=self.ids[: counts.sum()])


@attrs.frozen(kw_only=True)
class Completion:
    """One sample: its token ids, and what the engine recorded about them."""

    tokens: tuple[int, ...]
    """The sampled tokens, including a stopping token."""
    logprobs: tuple[float, ...]
    """One log-prob per token, under the distribution from which the token was sampled; for temperature 0, under the
    distribution at temperature 1."""
    policy_versions: tuple[int, ...]
    """The weight version that sampled each token."""
    stop_reason: StopReason
    routed_experts: np.ndarray | None = None
    """[prompt + response − 1, layers, experts per token]: the experts to which each token was routed. The last token
    was never an input, so it has no experts."""
    kept_tokens: KeptTokens | None = None
    """What sampling kept for each of `tokens`; None if the engine was not asked for it
    (`EngineSpec.return_kept_tokens`)."""


@attrs.frozen(kw_only=True)
class EngineHealth:
    """The state of an engine, as the engine reports it."""

    version: int
    """Version of the weights that the engine serves; -1 before the first update."""
    num_running: int
    num_waiting: int


def _unsupported(plugin: object, method: str) -> PluginError:
    return PluginError(
        f"{type(plugin).__name__} defines no `{method}`; a flag says so, which the caller has to ask first"
    )


class Sampler(Protocol):
    """The part of an `InferenceClient` that a `Generator` uses: it samples token ids for prompts of token ids. Authors
    inherit this class."""

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        """Returns `num_samples` completions of the prompt. Raises GenerationError for a prompt that the engine cannot
        process, DeadlineError if the completions take too long."""
        ...


PauseMode = Literal["keep", "abort", "wait"]


class InferenceClient(Sampler, Protocol):
    """A sampler whose weights the loop updates. Every call has a deadline. A call that exceeds it raises an error that
    says what the call waited for. Authors inherit this class; methods with a body are optional."""

    can_sleep: bool = False
    """Whether the engines can free their device memory between phases (`sleep`, `wake`)."""
    can_score: bool = False
    """Whether the engines can compute log-probs of given tokens (`score`, `vocab_size`)."""
    can_prepare_weights: bool = False
    """Whether the engines can receive weights of a staged transport while they sample (`prepare_weights`)."""

    @abstractmethod
    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stops sampling. Running requests pause (`keep`), return the tokens sampled so far (`abort`) or finish first
        (`wait`)."""
        ...

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def abort(self, sample_ids: Sequence[str] | None = None) -> None:
        """Ends these requests, or all if None. Each returns the tokens sampled so far, with stop reason `abort`."""
        ...

    @abstractmethod
    async def update_weights(self, rendezvous: Rendezvous, version: int) -> Manifest:
        """Receives and loads a version of the weights. Returns the tensors that the engines received. If the update
        fails, the engine continues to serve the old version or, if the old weights are already overwritten, serves
        nothing until a later update succeeds."""
        ...

    @abstractmethod
    async def health(self) -> EngineHealth: ...

    @abstractmethod
    async def close(self) -> None: ...

    # --- weight syncs -------------------------------------------------------------------------------------------------

    async def prepare_weights(self, rendezvous: Rendezvous, version: int) -> None:
        """Lets every engine receive and check the version without loading it. `update_weights` with the same rendezvous
        loads the version later; until then, the engines serve the old one.

        Raises:
            WeightSyncError: an engine received incomplete or wrong weights. All engines still serve the old version.
        """
        raise _unsupported(self, "prepare_weights")

    def num_weight_receivers(self) -> int:
        """Number of processes that will create a receiver in the next `update_weights`. Processes of dead engines do
        not count."""
        return 1

    # --- devices that engines and models share ------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Frees the memory of weights and cache. Callers ensure that no request is running, and send none before `wake`
        and `update_weights`. A request to an engine without weights raises GenerationError. A second call does
        nothing."""
        raise _unsupported(self, "sleep")

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        """Allocates the memory again: all of it (None), or the named parts. The part `weights` is then filled by
        `update_weights`; the part `kv_cache` is needed for sampling. Parts that are already allocated do not change."""
        raise _unsupported(self, "wake")

    # --- log-probs, with which weights are verified and a reference is served -----------------------------------------

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: token ids are smaller."""
        raise _unsupported(self, "vocab_size")

    async def score(self, sequences: Sequence[Sequence[int]]) -> Mapping[str, Sequence[Sequence[float]]]:
        """Scores the sequences with every engine in service. Returns engine's name → for every sequence,
        log p(token t | previous tokens) of each token at temperature 1; 0.0 for the first token."""
        raise _unsupported(self, "score")

    # --- several engines, and engines that are restarted --------------------------------------------------------------

    def idle_lap(self) -> Mapping[str, float]:
        """Engine number → seconds for which the engine had no request or was down since the last call of this method.
        Empty: not measured."""
        return {}

    @property
    def lacks_weights(self) -> bool:
        """Whether a restarted engine is running without the current version, and no update is in progress. It serves
        nothing until it has the version: the trainer publishes it again between two steps, or the next version at the
        end of a step."""
        return False

    async def needs_weights(self) -> None:
        """Returns as soon as `lacks_weights` is true. By default, waits until it is cancelled."""
        await asyncio.get_running_loop().create_future()

    async def has_lost_engines(self) -> bool:
        """Returns whether an engine or the connection to it was lost during an update. If so, another update may
        succeed. Called after a failed update. An engine can fail its part of an update before its death is detected, so
        this method waits as long as detection may take. If no engine is left, it returns when one has restarted.

        Raises:
            DeadlineError: no engine was left, and none restarted in time.
        """
        return False


@attrs.frozen(kw_only=True)
class EngineSpec:
    """Plain data with everything that an engine needs to know before it starts."""

    options: Any
    """An instance of `EnginePlugin.options_class`; None if it has none."""
    model_path: str
    """Directory or name of the model. The engine uses its tokenizer, and its weights until the first update."""
    dtype: Literal["bfloat16", "float16", "float32"]
    """The dtype in which the engine computes."""
    num_engines: int
    """Number of engines behind the client."""
    max_num_seqs: int
    """Largest number of sequences that one engine decodes at a time."""
    return_routed_experts: bool
    """Whether completions have `routed_experts`."""
    return_kept_tokens: bool = False
    """Whether completions have `kept_tokens`, because training samples are truncated (top-p, top-k, min-p). Set only
    if `EnginePlugin.returns_kept_tokens`; other engines cannot truncate them."""
    lora: LoraConfig
    """The policy's adapters. If `lora.is_sent_alone`, updates contain only the adapter; else they contain whole
    weights."""
    sampling: SamplingParams
    """Sampling parameters in training. Used only for checks and planning, because each request has its own
    parameters."""
    eval_sampling: SamplingParams
    """Sampling parameters in evaluation. Also used only for checks and planning."""
    init_kwargs: Mapping[str, Any]
    """`engine_init_kwargs`: additional arguments for the library that the engine uses."""
    shares_devices: bool
    """Whether training uses the same devices. If so, the engine frees their memory between phases
    (`InferenceClient.sleep`)."""
    seed: int
    """Seed of the run. Each request has its own seed."""
    num_threads: int | None
    """CPU threads of an engine in the trainer's process. None: the library decides."""
    weight_transport: str
    """The weight transport: an entry-point name of `rl_core.weight_transports`, or `package.module:object`."""
    request_timeout_s: float
    """Longest time that a request or a weight update may take."""
    run_dir: Path
    """The run directory, which may not exist yet. Engines write their logs to `logs` in it."""


@attrs.frozen(kw_only=True)
class ServedModel:
    """A model besides the policy that a run's engines serve over OpenAI's API. Weight updates do not change it."""

    url: str
    """The API's base URL, ending in `/v1`; reachable from the run's machine."""
    name: str
    """The field `model` of requests."""
    key: str = attrs.field(repr=False)
    """The API key."""


@attrs.frozen(kw_only=True)
class EnginePlan:
    """Planned memory use of one device of an engine."""

    num_devices: int
    """Number of devices of one engine."""
    weight_bytes: int
    kv_bytes_per_token: float
    """Keys and values of one token, in bytes."""
    computing_bytes: int
    """Estimated memory of an engine step besides weights, keys and values."""
    asleep_bytes: int
    """Estimated device memory that stays in use while the engine sleeps."""
    asleep_host_bytes: int
    """Host memory per device that the engine uses while it sleeps."""
    memory_share: float
    """Fraction of the device's memory that the engine uses while it serves. Keys and values get what weights and
    computation leave free."""
    can_sleep: bool


class EnginePlugin(Protocol):
    """The object of an entry point of `rl_core.inference`, which creates an engine and its client. Its module must not
    import torch. Authors inherit this class; methods with a body are optional."""

    name: str
    options_class: type | None = None
    """Declares the engine's own keys in `generator.inference_engine`
    (`rl_core.interfaces.options`). None: it has none."""
    returns_kept_tokens: bool = False
    """Whether completions can have `kept_tokens` (`EngineSpec.return_kept_tokens`)."""
    receives_deltas: bool = False
    """Whether the engines accept syncs that send only changes (`Rendezvous.delta`)."""
    receives_adapters: bool = False
    """Whether the engines accept syncs that send only the policy's adapter (`EngineSpec.lora.is_sent_alone`)."""
    accepts_extra_args: bool = False
    """Whether the engines accept `SamplingParams.extra_args`."""
    accepts_structural_tags: bool = False
    """Whether the engines accept `SamplingParams.structural_tag`."""

    def validate(self, spec: EngineSpec) -> None:
        """Raises ConfigError if the engines cannot run as `spec` says. Called before any process is started.

        A missing model is not an error: recipes may create it after this call.
        """

    @abstractmethod
    async def create(self, spec: EngineSpec) -> InferenceClient:
        """Starts the engines. They serve the weights of `spec.model_path` until the first update."""
        ...

    def is_on_this_host(self, options: Any) -> bool:
        """Whether all engines run on the controller's machine with these options (`EngineSpec.options`). If they do,
        the default transport is shared memory."""
        return False

    def plan(self, spec: EngineSpec) -> EnginePlan | None:
        """Plans the memory of one device without starting anything (`rl plan`). None: the engine cannot plan it. Raises
        ConfigError if the engine cannot be split over devices as `spec` says, or if the model's sizes are unknown."""
        return None

    def require_servable(self, spec: EngineSpec, adapter: Path | None) -> None:
        """Raises ConfigError if engines started with `spec` cannot answer environments' requests to the model, as
        `serve_model` explains it. Called before any process is started."""
        raise ConfigError(
            f"the engine {self.name!r} serves only the policy; set generator.inference_engine.backend=vllm, or give "
            "the URL of another server"
        )

    async def serve_model(self, client: InferenceClient, adapter: Path | None) -> ServedModel:
        """Serves a model other than the policy until the client is closed: the base model alone, or with another
        adapter. Engines that restart serve it again.

        Args:
            client: made by this plug-in's `create`.
            adapter: a directory in peft's format; None: the model at `EngineSpec.model_path`, without an adapter.

        Raises:
            GenerationError: an engine cannot serve the model.
            DeadlineError: an engine did not respond in time.
        """
        raise _unsupported(self, "serve_model")
