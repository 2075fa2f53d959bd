"""The configuration of a run: every key with its type, default and meaning. No key is unused.

Keys that only one plug-in reads are declared in the plug-in's options class (`backend_sections`, `plugin_options`).
`docs/configuration.md` is generated from this file and from those classes. An upper bound of 1000 or more excludes
values with which the memory would not suffice or a step would never end. If a key of `resolving.RULES` is None,
`rl_core.config.resolve` derives its value from other keys. A run uses only the resolved tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import attrs

from rl_core.errors import ConfigError
from rl_core.interfaces import (
    FINITE,
    Bound,
    ModelConfig,
    OptimizerConfig,
    PlacementKind,
    SamplingParams,
    above,
    at_least,
    at_most,
    between,
    bounded,
    bounds_of,
)
from rl_core.remote_files import is_remote

_T = TypeVar("_T")
_MOST_SECONDS = 10**9
"""About 32 years. Python's threads refuse to wait for 300 years or longer, and Ray refuses infinity."""
_TOP_P = Bound("above 0 and at most 1 (1 takes all tokens)", lambda top_p: 0 < top_p <= 1)
_TOP_K = Bound("at least 1, or -1 for all tokens", lambda top_k: top_k == -1 or top_k >= 1)
Reduction = Literal["token_mean", "sequence_mean", "prompt_mean", "prompt_token_sum", "seq_mean_token_sum_norm"]


def resolved(key: str, value: _T | None) -> _T:
    """Returns `value`. Raises a ConfigError that names the key if the value is None."""
    if value is None:
        raise ConfigError("has no value; set it, or, in Python, call rl_core.config.resolve first", key=key)
    return value


def _section_options(sections: Mapping[str, Any], section: str) -> Any:
    if section not in sections:
        raise ConfigError("not in this configuration; call rl_core.config.resolve, which adds the section", key=section)
    return sections[section]


# --- trainer --------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class PolicyConfig:
    """The model that is trained."""

    model: ModelConfig = attrs.field(factory=ModelConfig)
    """The model and its adapters."""
    optimizer_config: OptimizerConfig = attrs.field(factory=OptimizerConfig)
    """Optimizer and learning-rate schedule."""
    backend_sections: Mapping[str, Any] = attrs.field(factory=dict)
    """Options of training backends, written as `trainer.policy.<backend>_config`: options objects for installed
    backends, raw keys for others."""

    def options(self, section: str) -> Any:
        """The options object of a backend, e.g. `options("fsdp_config")`."""
        return _section_options(self.backend_sections, section)


@attrs.frozen(kw_only=True)
class CriticOptimizerConfig(OptimizerConfig):
    """The optimizer of the critic. Its learning rate is higher than the policy's because the value head starts at
    zero."""

    lr: float = bounded(5e-6, *bounds_of(attrs.fields(OptimizerConfig).lr))
    """Peak learning rate."""


@attrs.frozen(kw_only=True)
class CriticConfig:
    """The critic, which predicts values. A run has one if and only if its advantage estimator reads values, as `gae`
    does."""

    model: ModelConfig = attrs.field(factory=ModelConfig)
    """The model from which the critic starts, and its adapters. A value head that the model does not have yet
    starts at zero."""
    optimizer_config: CriticOptimizerConfig = attrs.field(factory=CriticOptimizerConfig)
    """Optimizer and learning-rate schedule."""
    backend_sections: Mapping[str, Any] = attrs.field(factory=dict)
    """Options of training backends for the critic, written as `trainer.critic.<backend>_config`; see
    `PolicyConfig.backend_sections`."""

    def options(self, section: str) -> Any:
        """The options object of a backend, e.g. `options("fsdp_config")`."""
        return _section_options(self.backend_sections, section)


@attrs.frozen(kw_only=True)
class RefModelConfig:
    """The reference model."""

    path: str | None = None
    """A Hugging Face model directory or name. None: the policy's model before training."""


@attrs.frozen(kw_only=True)
class RefConfig:
    """The reference of KL terms, or the teacher of distillation. Loaded only if something reads its log-probs."""

    model: RefModelConfig = attrs.field(factory=RefModelConfig)
    """The model."""
    inference_backend: str | None = None
    """An inference engine that computes the reference's log-probs, named as in `generator.inference_engine.backend`. It
    runs in addition to the engine that samples, and requires training at temperature 1. None: ranks of
    `trainer.strategy` compute them."""
    inference_options: Mapping[str, Any] = attrs.field(factory=dict)
    """Keys that this engine declares, as under `generator.inference_engine`, e.g. `{external_server_urls:
    ["http://10.0.0.7:8000"]}`."""
    backend_sections: Mapping[str, Any] = attrs.field(factory=dict)
    """Options of training backends for the reference, written as `trainer.ref.<backend>_config`; see
    `PolicyConfig.backend_sections`."""

    def options(self, section: str) -> Any:
        """The options object of a backend, e.g. `options("fsdp_config")`."""
        return _section_options(self.backend_sections, section)


