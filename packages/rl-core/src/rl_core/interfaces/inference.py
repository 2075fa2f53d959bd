"""Inference: token ids in, token ids out (`InferenceClient`), and what starts the engines (`InferencePlugin`, which is
told an `EngineSpec`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs

from rl_core.interfaces.training import LoraConfig
from rl_core.interfaces.weights import Manifest, Rendezvous

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How tokens are drawn."""

    max_tokens: int = 1024
    temperature: float = 1.0
    """0 takes the most likely token; the reported log-prob is then that of the unscaled distribution."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Generation ends when the response's text contains one of these; the tokens up to there are kept."""
    stop_token_ids: tuple[int, ...] = ()
    """Besides the model's own end-of-sequence token; the stopping token is part of the response."""
    ignore_eos: bool = False


@attrs.frozen(kw_only=True)
class GenerateRequest:
    """Token ids in. A retried request carries the same `sample_id` and never yields a second sample."""

    sample_id: str
    prompt_tokens: tuple[int, ...]
    params: SamplingParams
    seed: int
    """Fixes the sample, whatever else the engine runs at the same time (up to float rounding of the logits)."""
    num_samples: int = 1
    """Independent samples of the same prompt; sample i is drawn with seed + i."""
    session_id: str | None = None
    """Requests of one episode share it: a router sends them to the same engine."""


StopReason = Literal["stop", "length", "abort"]


@attrs.frozen(kw_only=True)
class Completion:
    """Token ids out, one sample."""

    tokens: tuple[int, ...]
    """The sampled tokens, a stopping token included."""
    logprobs: tuple[float, ...]
    """Of the distribution each token was sampled from, one per token."""
    policy_versions: tuple[int, ...]
    """The weights that sampled each token."""
    stop_reason: StopReason
    routed_experts: np.ndarray | None = None
    """[prompt + response − 1, layers, experts per token]: the last token was never an input."""


@attrs.frozen(kw_only=True)
class EngineHealth:
    """What an engine says of itself."""

    version: int
    """Of the weights it serves; -1 before the first update."""
    num_running: int
    num_waiting: int


@runtime_checkable
class Sampler(Protocol):
    """Token ids in, token ids out: what a `Generator` needs of an engine."""

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        """`num_samples` completions. Raises GenerationError for a prompt the engine cannot take, DeadlineError."""
        ...


@runtime_checkable
class InferenceClient(Sampler, Protocol):
    """A sampler whose weights the loop moves on. Every call has a deadline whose error names what was waited for."""

    async def pause(self, mode: Literal["keep", "abort", "wait"] = "keep") -> None:
        """Stops sampling: in-flight requests freeze (`keep`), return what they have (`abort`), or are finished first
        (`wait`)."""
        ...

    async def resume(self) -> None: ...

    async def abort(self, sample_ids: Sequence[str] | None = None) -> None:
        """Ends these requests (all, for None); each returns what it has, with stop reason `abort`."""
        ...

    async def update_weights(self, rendezvous: Rendezvous, version: int) -> Manifest:
        """Receives and loads a version. Fails as a whole: the engine serves the old version or, if that is gone,
        nothing until a later update succeeds."""
        ...

    async def health(self) -> EngineHealth: ...

    async def close(self) -> None: ...


@runtime_checkable
class Sleepable(Protocol):
    """A client whose engines can give their device memory back between phases."""

    async def sleep(self) -> None:
        """Gives back the memory of weights and cache. Called with no request under way, and none is made until `wake`
        and then `update_weights`: one that finds no weights is a GenerationError. A second call does nothing."""
        ...

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        """Takes the memory again, all of it or the parts named: `weights`, which are yet to come by `update_weights`,
        and `kv_cache`, after which tokens can be sampled. What is awake stays as it is."""
        ...


@runtime_checkable
class WeightReceivers(Protocol):
    """A client whose engines receive weights in several processes; of any other client it is one."""

    def num_weight_receivers(self) -> int:
        """Processes that will build a receiver in the next `update_weights`; those of dead engines are left out."""
        ...


