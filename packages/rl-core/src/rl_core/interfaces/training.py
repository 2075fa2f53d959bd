"""Contracts of training: records that describe a model and its update, one rank of a model (`Worker`), and the
`Backend`, which creates ranks."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import attrs

from rl_core.errors import ConfigError, PluginError
from rl_core.interfaces.options import FINITE, Bound, above, at_least, at_most, between, bounded
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
    ("max_grad_norm", lambda value: value >= 0, "at least 0; 0 turns clipping off"),
    ("gradient_scale", lambda value: 0 < value < math.inf, "a finite number above 0"),
)

Role = Literal["policy", "reference", "critic"]
HeldKind = Literal["parameters", "gradients", "optimizer"]
"""A kind of state that a rank keeps between steps."""
Metrics = Mapping[str, tuple[float, float]]
"""Name → (sum, weight). Sums and weights are added up over micro-batches and ranks, and divided once at the end."""
Plan = Sequence[Sequence[int]]
"""One rank's micro-batches, in the order in which they run. Each is a list of indices of sequences in the rank's batch.
All ranks of a group have the same number of micro-batches."""


@attrs.frozen(kw_only=True)
class OptimizerConfig:
    """An optimizer and its schedule."""

    name: str = "adamw"
    """`adamw` (arXiv 1711.05101), `muon` (arXiv 2502.16982: Muon for hidden matrices, AdamW for all other weights),
    `sgd`, `adafactor` (arXiv 1804.04235), or `package.module:factory`."""
    params: Mapping[str, Any] = attrs.field(factory=dict)
    """Further parameters of the optimizer, under torch's names, such as `momentum`; `adamw` has none."""
    # AdamW moves each weight by about the learning rate in every step. With a rate above 10, the weights are noise
    # after one step and NaN after three.
    lr: float = bounded(1e-6, above(0), at_most(10))
    """Peak learning rate."""
    adam_betas: tuple[float, float] = bounded(
        (0.9, 0.999), Bound("two numbers from 0 to below 1", lambda betas: all(0 <= beta < 1 for beta in betas))
    )
    """`adamw` and `muon`: AdamW's decay of the first and second moment."""
    eps: float = bounded(1e-8, above(0))
    """`adamw` and `muon`: added to the denominator of AdamW's step, the square root of the second moment."""
    weight_decay: float = bounded(0.01, at_least(0), FINITE)
    """Decoupled weight decay (of `sgd`: added to the gradient). It also applies to biases and norms, as is usual in
    RL."""
    max_grad_norm: float = bounded(1.0, at_least(0))
    """Largest global L2 norm of the gradient; a larger gradient is scaled down. 0: no clipping."""
    num_warmup_steps: int = bounded(0, at_least(0))
    """Optimizer steps of warm-up. Step i, counted from 0, uses lr · (i + 1) / num_warmup_steps."""
    scheduler: Literal["constant_with_warmup", "linear", "cosine"] = "constant_with_warmup"
    """Shape after the warm-up. `linear` and `cosine` reach 0 right after the run's last optimizer step."""
    offload_after_step: bool = True
    """Move the optimizer state to the CPU between training phases; only in colocated training."""


@attrs.frozen(kw_only=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685)."""

    rank: int = bounded(0, at_least(0), at_most(2**16))
    """Rank of the adapters. 0: no adapters, all weights are trained."""
    alpha: int = 16
    """The adapter's output is scaled by alpha / rank."""
    dropout: float = bounded(0.0, between(0, 1))
    """Dropout before the adapter. Must be 0: otherwise log-probs would differ from the engine's, and results would
    depend on the split into micro-batches."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Module names to adapt."""
    exclude_modules: str | tuple[str, ...] | None = None
    """Module names to leave out."""
    init_method: str = "kaiming"
    """Initialisation of the adapter's first matrix."""
    merge_lora: bool = True
    """Policy only: engines get whole weights, with the adapter merged. False: engines keep the weights of `model.path`,
    and a sync sends only the adapter, so that merging does not round the weights."""
    max_loras: int = bounded(1, at_least(1))
    """Policy only, with merge_lora=false: number of adapters that an engine can use in one batch, including the
    policy's."""
    max_cpu_loras: int | None = bounded(None, at_least(1))
    """Policy only, with merge_lora=false: number of adapters, without the policy's, that an engine keeps in CPU memory.
    When a request needs another adapter, the engine reads it from disk. None: as many as `max_loras`."""

    @property
    def is_sent_alone(self) -> bool:
        """Whether a sync sends only the adapter's tensors, under peft's names."""
        return self.rank > 0 and not self.merge_lora

    def peft_config(self) -> dict[str, Any]:
        """The adapter's settings that its tensors do not contain, as in peft's `adapter_config.json`."""
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
    """A model and its adapters."""

    path: str | None = None
    """A Hugging Face model directory or name."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters. Rank 0: none."""
    trainable: tuple[str, ...] | None = None
    """Regular expressions, searched for in the names of the checkpoint's tensors (`layers\\.1\\.`). A tensor that one
    of them matches is trained; all others are frozen: they have neither gradient nor optimizer state. A critic's value
    head is always trained. None: all are trained."""