@attrs.frozen(kw_only=True)
class PlacementConfig:
    """Where the ranks run. On a CPU-only machine, the GPU counts mean ranks."""

    policy_num_nodes: int = bounded(1, at_least(1))
    """Number of machines for the policy."""
    policy_num_gpus_per_node: int = bounded(1, at_least(1))
    """GPUs (or ranks) per machine for the policy."""
    colocate_policy_ref: bool = True
    """Policy and reference take turns on the same devices. False: the reference has its own."""
    ref_num_nodes: int | None = bounded(None, at_least(1))
    """Number of machines for the reference. None: as for the policy."""
    ref_num_gpus_per_node: int | None = bounded(None, at_least(1))
    """GPUs (or ranks) per machine for the reference. None: as for the policy."""
    critic_num_nodes: int | None = bounded(None, at_least(1))
    """Number of machines for the critic. None: as for the policy."""
    critic_num_gpus_per_node: int | None = bounded(None, at_least(1))
    """GPUs (or ranks) per machine for the critic. None: as for the policy."""
    colocate_all: bool = True
    """Engine and models (the critic too) share devices and take turns on them: while idle, each frees its memory there
    if it can. With `trainer.pipeline_depth` above 0, the engine keeps its memory, because it also samples during
    training."""

    @property
    def policy_shape(self) -> tuple[int, int]:
        """Number of machines for the policy, and number of ranks per machine."""
        return self.policy_num_nodes, self.policy_num_gpus_per_node

    @property
    def ref_shape(self) -> tuple[int, int]:
        """Number of machines for the reference, and number of ranks per machine."""
        return (
            resolved("trainer.placement.ref_num_nodes", self.ref_num_nodes),
            resolved("trainer.placement.ref_num_gpus_per_node", self.ref_num_gpus_per_node),
        )

    @property
    def critic_shape(self) -> tuple[int, int]:
        """Number of machines for the critic, and number of ranks per machine."""
        return (
            resolved("trainer.placement.critic_num_nodes", self.critic_num_nodes),
            resolved("trainer.placement.critic_num_gpus_per_node", self.critic_num_gpus_per_node),
        )


