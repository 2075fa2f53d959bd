"""Training: what a model and its update are, one rank of a model (`Worker`), and what makes ranks (`Backend`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs

from rl_core.errors import ConfigError
from rl_core.interfaces.weights import Manifest, WeightBucket, WeightSender

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from rl_core.batch import Batch
    from rl_core.layout.mesh import Mesh

_Bound = tuple[str, Callable[[float], bool], str]
_UPDATE_BOUNDS: tuple[_Bound, ...] = (
    ("learning_rate", lambda value: 0 <= value < math.inf, "a finite number, at least 0"),
    ("eps", lambda value: 0 < value < math.inf, "a finite number above 0"),
    ("weight_decay", lambda value: 0 <= value < math.inf, "a finite number, at least 0"),
    ("max_grad_norm", lambda value: value >= 0, "at least 0; 0 switches clipping off"),
    ("gradient_scale", lambda value: 0 < value < math.inf, "a finite number above 0"),
)

Role = Literal["policy", "reference", "critic"]
HeldKind = Literal["parameters", "gradients", "optimizer"]
"""What a rank holds from step to step."""
Metrics = Mapping[str, tuple[float, float]]
"""Name → (sum, weight): parts add up over micro-batches and ranks and are divided once, at the end."""
Plan = Sequence[Sequence[int]]
"""One rank's micro-batches, each the indices of its sequences in the batch the rank was given. Micro-batches are run in
order; every rank of a group has the same number of them."""


@attrs.frozen(kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) and its schedule."""

    lr: float = 1e-6
    """Peak learning rate."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment, which a step divides by."""
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
    merge_lora: bool = True
    """Policy: engines get whole weights with the adapter added. False: they keep the model at `model.path`, and a sync
    sends the adapter alone, which then is never rounded into the weights."""
    max_loras: int = 1
    """Policy, with merge_lora=false: adapters that an engine computes with in one batch, the policy's among them."""
    max_cpu_loras: int | None = None
    """Policy, with merge_lora=false: adapters besides the policy's that an engine keeps in memory; others are read
    again when they are asked for. None: as many as `max_loras`."""

    @property
    def is_sent_alone(self) -> bool:
        """A sync sends the adapter's tensors under peft's names, and no weight of the model."""
        return self.rank > 0 and not self.merge_lora

    def peft_config(self) -> dict[str, Any]:
        """What the tensors of the adapter do not say, as in peft's `adapter_config.json`."""
        targets, excluded = (
            list(names) if isinstance(names, tuple) else names for names in (self.target_modules, self.exclude_modules)
        )
        return {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": targets,
            "exclude_modules": excluded,
        }


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
    gradient_checkpointing: bool | Literal["selective"]
    """Recompute activations in backward; `"selective"`: all but the results of matrix products and attention. A backend
    that knows one kind takes any true value for it: the gradient is the same."""
    use_sample_packing: bool
    """A micro-batch is one packed stream; else a padded rectangle."""
    share_prefixes: bool = False
    """What sequences of a packed micro-batch have in common at their beginning is computed once. Only asked of a
    backend that is `PrefixSharing`."""
    logprobs_chunk_size: int
    """Tokens whose float32 logits exist at a time."""
    total_optimizer_steps: int | None
    """Length of the schedule; None where the schedule does not need it."""
    seed: int
    num_threads: int | None = None
    """Torch threads of a rank; None leaves torch's choice."""
    is_proved: bool = True
    """Of a backend that is `ModelProving`: the controller has proved the model. False: it could not, and rank 0 proves
    it before any rank loads."""


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
    """k1, k2, k3 or abs; with the suffix `+` the gradient-correct straight-through form; or k3_unbiased."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; 0 leaves the term out."""
    off_policy_sequence_mask: float | None = None
    """Tokens of negative advantage in sequences that the policy has left by more than so many nats per token since they
    were sampled have no `loss[t]`; None: all have."""
    old_is_current: bool = False
    """`old_logprobs` are the pass's own log-probs, detached, and no column of the batch: the weights have not changed
    since the update began. Version 3."""
    measures_entropy: bool = True
    """The metric `entropy` is wanted; False: entropies are computed only where the loss reads them."""


@attrs.frozen(kw_only=True)
class OptimizerStep:
    """What one optimizer step did."""

    grad_norm: float
    """Global L2 norm before clipping; not finite when the step was skipped."""
    learning_rate: float
    """The rate that was used."""
    skipped: bool
    """A gradient was not finite: weights, optimizer state and schedule are as before."""


