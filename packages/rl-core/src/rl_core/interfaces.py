"""The contracts between packages, and the records that cross them. Nothing else, and no torch at import.

A Protocol's `isinstance` proves names only; what a plug-in must DO is proved by the suites of `rl_core.testing`.
Optional abilities are Protocols of their own (`Offloadable`, `BackgroundSaver`, `Inspectable`, `Planner`, `Sleepable`).

Who implements what: a training package a `Backend` (and its `Worker`), a rollout package an `InferencePlugin` (and its
`InferenceClient`), a `WeightTransport`, a `Generator`; a recipe an `Environment`. `WorkerGroup` and the loop are ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from torch import Tensor

    from rl_core.batch import Batch
    from rl_core.config import Config
    from rl_core.layout.mesh import Mesh

CONTRACT_VERSION = 1
"""Raised when a contract below changes in a way that existing plug-ins would not survive."""

Role = Literal["policy", "reference", "critic"]
Metrics = Mapping[str, tuple[float, float]]
"""Name → (sum, weight): parts add up over micro-batches and ranks and are divided once, at the end."""
Plan = Sequence[Sequence[int]]
"""One rank's micro-batches, each the indices of its sequences in the batch the rank was given. Micro-batches are run in
order; every rank of a group has the same number of them."""
Row = Mapping[str, Any]
"""One row of a data file: `prompt` (text, or chat messages) and whatever the environment reads."""


# --- training -------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) and its schedule."""

    lr: float = 1e-6
    """Peak learning rate."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moment."""
    weight_decay: float = 0.01
    """Decoupled weight decay; biases and norms are decayed too, as the field does."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global L2 norm; 0 switches clipping off."""
    num_warmup_steps: int = 0
    """Optimizer steps of warm-up: step i, counted from 0, runs at lr · (i + 1) / num_warmup_steps."""
    scheduler: Literal["constant_with_warmup", "linear", "cosine"] = "constant_with_warmup"
    """Shape after the warm-up; `linear` and `cosine` fall to 0 at the run's last optimizer step."""
    offload_after_step: bool = True
    """Colocated training only: move the optimizer's state to the CPU between training phases."""


@attrs.frozen(kw_only=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685)."""

    rank: int = 0
    """0: no adapters, all weights are trained."""
    alpha: int = 16
    """The adapter's output is scaled by alpha / rank."""
    dropout: float = 0.0
    """Dropout in front of the adapter; makes results depend on the micro-batch split."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Module names to adapt."""
    exclude_modules: str | tuple[str, ...] | None = None
    """Module names to leave out."""
    init_method: str = "kaiming"
    """Initialisation of the adapter's first matrix."""


@attrs.frozen(kw_only=True)
class ModelConfig:
    """Which model."""

    path: str | None = None
    """A Hugging Face model directory or name."""
    lora: LoraConfig = LoraConfig()
    """Adapters; off at rank 0."""


@attrs.frozen(kw_only=True)
class WorkerSpec:
    """Everything a rank needs to build its model; plain data, the same for every rank of a group."""

    role: Role
    model: ModelConfig
    optimizer: OptimizerConfig | None
    """None: never trained (the reference)."""
    options: Any
    """An instance of the backend's own options class."""
    bf16: bool
    """Compute in bfloat16 (parameters stay float32 where they are trained); else float32."""
    gradient_checkpointing: bool
    """Recompute activations in backward."""
    use_sample_packing: bool
    """A micro-batch is one packed stream; else a padded rectangle."""
    logprobs_chunk_size: int
    """Tokens whose float32 logits exist at a time."""
    total_optimizer_steps: int | None
    """Length of the schedule; None where the schedule does not need it."""
    seed: int
    num_threads: int | None = None
    """Torch threads of a rank; None leaves torch's choice."""


@attrs.frozen(kw_only=True)
class RankInfo:
    """Where a rank stands in its group."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_address: str = "127.0.0.1"
    master_port: int = 0


@attrs.frozen(kw_only=True)
class LossSpec:
    """What is minimised: sum over t of loss_weights[t] · (loss[t] + kl_coef · KL[t] − entropy_coef · H[t])."""

    name: str
    """A policy or value loss: an entry-point name of `rl_core.policy_losses`, or `package.module:function`."""
    params: Mapping[str, Any] = attrs.field(factory=dict)
    """The function's keyword parameters."""
    kl_coef: float = 0.0
    """Weight of the KL to `ref_logprobs`; 0 leaves the term (and the column) out."""
    kl_estimator: str = "k3"
    """k1, k2, k3 or abs; with the suffix `+` the gradient-correct straight-through form."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; 0 leaves the term out."""