@attrs.frozen(kw_only=True)
class KLControlConfig:
    """How the coefficient of the KL in the reward changes over the run."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """`fixed` keeps `kl_loss_coef`. `adaptive` adjusts the coefficient to hold the KL at `kl_target` (Ziegler et al.
    2019, arXiv 1909.08593, section 2.2)."""
    kl_target: float = bounded(0.1, above(0))
    """Adaptive only: target KL in nats per token."""
    horizon: int = bounded(10000, at_least(1))
    """Adaptive only: number of sequences over which the coefficient adapts. With a smaller number, it adapts faster,
    but by at most 20 % per step."""


@attrs.frozen(kw_only=True)
class OffPolicyCorrectionConfig:
    """Corrections for the mismatch between the trained policy and the engine that sampled. The engine's weights may be
    older (`trainer.max_staleness`), and its numerical errors differ."""

    tis_ratio_type: Literal["token", "sequence", "off"] | None = None
    """Truncated importance sampling per token or per sequence. None: per token if `trainer.pipeline_depth` is above 0
    and the policy loss accepts corrections (losses that correct by themselves do not), else off."""
    token_tis_ratio_clip_high: float = 2.0
    """Upper bound of the per-token ratio."""
    sequence_tis_ratio_clip_high: float = 5.0
    """Upper bound of the per-sequence ratio."""
    sequence_mask_metric: Literal["geometric", "product"] | None = None
    """Mask whole sequences by the geometric mean or the product of their token ratios. None: off."""
    geo_mask_high: float = 1.01
    """`geometric`: mask sequences above this value."""
    geo_mask_low: float = 0.99
    """`geometric`: mask sequences below this value."""
    product_mask_high: float = 2.0
    """`product`: mask sequences above this value."""
    product_mask_low: float = 0.5
    """`product`: mask sequences below this value."""
    outlier_token_is_threshold_low: float | None = None
    """Mask sequences that have a token ratio below this value. None: no bound."""
    outlier_token_is_threshold_high: float | None = None
    """Mask sequences that have a token ratio above this value. None: no bound."""
    token_mask_is_threshold_low: float | None = None
    """Mask tokens whose ratio is below this value. Set this bound and the next one, or neither. None: off."""
    token_mask_is_threshold_high: float | None = None
    """Mask tokens whose ratio is above this value. None: off."""


@attrs.frozen(kw_only=True)
class DynamicSamplingConfig:
    """What to do with groups whose samples all have the same reward (DAPO, Yu et al. 2025, arXiv 2503.14476, section
    3.2)."""

    type: Literal["filter", "replace"] | None = None
    """`filter`: sample until the batch is full of groups whose rewards differ. `replace`: replace each group of equal
    rewards by a copy of a group whose rewards differ. None: off."""
    max_sample_batches: int = bounded(30, at_least(1))
    """`filter`: stop the run if more than this number × `trainer.train_batch_size` consecutive groups are dropped.
    `replace`: stop the run after this many consecutive batches below `min_replace_ratio`."""
    min_replace_ratio: float = bounded(0.3, between(0, 1))
    """`replace`: smallest fraction of groups whose rewards differ. A batch with fewer is discarded, and a new one is
    sampled."""


@attrs.frozen(kw_only=True)
class AlgorithmConfig:
    """What the policy learns from a batch: advantages, loss, regularisation."""

    advantage_estimator: str = "grpo"
    """An installed estimator (`rl plugins` lists the names) or `package.module:function`."""
    advantage_params: Mapping[str, Any] = attrs.field(factory=dict)
    """Keyword parameters of the estimator. A parameter not listed here is read from `trainer.algorithm.<parameter>`; if
    that is not set either, the estimator's default is used."""
    grpo_norm_by_std: bool | None = None
    """Divide GRPO advantages by the group's standard deviation. False is Dr. GRPO (Liu et al. 2025, arXiv 2503.20783).
    None: the estimator's default, true."""
    gamma: float | None = bounded(None, between(0, 1))
    """Discount factor per token or turn, for estimators that discount. None: the estimator's default, 1."""
    lambd: float | None = bounded(None, between(0, 1))
    """λ of generalised advantage estimation, for estimators that use it. None: the estimator's default, 1."""
    value_clip: float = bounded(0.2, at_least(0))
    """Clip range of the value loss around the previous prediction, in units of value."""
    advantage_batch_normalize: bool = False
    """Normalise the advantages to mean 0 and standard deviation 1 over the trained tokens of the batch."""
    policy_loss_type: str = "regular"
    """An installed policy loss (`rl plugins` lists the names) or `package.module:function`."""
    policy_loss_params: Mapping[str, Any] = attrs.field(factory=dict)
    """Keyword parameters of the loss. A parameter not listed here is read from `trainer.algorithm.<parameter>`; if that
    is not set either, the loss's default is used."""
    eps_clip_low: float | None = bounded(None, between(0, 1))
    """Lower clip bound of the probability ratio: 1 − this value. None: the loss's default, 0.0003 for `gspo` and
    `gspo_token`, 0.2 for others."""
    eps_clip_high: float | None = bounded(None, at_least(0))
    """Upper clip bound of the probability ratio: 1 + this value. None: the loss's default, 0.0004 for `gspo` and
    `gspo_token`, 0.2 for others."""
    clip_ratio_c: float | None = bounded(None, at_least(1))
    """Dual clip: upper bound of the ratio for negative advantages, at least 1. None: the loss's default, 3."""
    loss_reduction: Reduction = "token_mean"
    """How token losses are averaged over the mini-batch. `token_mean`: all tokens have the same weight.
    `sequence_mean`, `prompt_mean`: all sequences, or all prompts, have the same weight. `prompt_token_sum`: the sum
    over a prompt's tokens, averaged over prompts. `seq_mean_token_sum_norm`: the sum over a sequence's tokens divided
    by `max_seq_len`, averaged over sequences."""
    max_seq_len: int | None = None
    """The divisor of `loss_reduction=seq_mean_token_sum_norm`, which requires it. Nothing else reads it."""
    use_kl_loss: bool = False
    """Add the KL divergence from the reference model to the loss. Off by default, unlike in SkyRL, because it needs a
    second model and most current recipes omit it."""
    kl_loss_coef: float = bounded(0.001, at_least(0), FINITE)
    """Coefficient of the KL, in the loss or in the reward."""
    kl_estimator_type: Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+", "k3_unbiased"] = "k3"
    """Estimator of the KL (Schulman 2020, "Approximating KL divergence"). The suffix `+` selects the straight-through
    form, whose gradient is unbiased. `k3_unbiased` weights k3 by the probability ratio to the policy at the start of
    the update. The forms with `+` and `k3_unbiased` can be used only in the loss."""
    off_policy_sequence_mask: float | None = bounded(None, at_least(0))
    """Mask the policy loss of sequences with negative advantage whose log-probs have dropped by more than this many
    nats per token since they were sampled (DeepSeek-V3.2, arXiv 2512.02556). Requires a loss that reads advantages. Try
    0.5 first. None: off."""
    use_kl_in_reward: bool = False
    """Subtract the KL from the token rewards instead of adding it to the loss. `pass_at_k` and `maxrl` read success
    from the environment's reward and treat the KL as a separate reward."""
    kl_ctrl: KLControlConfig = attrs.field(factory=KLControlConfig)
    """How the coefficient of the KL in the reward changes over the run."""
    use_entropy_loss: bool = False
    """Add an entropy bonus."""
    entropy_loss_coef: float = bounded(0.01, at_least(0), FINITE)
    """Coefficient of the entropy bonus."""
    temperature: float | None = bounded(None, above(0))
    """Logits are divided by this value when log-probs are computed. None: `generator.sampling_params.temperature`."""
    zero_variance_filter: bool = False
    """Drop groups whose samples all have the same reward, without sampling replacements."""
    off_policy_correction: OffPolicyCorrectionConfig = attrs.field(factory=OffPolicyCorrectionConfig)
    """Corrections for the mismatch between trainer and engine."""
    dynamic_sampling: DynamicSamplingConfig = attrs.field(factory=DynamicSamplingConfig)
    """What to do with groups whose samples all have the same reward."""