@runtime_checkable
class Scoring(Protocol):
    """A client whose engines can score given tokens: what weight verification compares with the trainer."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        ...

    async def score(self, sequences: Sequence[Sequence[int]]) -> Mapping[str, Sequence[Sequence[float]]]:
        """Of every engine that serves, by its name: per sequence, log p(token t | tokens before it) at temperature 1,
        0.0 for the first token."""
        ...


@runtime_checkable
class WeightPreparing(Protocol):
    """A client whose engines receive a version of a staged transport while they sample."""

    async def prepare_weights(self, rendezvous: Rendezvous, version: int) -> None:
        """Every engine receives the version and checks it. Nothing of it is served until `update_weights` is called
        with the same rendezvous, which then loads it.

        Raises:
            WeightSyncError: an engine did not get it whole; all go on serving the version they have.
        """
        ...


@runtime_checkable
class AdapterServing(Protocol):
    """A client whose engines keep their model and serve low-rank adapters over it: the policy's own, which
    `update_weights` replaces in place, and others by name."""

    async def load_lora_from_disk(self, name: str, path: str | Path) -> None:
        """Every engine serves the adapter at `path` as the model `name`, also one that is started again later. A name
        that is there already is replaced in place: requests under way go on with the new adapter.

        Args:
            name: that OpenAI clients ask for; no name of the policy.
            path: a directory in peft's format (`adapter_config.json`, `adapter_model.safetensors`) that the engines
                see.

        Raises:
            GenerationError: an engine cannot serve it, and has what it had before; or it does not answer with numbers.
        """
        ...


@runtime_checkable
class IdleMeasuring(Protocol):
    """A client of several engines that knows which of them had nothing to do."""

    def idle_lap(self) -> Mapping[str, float]:
        """Of every engine, by its number: seconds since the last call in which no sample was asked of it, those in
        which it was down among them."""
        ...


@runtime_checkable
class Recovering(Protocol):
    """A client that starts failed engines again. They serve nothing until they hold the current version: the trainer
    publishes it again between two steps, or the next one at the end of a step."""

    @property
    def lacks_weights(self) -> bool:
        """An engine is up that does not hold the current version, and no update is under way."""
        ...

    async def needs_weights(self) -> None:
        """Returns when `lacks_weights`."""
        ...


@attrs.frozen(kw_only=True)
class EngineSpec:
    """Everything that an engine is told before it is started; plain data. What it is told later are calls of its
    client."""

    options: Any
    """An instance of the plug-in's own options class (see `Configurable`); None where it has none."""
    model_path: str
    """Directory or name of the model that it serves until the first weight update, and whose tokenizer it uses."""
    dtype: Literal["bfloat16", "float16", "float32"]
    """In which it computes."""
    num_engines: int
    """How many engines the client stands for."""
    max_num_seqs: int
    """Sequences that an engine decodes together."""
    return_routed_experts: bool
    """Completions have `routed_experts`."""
    lora: LoraConfig
    """The policy's adapters. Where `lora.is_sent_alone`, the model stays as it is and the adapter alone is updated;
    else updates are whole weights."""
    sampling: SamplingParams
    """How training samples are drawn; every request carries its own."""
    eval_sampling: SamplingParams
    """How samples of evaluations are drawn."""
    init_kwargs: Mapping[str, Any]
    """`engine_init_kwargs`: passed on to the library that the engine is built on."""
    shares_devices: bool
    """Training has the same devices: the engine leaves them between phases (see `Sleepable`)."""
    seed: int
    """Of the run; every request carries its own."""
    num_threads: int | None
    """CPU threads of an engine in the trainer's process; None leaves it to the library."""
    weight_transport: str
    """By which weights will come: an entry point's name of `rl_core.weight_transports`, or `package.module:object`."""
    request_timeout_s: float
    """Longest wait for the answer to a request, and for a weight update."""
    run_dir: Path
    """Where the run leaves its files; logs of engines go into `logs` there. It may not exist yet."""


@attrs.frozen(kw_only=True)
class EnginePlan:
    """What one device of an engine would hold."""

    num_devices: int
    """That one engine is split over."""
    weight_bytes: int
    kv_bytes_per_token: float
    """Of keys and values, for every token of a sequence that is being computed."""
    computing_bytes: int
    """Estimate of what a step of the engine takes besides weights and keys and values."""
    asleep_bytes: int
    """Estimate of what stays on the device while the engine sleeps (see `Sleepable`)."""
    asleep_host_bytes: int
    """What it keeps in host memory for each device while it sleeps."""
    memory_share: float
    """Part of the device's memory that the engine takes for itself while it serves; what is left of it beside weights
    and computation is for keys and values."""
    can_sleep: bool


@runtime_checkable
class EnginePlanner(Protocol):
    """An engine's plug-in that can say, without starting anything, what its devices would hold (`rl plan`)."""

    def plan(self, spec: EngineSpec) -> EnginePlan:
        """Raises ConfigError where the engine cannot be split like that, or the model's sizes are not known."""
        ...


@runtime_checkable
class DeltaReceiving(Protocol):
    """An engine's plug-in whose engines take syncs that send what changed (`Rendezvous.delta`)."""

    @property
    def receives_deltas(self) -> bool: ...


@runtime_checkable
class HostSharing(Protocol):
    """An engine's plug-in that says whether its engines run on the controller's machine: weights then come through its
    memory, unless the configuration names a transport."""

    def is_on_this_host(self, options: Any) -> bool:
        """All of them do, with these options of its own (`EngineSpec.options`)."""
        ...


@runtime_checkable
class InferencePlugin(Protocol):
    """Makes an engine and its client: the object behind an entry point of `rl_core.inference`. Its module imports no
    torch. An engine with keys of its own is `Configurable` too."""

    @property
    def contract_version(self) -> int: ...

    @property
    def name(self) -> str: ...

    def validate(self, spec: EngineSpec) -> None:
        """Raises ConfigError before any process is started.

        A model that is not there yet is no reason: recipes may make theirs after this call.
        """
        ...

    async def create(self, spec: EngineSpec) -> InferenceClient:
        """Starts the engine(s); they hold the weights of `spec.model_path` until the first update."""
        ...