@attrs.frozen(kw_only=True)
class OptimizerStep:
    """What one optimizer step did."""

    grad_norm: float
    """Global L2 norm before clipping; not finite when the step was skipped."""
    learning_rate: float
    """The rate that was used."""
    skipped: bool
    """A gradient was not finite: weights, optimizer state and schedule are as before."""


@runtime_checkable
class Worker(Protocol):
    """One rank of one model. All calls come from one thread, one at a time; every rank of a group gets the same
    calls."""

    def forward(self, batch: Batch, plan: Plan, *, temperature: float) -> dict[str, Tensor]:
        """Scores without gradient: `logprobs` and `entropies` [T] of the stream (a critic: `values` [T]), float32 on
        the CPU. A backend that replays the routes of its own scoring pass adds `routed_experts` and `routed`.

        Logits are divided by `temperature` first. Ranks that hold no result return an empty dict.
        """
        ...

    def forward_backward(self, batch: Batch, plan: Plan, loss: LossSpec, *, temperature: float) -> Metrics:
        """Adds the gradient of the loss over `batch` to the gradients; returns the metrics' sums and weights.

        Metrics: `loss` (sum, 1) and those the loss function names, weighted by the trained tokens.
        """
        ...

    def optim_step(self) -> OptimizerStep:
        """Clips, steps, advances the schedule, clears the gradients; skips all that when a gradient is not finite."""
        ...

    def export_weights(self, max_bucket_bytes: int) -> Iterator[WeightBucket]:
        """The weights under Hugging Face names. Collective: every rank drains its iterator, also one that yields
        nothing."""
        ...

    def publish(self, sender: WeightSender, version: int, max_bucket_bytes: int) -> Manifest:
        """Sends `export_weights` through `sender`; returns what this rank sent."""
        ...

    def save_state(self, directory: Path) -> None:
        """Writes weights, optimizer and schedule; complete on return."""
        ...

    def load_state(self, directory: Path) -> None:
        """Continues exactly where `save_state` stopped, also at another world size. Raises CheckpointError."""
        ...

    def save_model(self, directory: Path) -> None:
        """Writes the model and its tokenizer in Hugging Face format."""
        ...

    def close(self) -> None:
        """Frees what the rank holds; a second call does nothing."""
        ...


@runtime_checkable
class Offloadable(Protocol):
    """A worker that can leave the accelerator between phases."""

    def offload(self, *, parameters: bool, optimizer: bool) -> None: ...

    def onload(self, *, parameters: bool, optimizer: bool) -> None: ...


@runtime_checkable
class BackgroundSaver(Protocol):
    """A worker that can save while training goes on (`trainer.async_save`). One save at a time."""

    def start_saving(self, directory: Path) -> None:
        """Copies what `save_state` writes and returns; files are written in the background, from the copy alone."""
        ...

    def has_saved(self) -> bool:
        """What `start_saving` began is complete on this rank; never waits for it. Raises what went wrong with it.

        Asked again, it answers again; without a save it is True.
        """
        ...


@runtime_checkable
class Perturbable(Protocol):
    """A worker whose weights can be changed for a moment: how it is proved that each tensor reaches the engines."""

    def perturb(self, seed: int, scale: float) -> None:
        """Adds normal noise to every parameter that training changes. Its standard deviation is `scale` times the
        parameter's root mean square, which counts as 1 / sqrt(last axis) at least: small weights are changed as much as
        those of a usual initialisation, zeros too. Copies of a parameter stay equal."""
        ...

    def restore(self) -> None:
        """Every parameter is bit for bit what it was before `perturb`; without one, nothing happens."""
        ...


@runtime_checkable
class Inspectable(Protocol):
    """A worker whose accumulated gradients can be read: the conformance suite's side door."""

    def gradients(self) -> dict[str, Tensor]:
        """Full (unsharded) float32 gradients under Hugging Face names, on the CPU; a tied weight appears once."""
        ...


@attrs.frozen(kw_only=True)
class RankPlan:
    """What one rank would hold."""

    rank: int
    data_part: int
    """Which of the parts of a batch it computes; ranks of one model replica share it."""
    layers: tuple[int, ...]
    """Transformer layers that it holds, or holds a part of."""
    experts: tuple[int, ...]
    """Of each layer that has any."""
    place: str
    """Where it stands where matrices, tokens or parameters are split, for people."""
    num_parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """Estimate of what forward passes keep for backward at the fullest moment, the output layer included."""