@attrs.frozen(kw_only=True)
class TrainerConfig:
    """Training: models, batches, schedule and output."""

    strategy: str = "fsdp"
    """The training backend (`rl plugins` lists the names) or `package.module:object`. `fsdp2` is an alias of `fsdp`."""
    policy: PolicyConfig = attrs.field(factory=PolicyConfig)
    """The model that is trained."""
    ref: RefConfig = attrs.field(factory=RefConfig)
    """The reference model."""
    critic: CriticConfig = attrs.field(factory=CriticConfig)
    """The critic, for estimators that need one."""
    placement: PlacementConfig = attrs.field(factory=PlacementConfig)
    """Where the ranks run."""
    algorithm: AlgorithmConfig = attrs.field(factory=AlgorithmConfig)
    """What the policy learns from a batch."""

    epochs: int = bounded(1, at_least(1))
    """Passes over the training data."""
    max_training_steps: int | None = bounded(None, at_least(1))
    """Steps (training batches) after which the run ends. None: all steps of all epochs."""
    train_batch_size: int = bounded(1024, at_least(1), at_most(2**20))
    """Prompts per training batch. Each is sampled `generator.n_samples_per_prompt` times."""
    policy_mini_batch_size: int = bounded(256, at_least(1))
    """Prompts per optimizer step. Must divide `train_batch_size`."""
    critic_mini_batch_size: int = bounded(256, at_least(1))
    """Prompts per optimizer step of the critic. Must divide `train_batch_size`."""
    update_epochs_per_batch: int = bounded(1, at_least(1), at_most(1000))
    """Passes over each training batch."""
    micro_train_batch_size_per_gpu: int = bounded(1, at_least(1))
    """Sequences per micro-batch in training. Changes memory and speed, and the result only by rounding."""
    micro_forward_batch_size_per_gpu: int = bounded(1, at_least(1))
    """Sequences per micro-batch when log-probs are computed without gradients."""
    max_tokens_per_microbatch: int = -1
    """Tokens per micro-batch. Above 0 it replaces both sequence counts."""
    use_sample_packing: bool = True
    """Pack a micro-batch into one stream without padding. False: pad it to a rectangle."""
    share_prefixes: bool | Literal["auto"] = "auto"
    """Compute prefixes that sequences of a packed micro-batch share (a group's prompt, an episode's earlier turns) only
    once. Token limits count shared tokens once. The result changes only by rounding. `auto`: on if the backend supports
    it and `use_sample_packing` is on."""
    gradient_checkpointing: bool | Literal["selective"] = True
    """Recompute activations in the backward pass: less memory for about a third more computation. `selective` keeps the
    results of matrix products and attention: little extra computation, with a memory use between false and true."""
    bf16: bool = True
    """Compute in bfloat16; trained parameters stay float32. False: compute in float32."""
    logprobs_chunk_size: int = bounded(1024, at_least(1))
    """Number of tokens whose float32 logits are in memory at a time."""
    seed: int = bounded(42, at_least(0), at_most(2**63 - 1))
    """Seed from which all random numbers of the run are derived."""
    num_threads: int | None = bounded(None, at_least(1), at_most(1024))
    """CPU threads of each rank, and of the engine `local`. None: OMP_NUM_THREADS, else all cores, which the processes
    of a machine's ranks share equally."""
    max_staleness: int = bounded(0, at_least(0))
    """Largest age, in weight versions, of a group that is trained on. 0: synchronous; 1: one step off-policy; more:
    asynchronous."""
    pipeline_depth: int | None = bounded(None, at_least(0))
    """How many steps generation runs ahead of training, at most `max_staleness`. A group starts only if this step's
    batch or one of the next `pipeline_depth` batches has room for it. Slow groups may become more than `pipeline_depth`
    versions old, but at most `max_staleness`. None: 1, but at most `max_staleness`."""
    stream_groups: bool = False
    """Train on groups as they finish, while the other groups of the step are still being sampled. The result is the
    same up to rounding. Requires separate devices for the engines (`placement.colocate_all=false`), one optimizer step
    per batch, and a loss and advantages that can be computed for each group without the other groups. Otherwise, the
    run does not start."""
    max_consecutive_nonfinite_steps: int = bounded(3, at_least(1))
    """Stop the run after this many consecutive optimizer steps were skipped because loss or gradient was not
    finite."""

    max_prompt_length: int = bounded(512, at_least(1))
    """Longest prompt in tokens. `data.on_long_prompt` decides what happens to longer ones."""
    eval_batch_size: int = bounded(1024, at_least(1))
    """Held-out prompts that are sampled at the same time."""
    eval_before_train: bool = True
    """Also evaluate the model before training."""
    eval_interval: int = 5
    """Steps between evaluations. The last step is evaluated too. Below 1: after the start, the model is
    evaluated only if a callback requests it."""

    ckpt_interval: int = 10
    """Steps between checkpoints. The last step gets one too. Below 1: a checkpoint is saved only if the run is
    stopped or fails, or a callback requests one."""
    max_ckpts_to_keep: int = bounded(-1, Bound("at least 1, or -1 to keep all", lambda kept: kept == -1 or kept >= 1))
    """Keep only this many of the newest checkpoints; -1: all. If the disk is too full for a checkpoint, the run
    continues and tries again at every step."""
    async_save: bool = False
    """Write checkpoints in the background while training continues. Needs CPU memory for a copy of the state. A
    checkpoint is complete once all ranks have written their part."""
    hf_save_interval: int = -1
    """Steps between exports of the model in Hugging Face format. Below 1: only the final model."""
    resume_mode: Literal["none", "latest", "from_path"] = "latest"
    """`latest`: continue from the newest complete checkpoint in `ckpt_path`, or start from the beginning if there is
    none. `from_path`: continue from `resume_path`. `none`: start from the beginning. Resuming with other training rows,
    another order or another seed is an error; other changed keys are listed. Output of steps after the checkpoint moves
    to `replaced_N` in the run directory. A run that starts from the beginning moves an earlier run's files, and no
    others, to `<run_dir>.N`."""
    resume_path: str | None = None
    """A checkpoint's directory, for `resume_mode=from_path`."""
    project_name: str = "rl"
    """Project name for trackers."""
    run_name: str = "run"
    """Name of the run: not empty, no leading dot, no slash."""
    run_dir: str | None = None
    """Directory of all output. None: `runs/<run_name>`. Two runs must not use the same `run_dir`, `ckpt_path` or
    `export_path` at the same time."""
    ckpt_path: str | None = None
    """Directory of the checkpoints. None: `<run_dir>/checkpoints`. If this is an address (`s3://…`, through fsspec),
    checkpoints are written to `<run_dir>/checkpoints` and then copied to the address, so that a run on another machine
    can resume from them."""
    export_path: str | None = None
    """Directory of the model in Hugging Face format. None: `<run_dir>/model`."""

    logger: tuple[str, ...] = ("console",)
    """Trackers: installed ones (`rl plugins` lists the names) or `package.module:function`. `metrics.jsonl` is always
    written."""
    tags: tuple[str, ...] = ()
    """Labels of the run for trackers."""
    callbacks: tuple[str, ...] = ()
    """Callbacks, called in this order: installed ones (`rl plugins` lists the names) or `package.module:Class`."""
    num_logged_samples: int = bounded(8, at_least(0))
    """Samples of each step and each evaluation that are written to `samples.jsonl`, in addition to all failed ones."""
    max_failure_rate: float = bounded(0.5, between(0, 1))
    """Stop the run, with a checkpoint, if a larger fraction of the samples of a step or an evaluation fails. 1: no
    limit, but the run still stops if all samples of an evaluation, or of too many consecutive groups, fail."""
    log_sample_logprobs: bool = False
    """Also write the per-token log-probs of engine and trainer to `samples.jsonl`."""
    entropy_interval: int = bounded(10, at_least(0))
    """Steps between computations of `policy/entropy`, which is also computed in step 1; 0: never. A loss that reads
    entropies computes them in every step."""
    generation_timeout_s: float = bounded(1800.0, above(0), at_most(_MOST_SECONDS))
    """Longest wait for a training batch (with `stream_groups`, for its next part), an evaluation, all responses of
    `rl generate`, or one request to an engine."""
    worker_timeout_s: float = bounded(3600.0, above(0), at_most(_MOST_SECONDS))
    """Longest time that one call to the training ranks may take."""
    worker_start_timeout_s: float = bounded(1800.0, above(0), at_most(_MOST_SECONDS))
    """Longest time for each phase of a start: reserving devices, starting a model's ranks, loading the model."""
    worker_silence_s: float = bounded(300.0, above(0), at_most(_MOST_SECONDS))
    """A rank that runs in its own process is considered dead after this long without an answer and without CPU, file or
    network activity, even if the call has not reached `worker_timeout_s`. A long computation counts as activity."""