@attrs.frozen(kw_only=True)
class OptimizerUpdate:
    """What one optimizer step does otherwise than the worker's `OptimizerConfig`; None: as that says.

    Raises:
        ConfigError: a value is out of range.
    """

    learning_rate: float | None = None
    """In place of the schedule's, which goes on by one step all the same; finite, at least 0."""
    adam_betas: tuple[float, float] | None = None
    """Each from 0 to below 1."""
    eps: float | None = None
    """Above 0."""
    weight_decay: float | None = None
    """Finite, at least 0."""
    max_grad_norm: float | None = None
    """At least 0; 0 switches clipping off."""
    gradient_scale: float = 1.0
    """Every gradient is multiplied by it, before the norm is taken and clipped; finite, above 0."""

    def __attrs_post_init__(self) -> None:
        for name, is_right, expected in _UPDATE_BOUNDS:
            value = getattr(self, name)
            if value is not None and not is_right(value):
                raise ConfigError(f"OptimizerUpdate.{name}: got {value}; expected {expected}")
        if self.adam_betas is not None and not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ConfigError(
                f"OptimizerUpdate.adam_betas: got {self.adam_betas}; expected two numbers from 0 to below 1"
            )


@runtime_checkable
class Worker(Protocol):
    """One rank of one model. All calls come from one thread, one at a time; every rank of a group gets the same
    calls."""

    def forward(
        self, batch: Batch, plan: Plan, *, temperature: float, returns: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Scores without gradient: `logprobs` and `entropies` [T] of the stream (a critic: `values` [T]), float32 on
        the CPU. A backend that replays the routes of its own scoring pass adds `routed_experts` and `routed`.

        Logits are divided by `temperature` first. Ranks that hold no result return an empty dict.

        Args:
            batch: the rank's part.
            plan: its micro-batches.
            temperature: divides the logits.
            returns: the scores that are wanted, of those that the model has; None: all. Left out by a caller that wants
                all. Version 3.

        Raises:
            ConfigError: `returns` names a score that this model does not have.
        """
        ...

    def forward_backward(
        self, batch: Batch, plan: Plan, loss: LossSpec, *, temperature: float, returns: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Adds the gradient of the loss over `batch` to the gradients; returns the metrics' sums and weights.

        Metrics: `loss` (sum, 1) and those the loss function names, weighted by the trained tokens.

        Args:
            batch: the rank's part.
            plan: its micro-batches.
            loss: what is minimised.
            temperature: divides the logits.
            returns: scores of this same pass to return as well, of those that `forward` gives: under its name each is
                [T] of the stream, float32 on the CPU, without gradient; 0 where `loss_mask` is False. Left out by a
                caller that wants none.

        Raises:
            ConfigError: `returns` names a score that this model does not have.
        """
        ...

    def optim_step(self, update: OptimizerUpdate | None = None) -> OptimizerStep:
        """Scales, clips, steps, advances the schedule, clears the gradients; skips all but the last when a gradient is
        not finite.

        Args:
            update: what this one step does otherwise. Left out by a caller that wants none.
        """
        ...

    def export_weights(self, max_bucket_bytes: int) -> Iterator[WeightBucket]:
        """The weights under Hugging Face names. Collective: every rank drains its iterator, also one that yields
        nothing."""
        ...

    def publish(self, sender: WeightSender, version: int, max_bucket_bytes: int) -> Manifest:
        """Sends `export_weights` through `sender` or, where `LoraConfig.is_sent_alone`, the adapter's tensors under
        peft's names (`base_model.model.<layer>.lora_A.weight`); returns what this rank sent."""
        ...

    def save_state(self, directory: Path) -> None:
        """Writes weights, optimizer and schedule; complete on return."""
        ...

    def load_state(self, directory: Path) -> None:
        """Continues exactly where `save_state` stopped, also at another world size. Gradients that were added up since
        the last step are dropped. Raises CheckpointError."""
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
    gathered_bytes: int = 0
    """Estimate of what is whole for a moment in training besides what the rank holds: parameters that a layer gathers
    from other ranks, and its gradients before they are summed and split."""
    export_bytes: int = 0
    """Estimate of what is whole for a moment while weights are sent or written: tensors gathered from other ranks, one
    or a few at a time. Buckets are not counted."""
    frees_gradients: bool = False
    """Gradients take memory only from the first micro-batch to the optimizer step, not while weights are sent."""
    on_host: tuple[HeldKind, ...] = ()
    """Of what the rank holds, that which lies in host memory in all phases."""
    loading_host_bytes: int = 0
    """Host memory that the rank takes while the model is loaded; the first rank may have it whole."""


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


@attrs.frozen(kw_only=True)
class RehearsedPhase:
    """What one rank's device holds at the fullest moment of a phase, as its code made and freed tensors."""

    phase: Literal["train", "step", "score"]
    parts: Mapping[str, int]
    """Bytes by what they are of: `parameters`, `gradients`, `optimizer`, `gathered`, `activations` (all others)."""
    flops: int
    """Of its matrix products and attention, recomputation included; causal attention counts half of a full one."""


@runtime_checkable
class Rehearser(Protocol):
    """A backend whose worker can run a step alone, on tensors without data (`rl rehearse`)."""

    def rehearse(
        self, spec: WorkerSpec, world_size: int, *, batch: Batch, plan: Plan, loss: LossSpec | None
    ) -> tuple[RehearsedPhase, ...]:
        """The first rank's step: `train` and `step`, or `score`.

        Args:
            spec: the model; of its files, only `config.json` is read.
            world_size: ranks.
            batch: what that rank computes, with the columns that the loss reads.
            plan: its micro-batches.
            loss: what is minimised; None: the batch is scored.

        Raises:
            ConfigError: as `validate`, or what is asked for cannot be rehearsed.
        """
        ...


@runtime_checkable
class Backend(Protocol):
    """A training backend: the object behind an entry point of `rl_core.backends`. Its module imports no torch."""

    @property
    def contract_version(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def config_section(self) -> str:
        """The section of a model's configuration that it reads, e.g. `fsdp_config`."""
        ...

    @property
    def options_class(self) -> type:
        """Frozen attrs class of that section."""
        ...

    def mesh(self, options: Any, world_size: int) -> Mesh:
        """How `world_size` ranks are arranged. Raises ConfigError naming the nearest arrangement that fits."""
        ...

    def validate(self, spec: WorkerSpec, world_size: int) -> None:
        """Raises ConfigError for whatever this backend cannot train correctly, before any process is started.

        A model that is not there yet is none of it: recipes may make theirs after this call.
        """
        ...

    def needs_own_process(self) -> bool:
        """True where a rank must not share the controller's process."""
        ...

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        """Called once, in the rank's process and thread."""
        ...


@runtime_checkable
class ModelProving(Protocol):
    """A backend with model code of its own. Before a rank loads, a small copy of each model is computed by it and by
    transformers, and compared (`rl_core.rank_kit.require_proof`)."""

    @property
    def name(self) -> str: ...

    def proof_basis(self, spec: WorkerSpec) -> Mapping[str, Any]:
        """Plain data that changes with whatever may change how it computes a model, but the model and transformers:
        options, its libraries' versions, its own code, the kind of device. What was proved holds while it is the same.
        """
        ...

    def proof_obstacle(self) -> str | None:
        """Why the comparison cannot be made on this machine, for people; None where it can."""
        ...

    def proof_worker(self, spec: WorkerSpec) -> Worker:
        """One rank alone that computes as ranks with these options do, and is `Inspectable`. Called in a process of its
        own.

        Args:
            spec: names a small model in float32; its options are the run's, sizes of a mesh included.
        """
        ...


@runtime_checkable
class PrefixSharing(Protocol):
    """A backend whose workers compute once what sequences have in common (`WorkerSpec.share_prefixes`)."""

    def shares_prefixes(self, options: Any) -> bool:
        """Whether they can with these options."""
        ...


@runtime_checkable
class OwnLosses(Protocol):
    """A backend that can add losses of its own to what is minimised, such as those that balance experts."""

    def has_own_losses(self, options: Any) -> bool:
        """Whether these options of the policy ask for any: each then weighs in every call of `forward_backward` as for
        a whole mini-batch."""
        ...


@runtime_checkable
class RouteRecording(Protocol):
    """A backend that can send the policy's tokens to the experts that its own scoring pass chose."""

    def records_routes(self, options: Any) -> bool:
        """Whether these options of the policy ask for it: a scoring pass over every batch is needed then."""
        ...


@runtime_checkable
class RouteFollowing(Protocol):
    """A backend that can send the policy's tokens to the experts that the engine chose (router replay). Its workers
    then refuse batches without routes, and others batches with routes (`rl_core.rank_kit.require_routes`)."""

    def follows_routes(self, options: Any) -> bool:
        """Whether these options of the policy ask for it, whichever of them does."""
        ...