@runtime_checkable
class Planner(Protocol):
    """A backend that can say, without starting anything, what each rank of a model would hold (`rl plan`)."""

    def plan(
        self, spec: WorkerSpec, world_size: int, *, micro_batch_tokens: int, num_micro_batches: int
    ) -> tuple[RankPlan, ...]:
        """One entry per rank.

        Args:
            spec: the model.
            world_size: ranks.
            micro_batch_tokens: tokens of the largest micro-batch, before context ranks split it.
            num_micro_batches: per rank and mini-batch.

        Raises:
            ConfigError: as `validate`, or the model's sizes are not known.
        """
        ...


@runtime_checkable
class Backend(Protocol):
    """A training backend: the object behind an entry point of `rl_core.backends`. Its module imports no torch."""

    contract_version: int
    name: str
    config_section: str
    """The section of a model's configuration that it reads, e.g. `fsdp_config`."""
    options_class: type
    """Frozen attrs class of that section."""

    def mesh(self, options: Any, world_size: int) -> Mesh:
        """How `world_size` ranks are arranged. Raises ConfigError naming the nearest arrangement that fits."""
        ...

    def validate(self, spec: WorkerSpec, world_size: int) -> None:
        """Raises ConfigError for whatever this backend cannot train correctly, before any process is started."""
        ...

    def needs_own_process(self) -> bool:
        """True where a rank must not share the controller's process."""
        ...

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        """Called once, in the rank's process and thread."""
        ...


@runtime_checkable
class RouteFollowing(Protocol):
    """A backend that can send the policy's tokens to the experts that the engine chose (router replay). Its workers
    then refuse batches without routes, and others batches with routes (`rl_core.routes.require_routes`)."""

    def follows_routes(self, options: Any) -> bool:
        """Whether these options of the policy ask for it, whichever of them does."""
        ...


# --- weights --------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True, eq=False)
class WeightBucket:
    """Some parameters, packed for one transfer. Each rank describes its own; layouts may differ between ranks."""

    names: tuple[str, ...]
    """Hugging Face parameter names, in the order in which they lie in `data`."""
    dtypes: tuple[str, ...]
    """torch names without the prefix, e.g. `bfloat16`, one per name."""
    shapes: tuple[tuple[int, ...], ...]
    """Full (unsharded) shapes; a scalar is `()`."""
    data: Tensor
    """uint8, one axis, contiguous, no gaps, on any device."""
    checksums: tuple[int, ...] | None = None
    """CRC-32 of each tensor's bytes, where a receiver has computed them from what arrived."""

    def __attrs_post_init__(self) -> None:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError(
                f"WeightBucket: {len(self.names)} names, {len(self.dtypes)} dtypes and {len(self.shapes)} shapes; "
                f"first {self.names[:1]}"
            )


@attrs.frozen(kw_only=True)
class TensorRecord:
    """What one transferred tensor must equal on the other side."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int
    """CRC-32 of the tensor's bytes."""


@attrs.frozen(kw_only=True)
class Manifest:
    """What was sent, or what arrived: equal on both sides when a sync is complete and intact."""

    version: int
    tensors: Mapping[str, TensorRecord]


@attrs.frozen(kw_only=True)
class Rendezvous:
    """How the two sides of one weight sync meet. Plain data, made by the transport on the controller."""

    transport: str
    """Entry-point name of the transport."""
    receiver: str
    """`package.module:Class`, loaded in the engine's process."""
    data: Mapping[str, Any]
    """Whatever sender and receiver agreed upon: a directory, an address, a group size."""


class WeightSender(Protocol):
    """A rank's end of a sync."""

    def send(self, buckets: Iterator[WeightBucket], version: int) -> Manifest:
        """Drains `buckets` on every rank and returns what this rank sent."""
        ...


class WeightReceiver(Protocol):
    """An engine's end of a sync; built as `Class(rendezvous)`, in every process of an engine that holds weights."""

    is_staged: bool
    """As the transport's."""

    def receive(self, version: int) -> Iterator[WeightBucket]:
        """Yields every bucket of `version`; its data is the caller's to keep. Raises WeightSyncError if they are of
        another version, damaged or incomplete; what was yielded before is then worth nothing."""
        ...