# --- generator ------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class SamplingConfig:
    """How responses are sampled in training. The trainer scores tokens in the distribution from which they were
    sampled, also with `top_p`, `top_k` and `min_p` (docs/algorithms.md, Sampling)."""

    max_generate_length: int = bounded(1024, at_least(1))
    """Longest response of one turn, in tokens."""
    temperature: float = bounded(1.0, at_least(0), FINITE)
    """Sampling temperature. 0 takes the most likely token; training requires a value above 0."""
    top_p: float = bounded(1.0, _TOP_P)
    """Sample from the smallest set of tokens whose probabilities sum to at least this; 1: all."""
    top_k: int = bounded(-1, _TOP_K)
    """Sample from this many most likely tokens; -1: all."""
    min_p: float = bounded(0.0, between(0, 1))
    """Exclude tokens whose probability is below this fraction of the most likely token's; 0: none."""
    stop: tuple[str, ...] = ()
    """A response ends when its text contains one of these strings."""
    extra_args: Mapping[str, Any] = attrs.field(factory=dict)
    """Further parameters of the engine's own sampling, by the engine's names (docs/algorithms.md, Sampling). Parameters
    that change the distribution are allowed only in evaluation."""

    @property
    def truncating(self) -> tuple[str, ...]:
        """The keys that exclude tokens, of `top_p`, `top_k` and `min_p`."""
        has_effect = {"top_p": self.top_p < 1.0, "top_k": self.top_k > 0, "min_p": self.min_p > 0.0}
        return tuple(name for name, excludes in has_effect.items() if excludes)

    @property
    def is_truncated(self) -> bool:
        """Whether top-p, top-k or min-p exclude some tokens."""
        return bool(self.truncating)

    def to_params(self) -> SamplingParams:
        """The parameters in the form that engines take."""
        return _sampling_params(self, self.max_generate_length, self.stop)