@attrs.frozen(kw_only=True)
class WorkerSpec:
    """Everything that a rank needs to build its model, as plain data. All ranks of a group get the same."""

    role: Role
    model: ModelConfig
    optimizer: OptimizerConfig | None
    """None: the model is not trained (the reference)."""
    options: Any
    """An instance of the backend's options class."""
    bf16: bool
    """Compute in bfloat16; trained parameters stay float32. False: compute in float32."""
    gradient_checkpointing: bool | Literal["selective"]
    """True: recompute all activations in the backward pass; `"selective"`: all but the results of matrix products and
    attention. A backend that supports only one of these two settings may also use it for the other, because the
    gradient is the same."""
    use_sample_packing: bool
    """Pack a micro-batch into one stream without padding. False: pad it to a rectangle."""
    share_prefixes: bool = False
    """Compute shared prefixes of a packed micro-batch once. True only if the backend `shares_prefixes`."""
    logprobs_chunk_size: int
    """Number of tokens whose float32 logits are in memory at a time."""
    total_optimizer_steps: int | None
    """Length of the learning-rate schedule; None if the schedule does not need it."""
    seed: int
    num_threads: int | None = None
    """Torch threads of a rank. None: OMP_NUM_THREADS if it is set, else the cores divided by the ranks per node."""
    is_proved: bool = True
    """Read only by backends with own model code (`Backend.prove`). True: the controller has proved the model. False: it
    could not do this, so rank 0 proves the model before any rank loads it."""


@attrs.frozen(kw_only=True)
class RankInfo:
    """A rank's place in its group."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_address: str = "127.0.0.1"
    master_port: int = 0
    """Port of a torch store that is open when the ranks of the group start. `init_process_group` with
    `tcp://master_address:master_port` joins this store as a client on every rank, also on rank 0; do not listen on this
    port. 0 for a single rank in the controller's process."""


@attrs.frozen(kw_only=True)
class LossSpec:
    """Describes the sum that training minimises: the sum over the trained tokens t of loss_weights[t] · (loss[t] +
    kl_coef · KL[t] − entropy_coef · H[t])."""

    name: str
    """A policy or value loss: an entry-point name of `rl_core.policy_losses`, or `package.module:function`."""
    params: Mapping[str, Any] = attrs.field(factory=dict)
    """The function's keyword parameters."""
    kl_coef: float = 0.0
    """Coefficient of the KL to the reference. 0: no such term, so the KL needs no `ref_logprobs`."""
    kl_estimator: str = "k3"
    """k1, k2, k3, abs or k3_unbiased. The first four may have the suffix `+`, which selects the straight-through form,
    whose gradient is unbiased."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus. 0: no such term."""
    off_policy_sequence_mask: float | None = None
    """Sets `loss[t]` to 0 for tokens with negative advantage if the log-probs of their sequence have dropped, since
    sampling, by more than this many nats per token. None: off."""
    old_is_current: bool = False
    """True: the weights have not changed since the start of the update. The batch then has no column `old_logprobs`,
    and the loss uses the detached log-probs of this pass instead."""
    measures_entropy: bool = True
    """Report the metric `entropy`. False: compute entropies only if the loss reads them."""


@attrs.frozen(kw_only=True)
class OptimizerStep:
    """Result of one optimizer step."""

    grad_norm: float
    """Global L2 norm before clipping; not finite if the step was skipped."""
    learning_rate: float
    """Learning rate of the step."""
    skipped: bool
    """True if a gradient was not finite. Weights, optimizer state and schedule are then unchanged."""