@runtime_checkable
class WeightTransport(Protocol):
    """How weights get from ranks to engines (entry-point group `rl_core.weight_transports`)."""

    contract_version: int
    name: str
    is_staged: bool
    """True: what was sent can be read until `close`, by receivers that come late or again, and an engine takes it whole
    or keeps the version it has. False: both ends work at the same time, and what breaks half-way leaves an engine
    without weights that it could serve."""

    def open(self, *, num_ranks: int, num_engines: int) -> Rendezvous:
        """On the controller, once per sync.

        Args:
            num_ranks: senders that will come.
            num_engines: receivers that will come, at least: an engine of several processes counts as many.
        """
        ...

    def sender(self, rendezvous: Rendezvous, rank: int, world_size: int) -> WeightSender:
        """In each rank."""
        ...

    def close(self, rendezvous: Rendezvous) -> None:
        """On the controller, whether the sync succeeded or not: removes what `open` left, and ends both sides' waits. A
        second call does nothing."""
        ...


# --- inference ------------------------------------------------------------------------------------------------------


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
TrajectoryEnd = Literal["done", "max_turns", "context"]
"""How an episode ended: the environment was done, `generator.max_turns` were played, or the conversation had grown too
long for another turn."""


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
class InferenceClient(Protocol):
    """Token ids in, token ids out. Every call has a deadline whose error names what was waited for."""

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        """`num_samples` completions. Raises GenerationError for a prompt the engine cannot take, DeadlineError."""
        ...

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

    vocab_size: int
    """Token ids are below it."""

    async def score(self, sequences: Sequence[Sequence[int]]) -> Mapping[str, Sequence[Sequence[float]]]:
        """Of every engine that serves, by its name: per sequence, log p(token t | tokens before it) at temperature 1,
        0.0 for the first token."""
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


@runtime_checkable
class InferencePlugin(Protocol):
    """Makes an engine and its client: the object behind an entry point of `rl_core.inference`. Its module imports no
    torch."""

    contract_version: int
    name: str
    num_engines_key: str | None
    """The configuration key that says how many engines there are, or None if always one."""

    def validate(self, config: Config) -> None:
        """Raises ConfigError before any process is started."""
        ...

    async def create(self, config: Config) -> InferenceClient:
        """Starts the engine(s); they hold the weights of `trainer.policy.model.path` until the first update."""
        ...


# --- rollouts -------------------------------------------------------------------------------------------------------

Message = Mapping[str, str]
"""A chat message: `role` (system, user, assistant, tool: what the model's chat template knows) and `content`."""
Prompt = str | Sequence[Message]
"""Text taken as it is, or chat messages that the model's chat template turns into text."""


@attrs.frozen(kw_only=True)
class Action:
    """What the policy said in one turn."""

    text: str
    """Decoded, without special tokens."""
    tokens: tuple[int, ...]
    stop_reason: StopReason


@attrs.frozen(kw_only=True)
class StepResult:
    """The environment's answer to an action."""

    reward: float
    done: bool
    observation: Prompt | None = None
    """What the policy sees next; None when done. In an episode that began with messages: messages of any role but the
    assistant's, or text, which is a user's message. In one that began with text: text, appended as it is."""
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    """Averaged over episodes and logged as `environment/<name>`; of several turns that give one, the last counts."""


@runtime_checkable
class Environment(Protocol):
    """One episode (entry-point group `rl_core.environments`, each a callable `(row, options) → Environment`)."""

    async def reset(self) -> Prompt:
        """The first observation."""
        ...

    async def step(self, action: Action) -> StepResult: ...

    async def close(self) -> None: ...


class EnvironmentFactory(Protocol):
    def __call__(self, row: Row, options: Mapping[str, Any]) -> Environment:
        """One environment for one episode; `options` is the configuration's `environment.options`."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class TrajectoryStep:
    """One sequence of a trajectory; all per-token fields have the length of `tokens`."""

    tokens: Sequence[int]
    """What the engine was given and what it sampled, token for token."""
    sampled: Sequence[bool]
    """Sampled by the policy; everything before the first sampled token is the prompt. Between the turns of one sequence
    stand the tokens of observations, not sampled."""
    rollout_logprobs: Sequence[float]
    """0.0 where not sampled."""
    policy_version: Sequence[int]
    """-1 where not sampled."""
    reward: float
    """Received for this step; the sum, where it has several turns."""
    stop_reason: StopReason
    """Of its last turn."""
    routed_experts: np.ndarray | None = None
    """[tokens − 1 or fewer, layers, experts per token]: of the first tokens; the others' are not known."""
    token_rewards: Sequence[float] | None = None
    """Where on the step's tokens `reward` was received, of a step of several turns; None: all on the last sampled
    token."""


@attrs.frozen(kw_only=True)
class Turn:
    """One turn of an episode as text, for people to read."""

    response: str
    observation: str | None
    """What the policy was shown next; None where the episode ended."""
    reward: float
    stop_reason: StopReason