@attrs.frozen(kw_only=True)
class EvalSamplingConfig:
    """How responses are sampled in evaluation. Greedy by default."""

    max_generate_length: int | None = bounded(None, at_least(1))
    """Longest response of one turn, in tokens. None: `generator.sampling_params.max_generate_length`."""
    temperature: float = bounded(0.0, at_least(0), FINITE)
    """Sampling temperature. 0 takes the most likely token."""
    top_p: float = bounded(1.0, _TOP_P)
    """As in training. Without effect at temperature 0."""
    top_k: int = bounded(-1, _TOP_K)
    """As in training. Without effect at temperature 0."""
    min_p: float = bounded(0.0, between(0, 1))
    """As in training. Without effect at temperature 0."""
    stop: tuple[str, ...] | None = None
    """A response ends when its text contains one of these strings. None: `generator.sampling_params.stop`."""
    extra_args: Mapping[str, Any] = attrs.field(factory=dict)
    """Further parameters of the engine's own sampling, by the engine's names. Those of training are not taken over."""

    def to_params(self) -> SamplingParams:
        """The parameters in the form that engines take. Raises ConfigError if not resolved."""
        key = "generator.eval_sampling_params"
        max_tokens = resolved(f"{key}.max_generate_length", self.max_generate_length)
        return _sampling_params(self, max_tokens, resolved(f"{key}.stop", self.stop))


def _sampling_params(
    config: SamplingConfig | EvalSamplingConfig, max_tokens: int, stop: tuple[str, ...]
) -> SamplingParams:
    same = {name: getattr(config, name) for name in ("temperature", "top_p", "top_k", "min_p", "extra_args")}
    return SamplingParams(max_tokens=max_tokens, stop=stop, **same)


@attrs.frozen(kw_only=True)
class WeightVerificationConfig:
    """Checks that the engines compute with the trainer's weights, by comparing log-probs of both."""

    prove_at_start: bool = True
    """Before the first step, add noise to every trained parameter, enough to change the log-probs; sync and compare;
    restore the weights; sync and compare again. A tensor that does not reach an engine stops the run."""
    interval: int = bounded(10, at_least(0))
    """Steps between comparisons. There is also a comparison after the first sync of a process or of a restarted engine.
    0: only `prove_at_start` and restarted engines cause comparisons."""
    num_tokens: int = bounded(256, at_least(256), at_most(2**20))
    """Number of random tokens whose log-probs are compared, rounded up to whole sequences; the seed of the run
    determines them."""
    # `prove_at_start` increases its noise until the log-probs change by 1.5 nats, and fails if they change by less than
    # nine times the limit. With a limit above 1.5 / 9, it could fail although every tensor arrives.
    limit: float | None = bounded(None, above(0), at_most(0.16))
    """Stop the run if the mean absolute difference of the log-probs, in nats, is larger. None: 0.001 for float32, 0.02
    for float16, 0.06 for bfloat16; the coarser dtype of trainer and engine decides. The default is scaled up in
    proportion if the tokens' mean log-prob is below -5."""