@attrs.frozen(kw_only=True)
class OptimizerUpdate:
    """Settings of one optimizer step that differ from the worker's `OptimizerConfig`. A field that is None leaves its
    setting unchanged.

    Raises:
        ConfigError: a value is out of range.
    """

    learning_rate: float | None = None
    """Learning rate instead of the schedule's; the schedule still advances by one step. Finite, at least 0."""
    adam_betas: tuple[float, float] | None = None
    """Each from 0 to below 1."""
    eps: float | None = None
    """Above 0."""
    weight_decay: float | None = None
    """Finite, at least 0."""
    max_grad_norm: float | None = None
    """At least 0; 0 turns clipping off."""
    gradient_scale: float = 1.0
    """Factor of every gradient, applied before the norm is computed and clipped. Finite, above 0."""

    def __attrs_post_init__(self) -> None:
        for name, is_right, expected in _UPDATE_BOUNDS:
            value = getattr(self, name)
            if value is not None and not is_right(value):
                raise ConfigError(f"OptimizerUpdate.{name}: got {value}; expected {expected}")
        if self.adam_betas is not None and not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ConfigError(
                f"OptimizerUpdate.adam_betas: got {self.adam_betas}; expected two numbers from 0 to below 1"
            )


class Worker(Protocol):
    """One rank of one model. All calls are made from one thread, one at a time; every rank of a group gets the same
    calls. Authors inherit this class; methods with a body are optional."""

    can_offload: bool = False
    """Whether the worker can move its state off the accelerator between phases (`offload`, `onload`)."""
    can_save_in_background: bool = False
    """Whether the worker can save while training continues (`trainer.async_save`: `start_saving`, `has_saved`)."""
    can_perturb: bool = False
    """Whether the worker's weights can be perturbed, to prove that each tensor reaches the engines (`perturb`,
    `restore`)."""

    @abstractmethod
    def forward(
        self, batch: Batch, plan: Plan, *, temperature: float, returns: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Computes scores without gradients: a critic's `values`, or another model's `logprobs` and `entropies`. Each
        is [T] of the stream, float32 on the CPU. A backend that replays the routes of its scoring pass adds
        `routed_experts` and `routed`. Ranks without results return an empty dict.

        If the batch has `kept_counts` and `kept_ids`, log-prob and entropy of each token with a count above 0 are those
        of the distribution over its kept ids, renormalised; the same holds in `forward_backward`. Such batches are sent
        only to a backend that `replays_kept_tokens`.

        Args:
            batch: the rank's part of the batch.
            plan: the rank's micro-batches.
            temperature: divides the logits.
            returns: names of the scores to compute; None: all.

        Raises:
            ConfigError: `returns` names a score that this model does not have.
        """
        ...

    @abstractmethod
    def forward_backward(
        self, batch: Batch, plan: Plan, loss: LossSpec, *, temperature: float, returns: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Adds the gradient of the loss over `batch` to the accumulated gradients. Returns metrics, and the scores that
        `returns` names.

        Metrics, each (sum, weight): `loss` with weight 1, and the metrics of the loss function, weighted by the number
        of trained tokens.

        Args:
            batch: the rank's part of the batch.
            plan: the rank's micro-batches.
            loss: the loss to minimise.
            temperature: divides the logits.
            returns: names of scores, as in `forward`, to return from this pass: each [T] of the stream, float32 on the
                CPU, detached, 0 where `loss_mask` is False.

        Raises:
            ConfigError: `returns` names a score that this model does not have.
        """
        ...

    @abstractmethod
    def optim_step(self, update: OptimizerUpdate | None = None) -> OptimizerStep:
        """Scales and clips the gradients, takes a step, advances the schedule and clears the gradients. If a gradient
        is not finite, only clears the gradients.

        Args:
            update: settings of this step only.
        """
        ...

    @abstractmethod
    def export_weights(self, max_bucket_bytes: int, *, only_trained: bool = False) -> Iterator[WeightBucket]:
        """Yields the weights under Hugging Face names. Collective: every rank must exhaust its iterator, even if it
        yields nothing. `only_trained` leaves out each unit without trained parameters (`unit_of` of
        `rl_core.rank_kit.trained_parameters`)."""
        ...

    def publish(
        self, sender: WeightSender, version: int, max_bucket_bytes: int, *, only_trained: bool = False
    ) -> Manifest:
        """Sends `export_weights` through `sender`, or only the adapter's tensors under peft's names
        (`base_model.model.<layer>.lora_A.weight`) if `LoraConfig.is_sent_alone`. Returns what this rank sent. The
        default sends `export_weights`."""
        return sender.send(self.export_weights(max_bucket_bytes, only_trained=only_trained), version)

    @abstractmethod
    def save_state(self, directory: Path) -> None:
        """Writes the state of weights, optimizer and schedule. The files are complete when the method returns."""
        ...

    @abstractmethod
    def load_state(self, directory: Path) -> None:
        """Restores exactly what `save_state` wrote, even with a different world size. Drops gradients accumulated since
        the last step. Raises CheckpointError if the files are missing, incomplete or damaged, or if another backend
        wrote them."""
        ...

    @abstractmethod
    def save_model(self, directory: Path) -> None:
        """Writes the model and its tokenizer in Hugging Face format. If a rank's storage fails, the rank raises
        CheckpointError after its last collective. No other rank then waits for it, and the run can continue."""
        ...

    def close(self) -> None:
        """Frees the rank's resources. A second call does nothing."""

    # --- optional ---

    def offload(self, *, parameters: bool, optimizer: bool) -> None:
        """Moves parameters, optimizer state or both off the accelerator."""
        raise _undefined(self, "offload")

    def onload(self, *, parameters: bool, optimizer: bool) -> None:
        """Moves parameters, optimizer state or both back to the accelerator."""
        raise _undefined(self, "onload")

    def start_saving(self, directory: Path) -> None:
        """Copies the state and returns. Files are written in the background, from the copy. Only one save runs at a
        time."""
        raise _undefined(self, "start_saving")

    def has_saved(self) -> bool:
        """Whether the save that `start_saving` began is complete on this rank; True if none was begun. Does not block.
        Raises the save's error. May be called repeatedly."""
        raise _undefined(self, "has_saved")

    def perturb(self, seed: int, scale: float) -> None:
        """Adds normal noise to every trained parameter. Its standard deviation is `scale` times the parameter's root
        mean square, but at least `scale` / sqrt(length of the last axis), so that small weights and zeros also change.
        Copies of a parameter stay equal."""
        raise _undefined(self, "perturb")

    def restore(self) -> None:
        """Restores every parameter bit for bit to its value before `perturb`. Does nothing if `perturb` was not
        called."""
        raise _undefined(self, "restore")

    def route_layers(self) -> tuple[int, ...] | None:
        """This rank's layers with experts, as indices in the whole model; None: all layers of the model. Called once,
        after the start. If ranks run in several processes, each rank gets only the routes of its layers:
        `routed_experts` has no others, and the column `route_layers` names them. `rl_core.rank_kit.routes_of` reads
        batches with some layers and with all layers."""
        return None

    def gradients(self) -> dict[str, Tensor]:
        """Full (unsharded) float32 gradients under Hugging Face names, on the CPU; a tied weight appears once. Only the
        conformance suite and the model proof read them."""
        raise _undefined(self, "gradients")


@attrs.frozen(kw_only=True)
class RankPlan:
    """Planned memory of one rank."""

    rank: int
    data_part: int
    """Index of the part of a batch that the rank computes; the same for all ranks of a model replica."""
    layers: tuple[int, ...]
    """Transformer layers that the rank holds, whole or in part."""
    experts: tuple[int, ...]
    """Indices of the experts that the rank holds, in each layer that has experts."""
    place: str
    """The rank's place in the splits of matrices, tokens or parameters, as readable text."""
    num_parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """Estimated peak memory that forward passes keep for the backward pass, including the output layer."""
    gathered_bytes: int = 0
    """Estimated temporary memory in training: parameters that a layer gathers from other ranks, and its gradients
    before they are reduced."""
    export_bytes: int = 0
    """Estimated temporary memory while weights are sent or written: tensors gathered from other ranks, one or a few at
    a time. Excludes buckets."""
    frees_gradients: bool = False
    """Whether gradients use memory only from the first micro-batch to the optimizer step, not while weights are
    sent."""
    on_host: tuple[HeldKind, ...] = ()
    """The kinds of state that the rank keeps in host memory in all phases."""
    loading_host_bytes: int = 0
    """Host memory that the rank uses while it loads the model. The first rank may hold the whole model."""


@attrs.frozen(kw_only=True)
class RehearsedPhase:
    """Peak memory of one rank's device in a phase, measured by running the phase's code on tensors without data."""

    phase: Literal["train", "step", "score"]
    parts: Mapping[str, int]
    """Kind → bytes: `parameters`, `gradients`, `optimizer`, `gathered`, `activations` (everything else)."""
    flops: int
    """Operations of matrix products and attention, including recomputation. Causal attention counts as half of full
    attention."""


class Backend(Protocol):
    """A training backend: the object of an entry point of `rl_core.backends`. Its module must not import torch. Authors
    inherit this class; methods with a body are optional."""

    name: str
    config_section: str
    """Name of the backend's section in a model's configuration, e.g. `fsdp_config`."""
    options_class: type
    """Frozen attrs class whose fields are the keys of this section."""
    replays_kept_tokens: bool = False
    """Whether the workers score a token among the ids that sampling kept (`kept_ids`: top-p, top-k, min-p)."""
    can_plan: bool = False
    """Whether the memory of each rank can be planned without starting anything (`plan`, for `rl plan`)."""
    can_rehearse: bool = False
    """Whether a step can run without other ranks, on tensors without data (`rehearse`, for `rl rehearse`)."""

    @abstractmethod
    def mesh(self, options: Any, world_size: int) -> Mesh:
        """Returns the mesh of `world_size` ranks. Raises ConfigError if the options do not fit this number of ranks;
        the message names the nearest mesh that fits."""
        ...

    @abstractmethod
    def validate(self, spec: WorkerSpec, world_size: int) -> None:
        """Raises ConfigError for everything that this backend cannot train correctly. Runs before any process is
        started.

        A missing model is not an error: recipes may create it after this call.
        """
        ...

    @abstractmethod
    def needs_own_process(self) -> bool:
        """Whether a rank needs its own process even if it is the only rank, for example because it creates torch's
        default process group. Such processes need Ray. False: the models of a run with one rank each (policy,
        reference, critic) share the controller's process."""
        ...

    @abstractmethod
    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        """Creates the worker of a rank. Called once, in the rank's process and thread."""
        ...

    # --- optional ---

    def shares_prefixes(self, options: Any) -> bool:
        """Whether the workers can compute shared prefixes once with these options (`WorkerSpec.share_prefixes`)."""
        return False

    def follows_routes(self, options: Any) -> bool:
        """Whether the policy's options route tokens to the experts that the engine chose (router replay). With router
        replay, the workers reject batches without routes; without it, batches with routes
        (`rl_core.rank_kit.require_routes`)."""
        return False

    def records_routes(self, options: Any) -> bool:
        """Whether the policy's options route tokens to the experts that the backend's own scoring pass chose. Every
        batch then needs a scoring pass."""
        return False

    def has_own_losses(self, options: Any) -> bool:
        """Whether the policy's options enable any of the backend's own losses, such as losses that balance experts.
        Each call of `forward_backward` adds an enabled loss with the weight of a whole mini-batch."""
        return False

    def plan(
        self, spec: WorkerSpec, world_size: int, *, micro_batch_tokens: int, num_micro_batches: int
    ) -> tuple[RankPlan, ...]:
        """Plans the memory of every rank. Returns one entry per rank.

        Args:
            spec: the model.
            world_size: number of ranks.
            micro_batch_tokens: tokens of the largest micro-batch, before context ranks split it.
            num_micro_batches: number of micro-batches per rank and mini-batch.

        Raises:
            ConfigError: `validate` would raise it, or the model's sizes are not known.
        """
        raise _undefined(self, "plan")

    def rehearse(
        self, spec: WorkerSpec, world_size: int, *, batch: Batch, plan: Plan, loss: LossSpec | None
    ) -> tuple[RehearsedPhase, ...]:
        """Runs the first rank's step, and returns its phases: `train` and `step` if `loss` is given, else only `score`.

        Args:
            spec: the model; of its files, only `config.json` is read.
            world_size: number of ranks.
            batch: the first rank's part of the batch, with the columns that the loss reads.
            plan: the first rank's micro-batches.
            loss: the loss to minimise; None: the batch is scored.

        Raises:
            ConfigError: `validate` would raise it, or the step cannot be rehearsed.
        """
        raise _undefined(self, "rehearse")

    def check_model(self, spec: WorkerSpec, *, longest: int, num_sequences: int) -> None:
        """Raises ConfigError if the ranks would refuse the model, as far as its configuration shows this. Reads no
        weights. A model that is not on this machine is not an error: recipes may create it after this call.

        Args:
            spec: the spec of one model of a run.
            longest: largest number of tokens of a sequence.
            num_sequences: 1 if every micro-batch has a single sequence; else 2.
        """

    def prove(self, spec: WorkerSpec) -> str | None:
        """Proves that this backend computes the model correctly, unless this was proved before. A backend that has its
        own model code compares it here with a reference, before a rank loads a model.

        Returns:
            None if the model is proved or needs no proof; else the reason why this machine cannot prove it now.

        Raises:
            ConfigError: the backend computes the model differently or cannot run it, or the proof failed.
        """
        return None


def _undefined(self: Worker | Backend, method: str) -> PluginError:
    """The error of an optional method that was called although its class does not define it."""
    return PluginError(f"{type(self).__name__} does not define `{method}` (rl_core.interfaces)")