@attrs.frozen(kw_only=True, eq=False)
class Trajectory:
    """One sample of a prompt. A failed one has no steps and says why."""

    group_id: int
    sample_index: int
    steps: tuple[TrajectoryStep, ...]
    prompt_text: str
    response_text: str
    """What the policy said; of several turns also what it was shown in between, each behind an arrow."""
    start_version: int
    """The policy's version when the episode was started."""
    turns: tuple[Turn, ...] = ()
    """The episode as text; empty from a generator that plays no turns."""
    end: TrajectoryEnd = "done"
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    failure: str | None = None
    """Why the rollout failed: exception type and message, with the row's place. Never a silent zero reward."""

    @property
    def reward(self) -> float:
        """Sum of the steps' rewards."""
        return sum(step.reward for step in self.steps)

    @property
    def is_cut(self) -> bool:
        """The last response was cut off by its length, or there was no room for another one."""
        return self.end == "context" or (bool(self.steps) and self.steps[-1].stop_reason == "length")


@attrs.frozen(kw_only=True)
class GroupRequest:
    """Play one prompt `num_samples` times."""

    group_id: int
    row: Row
    row_place: str
    """`file:row`, for messages."""
    num_samples: int
    params: SamplingParams
    seed: int
    start_version: int


@runtime_checkable
class Generator(Protocol):
    """Prompts in, trajectories out (entry-point group `rl_core.generators`: a callable `(config, client) →
    Generator`)."""

    def prompt_length(self, row: Row) -> int:
        """Tokens of the row's prompt. Raises DataError if the row has none that can be encoded."""
        ...

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        """`num_samples` trajectories in sample order; a failing episode is a Trajectory with `failure`."""
        ...


# --- around the loop ------------------------------------------------------------------------------------------------


@runtime_checkable
class Tracker(Protocol):
    """Where metrics go.

    Entry-point group `rl_core.trackers`: a callable `(config, run_dir, *, total_steps, first_step) → Tracker`, where
    `first_step` is the first step that will be logged: 0 for a new run, the checkpoint's step + 1 for a resumed one.
    What
    an earlier process logged for that step and those after it is dropped.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Once per step, in order. Step 0 holds the evaluation before training."""
        ...

    def close(self) -> None:
        """Called once, also when the run fails."""
        ...


@runtime_checkable
class PhaseAware(Protocol):
    """A tracker that is told what the run is doing."""

    def phase(self, name: str) -> None:
        """`name` begins now: generate, score, train, publish, evaluate, checkpoint."""
        ...


@attrs.frozen(kw_only=True)
class Recipe:
    """A named run (entry-point group `rl_core.recipes`)."""

    summary: str
    """One line for `rl plugins`."""
    config: Mapping[str, Any]
    """Flat `key.path` → value, on top of the defaults."""
    tiny: Mapping[str, Any] | None = None
    """On top of `config` with `--tiny`: a run of a minute on two CPU cores."""
    prepare: str | None = None
    """`package.module:function`, called as `function(config)` before a run. Makes those of the paths in `makes` that
    the configuration names and that are missing."""
    makes: tuple[str, ...] = ()
    """What `prepare` can make: data files and model directories, written as in `config` (`${trainer.seed}`). Any other
    path is the user's and must be there."""


__all__ = [
    "CONTRACT_VERSION",
    "Message",
    "Metrics",
    "Plan",
    "Prompt",
    "Role",
    "Row",
    "StopReason",
    "TrajectoryEnd",
    "OptimizerConfig",
    "LoraConfig",
    "ModelConfig",
    "WorkerSpec",
    "RankInfo",
    "LossSpec",
    "OptimizerStep",
    "Worker",
    "Offloadable",
    "BackgroundSaver",
    "Perturbable",
    "Inspectable",
    "RankPlan",
    "Planner",
    "Backend",
    "RouteFollowing",
    "WeightBucket",
    "TensorRecord",
    "Manifest",
    "Rendezvous",
    "WeightSender",
    "WeightReceiver",
    "WeightTransport",
    "SamplingParams",
    "GenerateRequest",
    "Completion",
    "EngineHealth",
    "InferenceClient",
    "Sleepable",
    "Recovering",
    "WeightReceivers",
    "Scoring",
    "InferencePlugin",
    "Action",
    "StepResult",
    "Environment",
    "EnvironmentFactory",
    "TrajectoryStep",
    "Turn",
    "Trajectory",
    "GroupRequest",
    "Generator",
    "Tracker",
    "PhaseAware",
    "Recipe",
]