@attrs.frozen(kw_only=True)
class InferenceEngineConfig:
    """The engine that samples, and how it gets the weights."""

    backend: str = "local"
    """The inference engine (`rl plugins` lists the names) or `package.module:object`."""
    num_engines: int = bounded(1, at_least(1))
    """Number of engines. The engine `local` supports only one."""
    max_num_seqs: int = bounded(1024, at_least(1))
    """Largest number of sequences that one engine decodes at a time."""
    weight_sync_backend: str | None = None
    """The weight transport (`rl plugins` lists the names) or `package.module:object`. None: `shared_memory` if policy
    and engines are on one Linux machine, else `files`."""
    enable_return_routed_experts: bool = False
    """The engine returns the experts to which it routed each token. Required by the backend's
    `moe_enable_routing_replay`, and allowed only together with it."""
    weight_sync_delta: bool = False
    """Send only the values that differ from the engines' version. A tensor is sent whole if its changed values would
    need more than half of its bytes. Ranks and engines keep a copy of the weights in CPU memory. Useful for bfloat16
    weights over a slow network (docs/weight_sync.md)."""
    weight_sync_whole_interval: int = bounded(20, at_least(1))
    """With `weight_sync_delta`: every n-th sync sends all weights. The first sync, and the first sync after a failure,
    always send all weights."""
    weight_bucket_bytes: int = bounded(268435456, at_least(1))
    """Largest size of one bucket of weights, in bytes. A larger tensor gets a bucket of its own."""
    weight_sync_pause_mode: Literal["keep", "abort", "wait"] = "keep"
    """What happens to running requests when weights change. `keep`: they pause and continue under the new weights.
    `abort`: they return what they have and continue later. `wait`: they finish first."""
    weight_verification: WeightVerificationConfig = attrs.field(factory=WeightVerificationConfig)
    """Checks that the engines compute with the trainer's weights."""
    model_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """The engine's dtype. None: `bfloat16` if `trainer.bf16` is true, else `float32`."""
    engine_init_kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    """Additional arguments for the engine, which rejects unknown ones."""
    plugin_options: Mapping[str, Any] = attrs.field(factory=dict)
    """Engine's name → options object of the engine plug-in. Its keys are written next to the keys above. Engines that
    are not selected are present only if some of their keys were changed."""

    @property
    def options(self) -> Any:
        """The options object of the selected engine. None if the engine declares no keys, or before
        `rl_core.config.resolve`."""
        return self.plugin_options.get(self.backend)


@attrs.frozen(kw_only=True)
class GeneratorConfig:
    """How trajectories are generated from prompts."""

    type: str = "environment"
    """The generator (`rl plugins` lists the names) or `package.module:object`."""
    n_samples_per_prompt: int = bounded(5, at_least(1), at_most(2**16))
    """Samples per training prompt (the group size)."""
    max_turns: int = bounded(1, at_least(1), at_most(2**16))
    """Largest number of responses in an episode. An episode with this many responses ends. With 1, a sample fails if
    its environment wants another turn."""
    max_input_length: int | None = bounded(None, at_least(1))
    """Longest prompt of a later turn in tokens, including all earlier turns. An episode ends when its next prompt would
    be longer. None: `trainer.max_prompt_length`."""
    step_wise_trajectories: bool = False
    """Train on each turn as a separate sequence, so that a chat template may change earlier turns, for example drop
    their thinking. False: an episode is one sequence."""
    merge_stepwise_output: bool = True
    """With `step_wise_trajectories`: merge a turn with the previous turn if the prompt of the later one begins with all
    tokens of the earlier one. Each token is then computed only once. The gradient stays the same unless the loss has a
    ratio per sequence (`gspo`, `gspo_token`, `gmpo`) or `off_policy_sequence_mask` is set."""
    sampling_params: SamplingConfig = attrs.field(factory=SamplingConfig)
    """Sampling in training."""
    eval_sampling_params: EvalSamplingConfig = attrs.field(factory=EvalSamplingConfig)
    """Sampling in evaluation."""
    eval_n_samples_per_prompt: int = bounded(1, at_least(1), at_most(2**16))
    """Samples per held-out prompt."""
    apply_overlong_filtering: bool = False
    """Do not train on samples whose last response was cut off at the length limit, or whose context had no room for
    another response. Their rewards still count in their group's baseline."""
    inference_engine: InferenceEngineConfig = attrs.field(factory=InferenceEngineConfig)
    """The engine that samples."""
    plugin_options: Mapping[str, Any] = attrs.field(factory=dict)
    """Generator's name → options object of the generator plug-in. Its keys are written next to the keys above.
    Generators that are not selected are present only if some of their keys were changed."""

    @property
    def options(self) -> Any:
        """The options object of the selected generator. None if the generator declares no keys, or before
        `rl_core.config.resolve`."""
        return self.plugin_options.get(self.type)


# --- data, environment ----------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class DataConfig:
    """The files with the prompts."""

    train_data: tuple[str, ...] = ()
    """Parquet, JSON-lines, JSON or CSV files, local or at an address that fsspec reads (`s3://…`), and Hugging Face
    data sets, as a directory or `org/name[:configuration][@split]`. The prompt is the column `prompt_key`; if that is
    `prompt`, rows without this column may have `messages` instead. The column `reward_model` is read as `reward_spec`
    if there is no `reward_spec`."""
    val_data: tuple[str, ...] = ()
    """Held-out prompts in the same formats. Empty: no evaluation."""
    prompt_key: str = "prompt"
    """The column with the prompt."""
    apply_chat_template: bool = False
    """Make each prompt of text the user's message of a conversation, which the model's chat template renders."""
    add_special_tokens: bool = True
    """Begin prompts of text with the tokens with which the tokenizer itself begins a text, such as the
    beginning-of-sequence token of Llama 3, Gemma and Mistral models. Without effect on chat messages, whose template
    writes such tokens."""
    shuffle: bool = True
    """Shuffle the training prompts in every epoch; the seed determines the order."""
    on_refused_row: Literal["error", "drop"] = "error"
    """What to do with rows that their environment refuses, such as a reference answer that `mathematics` cannot read,
    and with rows without a usable prompt, such as a pair of the same responses.
    `error`: the run does not start. `drop`: they are left out, and their number and the first reason are reported."""
    on_long_prompt: Literal["error", "drop"] = "error"
    """What to do with prompts longer than `trainer.max_prompt_length`. `error`: the run does not start. `drop`: they
    are left out, and their number is reported."""


@attrs.frozen(kw_only=True)
class EnvironmentConfig:
    """The environment that scores the responses."""

    env_class: str | None = None
    """An installed environment (`rl plugins` lists the names) or `package.module:Class`, for all rows. None: each row's
    column `env_class` names its environment. If a recipe sets this key and rows name other environments, the run does
    not start until the user sets the key."""
    options: Mapping[str, Any] = attrs.field(factory=dict)
    """Options passed to every environment."""
    reward_functions: tuple[str, ...] = ()
    """Functions `package.module:function` that score the responses instead of an environment (docs/coming_from.md)."""
    reward_weights: tuple[float, ...] = ()
    """Weights of `reward_functions` in the sum of their rewards. Empty: 1 each."""
    timeout_s: float = bounded(300.0, above(0), at_most(_MOST_SECONDS))
    """Longest time that one call of an environment may take. If it takes longer, the sample fails."""
    placement: PlacementKind | None = None
    """Where environments run: each in its own `thread` or `process`, or all `in_process` on one event loop, for
    environments that never block it. None: what the environment declares (`reward_functions`: `process`), else
    `thread`."""
    num_workers: int | None = bounded(None, at_least(1))
    """Largest number of episodes that have an environment at the same time. None: with threads, no limit other than
    `generator.max_concurrency`; with processes, four per CPU core. For reward functions in processes: the largest
    number of responses that are scored at the same time; None: no limit. Without effect on `in_process`
    environments."""


# --- all sections ---------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Config:
    """The configuration of a run. The properties need a resolved configuration."""

    trainer: TrainerConfig = attrs.field(factory=TrainerConfig)
    """Training: models, batches, schedule and output."""
    generator: GeneratorConfig = attrs.field(factory=GeneratorConfig)
    """How trajectories are generated from prompts."""
    data: DataConfig = attrs.field(factory=DataConfig)
    """The files with the prompts."""
    environment: EnvironmentConfig = attrs.field(factory=EnvironmentConfig)
    """The environment that scores the responses."""

    @property
    def run_dir(self) -> Path:
        """The directory of all output."""
        return Path(resolved("trainer.run_dir", self.trainer.run_dir))

    @property
    def ckpt_dir(self) -> Path:
        """The local directory to which checkpoints are written: `trainer.ckpt_path`, or `checkpoints` in the run
        directory if `trainer.ckpt_path` is a remote address."""
        path = resolved("trainer.ckpt_path", self.trainer.ckpt_path)
        return self.run_dir / "checkpoints" if is_remote(path) else Path(path)

    @property
    def export_dir(self) -> Path:
        """The directory of the model in Hugging Face format."""
        return Path(resolved("trainer.export_path", self.trainer.export_path))

    @property
    def policy_model_path(self) -> str:
        """Directory or name of the model that is trained."""
        return resolved("trainer.policy.model.path", self.trainer.policy.model.path)

    @property
    def temperature(self) -> float:
        """The value by which logits are divided when log-probs are computed."""
        return resolved("trainer.algorithm.temperature", self.trainer.algorithm.temperature)

    @property
    def pipeline_depth(self) -> int:
        """How many steps generation runs ahead of training. 0: generation and training alternate."""
        return resolved("trainer.pipeline_depth", self.trainer.pipeline_depth)

    @property
    def weight_transport(self) -> str:
        """The transport that sends weights to the engines: a name of `rl plugins` or `package.module:object`."""
        engine = self.generator.inference_engine
        return resolved("generator.inference_engine.weight_sync_backend", engine.weight_sync_backend)

    @property
    def engine_dtype(self) -> Literal["bfloat16", "float16", "float32"]:
        """The engine's dtype: `bfloat16`, `float16` or `float32`."""
        return resolved("generator.inference_engine.model_dtype", self.generator.inference_engine.model_dtype)
