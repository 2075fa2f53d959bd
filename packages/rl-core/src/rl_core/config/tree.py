"""The configuration of a run: every key, its type, its default and its meaning. No key stands here that nothing reads.

Keys that only one plug-in reads stand in the options class that it brings (`backend_sections`, `plugin_options`).
`docs/configuration.md` is generated from this file and from those classes. Where a key's text says "None: …" and names
other keys, `rl_core.config.resolve` derives the value from them; whatever runs sees only the resolved tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import attrs

from rl_core.errors import ConfigError
from rl_core.interfaces import ModelConfig, OptimizerConfig, PlacementKind, SamplingParams
from rl_core.remote_files import is_remote

_T = TypeVar("_T")
Reduction = Literal["token_mean", "sequence_mean", "prompt_mean", "prompt_token_sum", "seq_mean_token_sum_norm"]


def resolved(key: str, value: _T | None) -> _T:
    """`value`, or a ConfigError that names the key if it is None."""
    if value is None:
        raise ConfigError(f"{key}: has no value; set it, or call rl_core.config.resolve first")
    return value


def _section_options(sections: Mapping[str, Any], section: str) -> Any:
    if section not in sections:
        raise ConfigError(f"{section}: not in this configuration; rl_core.config.resolve adds the selected backend's")
    return sections[section]


# --- trainer --------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class PolicyConfig:
    """The model that is trained."""

    model: ModelConfig = attrs.field(factory=ModelConfig)
    """Which model, and its adapters."""
    optimizer_config: OptimizerConfig = attrs.field(factory=OptimizerConfig)
    """Optimizer and learning-rate schedule."""
    backend_sections: Mapping[str, Any] = attrs.field(factory=dict)
    """Written as `trainer.policy.<backend>_config`: an installed backend's own options; of others, the raw keys."""

    def options(self, section: str) -> Any:
        """The options object of a backend, e.g. `options("fsdp_config")`."""
        return _section_options(self.backend_sections, section)


@attrs.frozen(kw_only=True)
class CriticOptimizerConfig(OptimizerConfig):
    """The policy's, with a higher rate: the value head is learned from nothing."""

    lr: float = 5e-6
    """Peak learning rate."""


@attrs.frozen(kw_only=True)
class CriticConfig:
    """The critic: a model of values. There is one exactly when the advantage estimator reads values, as `gae` does."""

    model: ModelConfig = attrs.field(factory=ModelConfig)
    """Which model it starts from, and its adapters; its value head starts at zero unless the model has one."""
    optimizer_config: CriticOptimizerConfig = attrs.field(factory=CriticOptimizerConfig)
    """Optimizer and learning-rate schedule."""
    backend_sections: Mapping[str, Any] = attrs.field(factory=dict)
    """Written as `trainer.critic.<backend>_config`, as for the policy."""

    def options(self, section: str) -> Any:
        """The options object of a backend, e.g. `options("fsdp_config")`."""
        return _section_options(self.backend_sections, section)


@attrs.frozen(kw_only=True)
class RefModelConfig:
    """Which reference model."""

    path: str | None = None
    """A Hugging Face model directory or name; None: the policy's, as it was before training."""


@attrs.frozen(kw_only=True)
class RefConfig:
    """The reference model of the KL terms; loaded only if one of them is switched on."""

    model: RefModelConfig = attrs.field(factory=RefModelConfig)
    """Which model."""
    backend_sections: Mapping[str, Any] = attrs.field(factory=dict)
    """Written as `trainer.ref.<backend>_config`, as for the policy."""

    def options(self, section: str) -> Any:
        """The options object of a backend, e.g. `options("fsdp_config")`."""
        return _section_options(self.backend_sections, section)


@attrs.frozen(kw_only=True)
class PlacementConfig:
    """Where the ranks run. On a machine without GPUs the counts count ranks."""

    policy_num_nodes: int = 1
    """Machines of the policy."""
    policy_num_gpus_per_node: int = 1
    """GPUs (or ranks, on a CPU-only machine) of the policy on each."""
    colocate_policy_ref: bool = True
    """The reference stands on the policy's devices, and each leaves them while the other computes; else it has its
    own."""
    ref_num_nodes: int | None = None
    """Machines of the reference; None: as the policy."""
    ref_num_gpus_per_node: int | None = None
    """GPUs (or ranks) of the reference on each; None: as the policy."""
    critic_num_nodes: int | None = None
    """Machines of the critic; None: as the policy."""
    critic_num_gpus_per_node: int | None = None
    """GPUs (or ranks) of the critic on each; None: as the policy."""
    colocate_all: bool = True
    """Training (the critic's too) and inference share the devices: whoever has nothing to do leaves them, if it can."""

    @property
    def policy_shape(self) -> tuple[int, int]:
        """Nodes of the policy, and ranks on each."""
        return self.policy_num_nodes, self.policy_num_gpus_per_node

    @property
    def ref_shape(self) -> tuple[int, int]:
        """Nodes of the reference, and ranks on each."""
        return (
            resolved("trainer.placement.ref_num_nodes", self.ref_num_nodes),
            resolved("trainer.placement.ref_num_gpus_per_node", self.ref_num_gpus_per_node),
        )

    @property
    def critic_shape(self) -> tuple[int, int]:
        """Nodes of the critic, and ranks on each."""
        return (
            resolved("trainer.placement.critic_num_nodes", self.critic_num_nodes),
            resolved("trainer.placement.critic_num_gpus_per_node", self.critic_num_gpus_per_node),
        )


@attrs.frozen(kw_only=True)
class KLControlConfig:
    """The coefficient of the KL in the reward over time."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """`fixed` keeps `kl_loss_coef`; `adaptive` steers the KL to `kl_target` (Ziegler et al. 2019, arXiv 1909.08593,
    section 2.2)."""
    kl_target: float = 0.1
    """Adaptive only: nats per token that the controller aims at."""
    horizon: int = 10000
    """Adaptive only: sequences over which the coefficient adapts; smaller is faster."""


@attrs.frozen(kw_only=True)
class OffPolicyCorrectionConfig:
    """Corrections for the distance between the policy that is trained and the engine that sampled: its weights may be
    older (`trainer.max_staleness`), and it rounds otherwise."""

    tis_ratio_type: Literal["token", "sequence", "off"] | None = None
    """Truncated importance sampling per token or per sequence; None: per token where `trainer.pipeline_depth` is above
    0 and the policy loss does not refuse corrections, as those that correct by themselves do."""
    token_tis_ratio_clip_high: float = 2.0
    """Upper bound of the per-token ratio."""
    sequence_tis_ratio_clip_high: float = 5.0
    """Upper bound of the per-sequence ratio."""
    sequence_mask_metric: Literal["geometric", "product"] | None = None
    """Leaves out whole sequences by the geometric mean or the product of their ratios; None: off."""
    geo_mask_high: float = 1.01
    """Geometric: sequences above are left out."""
    geo_mask_low: float = 0.99
    """Geometric: sequences below are left out."""
    product_mask_high: float = 2.0
    """Product: sequences above are left out."""
    product_mask_low: float = 0.5
    """Product: sequences below are left out."""
    outlier_token_is_threshold_low: float | None = None
    """Leaves out sequences with a token whose ratio is below; None: no bound."""
    outlier_token_is_threshold_high: float | None = None
    """Leaves out sequences with a token whose ratio is above; None: no bound."""
    token_mask_is_threshold_low: float | None = None
    """Leaves out single tokens whose ratio is below; None: no bound."""
    token_mask_is_threshold_high: float | None = None
    """Leaves out single tokens whose ratio is above; None: no bound."""


@attrs.frozen(kw_only=True)
class DynamicSamplingConfig:
    """What happens to groups whose samples all have the same reward (DAPO, Yu et al. 2025, arXiv 2503.14476, section
    3.2)."""

    type: Literal["filter", "replace"] | None = None
    """`filter`: sample on until the batch is full of useful groups; `replace`: repeat useful groups in their place;
    None: off."""
    max_sample_batches: int = 30
    """Filter: batches that may be sampled for one training batch before the run stops."""
    min_replace_ratio: float = 0.3
    """Replace: the least part of useful groups a batch needs to be repaired; below it, the batch is sampled anew."""


@attrs.frozen(kw_only=True)
class AlgorithmConfig:
    """What is learned from a batch."""

    advantage_estimator: str = "grpo"
    """An installed estimator (`rl plugins`) or `package.module:function`."""
    advantage_params: Mapping[str, Any] = attrs.field(factory=dict)
    """The estimator's keyword parameters; one that is missing here is the key `trainer.algorithm.<parameter>`, else its
    default."""
    grpo_norm_by_std: bool | None = None
    """GRPO divides by the group's standard deviation; false is Dr. GRPO (Liu et al. 2025, arXiv 2503.20783). None: the
    estimator's default, true."""
    gamma: float | None = None
    """Discount per token or turn, of estimators that discount. None: the estimator's default, 1."""
    lambd: float | None = None
    """λ of generalised advantage estimation, of estimators that use it. None: the estimator's default, 1."""
    value_clip: float = 0.2
    """The critic's prediction counts as moved by at most this in one update, in units of value."""
    advantage_batch_normalize: bool = False
    """Whiten the advantages over the trained tokens of the batch."""
    policy_loss_type: str = "regular"
    """An installed policy loss (`rl plugins`) or `package.module:function`."""
    policy_loss_params: Mapping[str, Any] = attrs.field(factory=dict)
    """The loss's keyword parameters; one that is missing here is the key `trainer.algorithm.<parameter>`, else its
    default."""
    eps_clip_low: float | None = None
    """The probability ratio is clipped below 1 − this. None: the loss's default: 0.0003 of `gspo` and `gspo_token`, 0.2
    of others."""
    eps_clip_high: float | None = None
    """The probability ratio is clipped above 1 + this. None: the loss's default: 0.0004 of `gspo` and `gspo_token`, 0.2
    of others."""
    clip_ratio_c: float | None = None
    """Dual clip: bound of the ratio for negative advantages, above 1. None: the loss's default, 3."""
    loss_reduction: Reduction = "token_mean"
    """How tokens are weighted, always over the whole mini-batch: each token alike, each sequence, each prompt, each
    prompt's sum, or each sequence's sum over `max_seq_len`."""
    max_seq_len: int | None = None
    """The constant of `seq_mean_token_sum_norm`, which needs it; nothing else reads it."""
    use_kl_loss: bool = False
    """Add the KL to the reference to the loss. Off, unlike elsewhere: it costs a second model and most recipes of today
    leave it out."""
    kl_loss_coef: float = 0.001
    """Weight of the KL, in the loss or in the reward."""
    kl_estimator_type: Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+", "k3_unbiased"] = "k3"
    """Estimator of the KL (Schulman 2020, "Approximating KL divergence"); the suffix `+` takes the gradient-correct
    straight-through form, `k3_unbiased` weighs k3 by the ratio to the policy that sampled. Both in the loss only."""
    off_policy_sequence_mask: float | None = None
    """Sequences of negative advantage that the policy has left by more than so many nats per token since they were
    sampled have no policy loss (DeepSeek-V3.2, arXiv 2512.02556); 0.5 is a first try. None: off."""
    use_kl_in_reward: bool = False
    """Subtract the KL from the token rewards instead. `pass_at_k` and `maxrl` read success from the environment's
    reward, and the KL as a reward of its own."""
    kl_ctrl: KLControlConfig = attrs.field(factory=KLControlConfig)
    """The coefficient of the KL in the reward over time."""
    use_entropy_loss: bool = False
    """Add an entropy bonus."""
    entropy_loss_coef: float = 0.01
    """Weight of the entropy bonus."""
    temperature: float | None = None
    """Logits are divided by it when the policy is scored; None: `generator.sampling_params.temperature`."""
    zero_variance_filter: bool = False
    """Leave out groups whose samples all have the same reward, without sampling others for them."""
    off_policy_correction: OffPolicyCorrectionConfig = attrs.field(factory=OffPolicyCorrectionConfig)
    """Corrections for the distance between trainer and engine."""
    dynamic_sampling: DynamicSamplingConfig = attrs.field(factory=DynamicSamplingConfig)
    """What happens to groups without a signal."""


@attrs.frozen(kw_only=True)
class TrainerConfig:
    """Training: models, batches, schedule, and what a run leaves."""

    strategy: str = "fsdp"
    """The training backend (`rl plugins`) or `package.module:object`; `fsdp2` is another name of `fsdp`."""
    policy: PolicyConfig = attrs.field(factory=PolicyConfig)
    """The model that is trained."""
    ref: RefConfig = attrs.field(factory=RefConfig)
    """The reference model."""
    critic: CriticConfig = attrs.field(factory=CriticConfig)
    """The critic of estimators that need one."""
    placement: PlacementConfig = attrs.field(factory=PlacementConfig)
    """Where the ranks run."""
    algorithm: AlgorithmConfig = attrs.field(factory=AlgorithmConfig)
    """What is learned from a batch."""

    epochs: int = 1
    """Passes over the training data."""
    max_training_steps: int | None = None
    """Steps (training batches) after which the run ends; None: as many as the epochs give."""
    train_batch_size: int = 1024
    """Prompts of a training batch, each sampled `generator.n_samples_per_prompt` times."""
    policy_mini_batch_size: int = 256
    """Prompts of one optimizer step; divides the batch."""
    critic_mini_batch_size: int = 256
    """Prompts of one optimizer step of the critic; divides the batch."""
    update_epochs_per_batch: int = 1
    """Passes over a training batch."""
    micro_train_batch_size_per_gpu: int = 1
    """Sequences of a micro-batch in training; changes memory and speed, never the result."""
    micro_forward_batch_size_per_gpu: int = 1
    """Sequences of a micro-batch when scoring without gradient."""
    max_tokens_per_microbatch: int = -1
    """Tokens of a micro-batch; above 0 it replaces both counts."""
    use_sample_packing: bool = True
    """A micro-batch is one packed stream; else a padded rectangle. Also written `remove_microbatch_padding`."""
    share_prefixes: bool | Literal["auto"] = "auto"
    """What the sequences of a packed micro-batch begin with alike (a group's prompt, an episode's earlier turns) is
    computed once, and limits count what is computed; the result stays. `auto`: where the backend can and
    `use_sample_packing` is on."""
    gradient_checkpointing: bool | Literal["selective"] = True
    """Recompute activations in backward: less memory, about a third more computation. `selective` keeps the results of
    matrix products and attention, so little is computed twice, and needs memory in between."""
    bf16: bool = True
    """Compute in bfloat16 (trained parameters stay float32); else float32."""
    logprobs_chunk_size: int = 1024
    """Tokens whose float32 logits exist at a time."""
    seed: int = 42
    """All randomness of the run follows from it, the step, the prompt and the sample."""
    num_threads: int | None = None
    """CPU threads of a rank; None: OMP_NUM_THREADS, else its machine's cores over the ranks there."""
    max_staleness: int = 0
    """Weight versions a group may lag behind when it is trained on: 0 synchronous, 1 one step off, more:
    asynchronous."""
    pipeline_depth: int | None = None
    """Steps that generation runs ahead of training, at most `max_staleness`: a group is started only where the batch of
    this step and those of so many more have room for it. Groups that take long may lag behind further, up to
    `max_staleness`."""
    stream_groups: bool = False
    """Groups are trained on as they finish, while the step's others are still being sampled; the result is the same up
    to rounding. For engines on devices of their own (`placement.colocate_all=false`), one optimizer step per batch,
    and a loss and advantages that need nothing of the other groups; whatever else is refused."""
    max_consecutive_nonfinite_steps: int = 3
    """So many skipped optimizer steps (loss or gradient not finite) in a row stop the run."""

    max_prompt_length: int = 512
    """Tokens of a prompt; `data.on_long_prompt` says what happens to longer ones."""
    eval_batch_size: int = 1024
    """Held-out prompts that are in flight together."""
    eval_before_train: bool = True
    """Evaluate the starting model too."""
    eval_interval: int = 5
    """Steps between evaluations, the last step always among them; below 1: none."""

    ckpt_interval: int = 10
    """Steps between checkpoints, the last step always among them; below 1: none."""
    max_ckpts_to_keep: int = -1
    """Older checkpoints are removed; -1 keeps all. One that finds no room on its disk is left out, and made as soon as
    there is some."""
    async_save: bool = False
    """Write checkpoints while training goes on, for a copy of the state in CPU memory. A checkpoint counts once all
    ranks have written theirs."""
    hf_save_interval: int = -1
    """Steps between saves of the model in Hugging Face format; below 1: only the final model."""
    resume_mode: Literal["none", "latest", "from_path"] = "latest"
    """`latest` goes on from the newest complete checkpoint of the run directory, if there is one; `from_path` from
    `resume_path`. Other training rows, another seed or another order of them are refused there, other changed keys
    named. What the directory holds of later steps is kept in its `replaced_N`; a run that begins anew moves the one
    that is there to `<run_dir>.N`, and nothing that no run wrote."""
    resume_path: str | None = None
    """A checkpoint's directory, for `resume_mode=from_path`."""
    project_name: str = "rl"
    """The project under which trackers file the run."""
    run_name: str = "run"
    """The run's name: not empty, no dot at its beginning, no slash."""
    run_dir: str | None = None
    """Where everything a run leaves goes; None: `runs/<run_name>`. No two runs at a time may write into it, or into
    `ckpt_path` or `export_path`."""
    ckpt_path: str | None = None
    """Checkpoints; None: `<run_dir>/checkpoints`. At an address (`s3://…`, through fsspec) copies of those in
    `<run_dir>/checkpoints`, from which a run on another machine goes on."""
    export_path: str | None = None
    """The model in Hugging Face format; None: `<run_dir>/model`."""

    logger: tuple[str, ...] = ("console",)
    """Installed trackers (`rl plugins`) or `package.module:function`, one name or a list; `metrics.jsonl` is always
    written."""
    tags: tuple[str, ...] = ()
    """Labels that trackers file with the run."""
    callbacks: tuple[str, ...] = ()
    """Installed callbacks (`rl plugins`) or `package.module:Class`, called in this order."""
    num_logged_samples: int = 8
    """Samples of a step that are written to `samples.jsonl`; failed ones come on top."""
    max_failure_rate: float = 0.5
    """A run in which a larger fraction of a step's samples fails, or of an evaluation's, stops, with a checkpoint;
    1: it goes on as long as steps have groups."""
    log_sample_logprobs: bool = False
    """Write their per-token log-probs of engine and trainer too."""
    entropy_interval: int = 10
    """`policy/entropy` is computed in step 1 and in every so many steps; 0: never. A loss that reads entropies computes
    them in every step."""
    generation_timeout_s: float = 1800.0
    """Longest wait for a training batch (with `stream_groups`, for the next part of one) or an evaluation to be
    generated."""
    worker_timeout_s: float = 3600.0
    """Longest wait for one call to the training ranks."""
    worker_start_timeout_s: float = 1800.0
    """Longest wait for the ranks of a model to start and to load it."""
    worker_silence_s: float = 300.0
    """Ranks in processes of their own that neither answer nor work (CPU, files, network) for so long are dead, however
    much of `worker_timeout_s` is left; a long computation is not."""


# --- generator ------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class SamplingConfig:
    """How responses are drawn."""

    max_generate_length: int = 1024
    """Tokens of a response, of each turn's."""
    temperature: float = 1.0
    """0 takes the most likely token, which suits evaluation only."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this probability; 1: all."""
    top_k: int = -1
    """Sample from the k most likely tokens; -1: all."""
    min_p: float = 0.0
    """Leave out tokens below this part of the most likely token's probability; 0: none."""
    stop: tuple[str, ...] = ()
    """A response ends when its text contains one of these."""

    @property
    def is_truncated(self) -> bool:
        """Tokens are drawn from a truncated distribution."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    def to_params(self) -> SamplingParams:
        """As an engine takes it."""
        return SamplingParams(
            max_tokens=self.max_generate_length,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=self.stop,
        )


@attrs.frozen(kw_only=True)
class EvalSamplingConfig:
    """How responses are drawn in evaluation: greedily, unless it says otherwise."""

    max_generate_length: int | None = None
    """Tokens of a response; None: `generator.sampling_params.max_generate_length`."""
    temperature: float = 0.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """As in training; needs a temperature above 0."""
    top_k: int = -1
    """As in training; needs a temperature above 0."""
    min_p: float = 0.0
    """As in training; needs a temperature above 0."""
    stop: tuple[str, ...] | None = None
    """A response ends when its text contains one of these; None: `generator.sampling_params.stop`."""

    def to_params(self) -> SamplingParams:
        """As an engine takes it. Raises ConfigError if not resolved."""
        return SamplingParams(
            max_tokens=resolved("generator.eval_sampling_params.max_generate_length", self.max_generate_length),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=resolved("generator.eval_sampling_params.stop", self.stop),
        )


@attrs.frozen(kw_only=True)
class WeightVerificationConfig:
    """Whether the engines compute with the trainer's weights, asked of log-probs on both sides."""

    prove_at_start: bool = True
    """Before the first step every trained parameter gets noise, as much as is seen in the log-probs, is synced and
    compared, then restored, synced and compared: a tensor that does not reach an engine stops the run."""
    interval: int = 10
    """Compare at every so many steps, and after a process's first sync; 0: never."""
    num_tokens: int = 256
    """Fixed random tokens that are scored."""
    limit: float | None = None
    """Largest mean |difference| of log-probs, in nats; a larger one stops the run. None: 0.001, 0.02 or 0.06, by the
    coarser dtype of trainer and engine (float32, float16, bfloat16), and more in proportion where the tokens' mean
    log-prob is below -5."""


@attrs.frozen(kw_only=True)
class InferenceEngineConfig:
    """The engine that samples, and how it gets the weights."""

    backend: str = "local"
    """The inference engine (`rl plugins`) or `package.module:object`."""
    num_engines: int = 1
    """How many of them; the `local` engine is always one."""
    max_num_seqs: int = 1024
    """Sequences that an engine decodes together."""
    weight_sync_backend: str | None = None
    """The weight transport (`rl plugins`) or `package.module:object`. None: `shared_memory` where the policy and its
    engines are on one Linux machine, else `files`."""
    enable_return_routed_experts: bool = False
    """The engine returns the experts that it sent each token to; for the backend's `moe_enable_routing_replay`, and
    only together with it."""
    weight_sync_delta: bool = False
    """Send what changed since the version that the engines hold, where that is less than half of a tensor; ranks and
    engines keep the weights in host memory for it. For bfloat16 weights that travel far (docs/weight_sync.md)."""
    weight_sync_whole_interval: int = 20
    """With `weight_sync_delta`, whole weights at every so many syncs; also at first and after every failure."""
    weight_bucket_bytes: int = 268435456
    """Weights travel in buckets of at most so many bytes."""
    weight_sync_pause_mode: Literal["keep", "abort", "wait"] = "keep"
    """What becomes of requests under way while weights change: frozen and continued under the new ones (`keep`),
    returned as they are and continued later (`abort`), or finished first (`wait`)."""
    weight_verification: WeightVerificationConfig = attrs.field(factory=WeightVerificationConfig)
    """Whether the weights that engines compute with are the trainer's."""
    model_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """The engine's dtype; None: as `trainer.bf16` says, `bfloat16` or `float32`."""
    engine_init_kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    """Passed on to the engine, which says which it knows."""
    plugin_options: Mapping[str, Any] = attrs.field(factory=dict)
    """Written beside the keys above: keys of engines' own, by the name in `backend`; those of engines that are not
    chosen only where somebody gave them."""

    @property
    def options(self) -> Any:
        """The options object of the chosen engine; None if it has no keys of its own, or before
        `rl_core.config.resolve`."""
        return self.plugin_options.get(self.backend)


@attrs.frozen(kw_only=True)
class GeneratorConfig:
    """From prompts to trajectories."""

    type: str = "environment"
    """The generator (`rl plugins`) or `package.module:object`."""
    n_samples_per_prompt: int = 5
    """Samples of a training prompt: its group."""
    max_turns: int = 1
    """Responses of an episode; an environment that wants more of them is ended after so many."""
    max_input_length: int | None = None
    """Tokens of a later turn's prompt, everything said before included; an episode that has grown longer ends there.
    None: `trainer.max_prompt_length`."""
    step_wise_trajectories: bool = False
    """Each turn is a sequence of its own, so that a chat template may change earlier turns (drop their thinking); else
    an episode is one sequence."""
    merge_stepwise_output: bool = True
    """Turns whose prompt begins with all of the turn before are one sequence again: the same gradient per token, each
    token computed once."""
    sampling_params: SamplingConfig = attrs.field(factory=SamplingConfig)
    """Sampling in training."""
    eval_sampling_params: EvalSamplingConfig = attrs.field(factory=EvalSamplingConfig)
    """Sampling in evaluation."""
    eval_n_samples_per_prompt: int = 1
    """Samples of a held-out prompt."""
    apply_overlong_filtering: bool = False
    """A response cut off by its length is not trained on; it still counts in its group's baseline."""
    inference_engine: InferenceEngineConfig = attrs.field(factory=InferenceEngineConfig)
    """The engine that samples."""
    plugin_options: Mapping[str, Any] = attrs.field(factory=dict)
    """Written beside the keys above: keys of generators' own, by the name in `type`; those of generators that are not
    chosen only where somebody gave them."""

    @property
    def options(self) -> Any:
        """The options object of the chosen generator; None if it has no keys of its own, or before
        `rl_core.config.resolve`."""
        return self.plugin_options.get(self.type)


# --- data, environment ----------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class DataConfig:
    """Prompts on disk."""

    train_data: tuple[str, ...] = ()
    """Parquet, JSON-lines, JSON or CSV files, here or where fsspec reaches (`s3://…`), and Hugging Face data sets, by
    directory or as `org/name[:configuration][@split]`. A column `prompt`, else `messages`; a column `reward_model` is
    read as `reward_spec` where that is missing."""
    val_data: tuple[str, ...] = ()
    """Held-out prompts of the same kind; none: no evaluation."""
    prompt_key: str = "prompt"
    """The column that holds the prompt."""
    shuffle: bool = True
    """Another order of the training prompts in every epoch, fixed by the seed."""
    on_long_prompt: Literal["error", "drop"] = "error"
    """A prompt longer than `trainer.max_prompt_length` stops the run before it starts, or is left out and counted."""


@attrs.frozen(kw_only=True)
class EnvironmentConfig:
    """What judges the responses."""

    env_class: str | None = None
    """An installed environment (`rl plugins`) or `package.module:Class` for all rows; None: each row's own `env_class`.
    Where a recipe says one and rows name others, write which is meant."""
    options: Mapping[str, Any] = attrs.field(factory=dict)
    """Passed to every environment."""
    reward_functions: tuple[str, ...] = ()
    """Functions `package.module:function` that judge the responses in place of an environment (docs/coming_from.md)."""
    reward_weights: tuple[float, ...] = ()
    """What the rewards of `reward_functions` are multiplied by before they are summed; none: 1 each."""
    timeout_s: float = 300.0
    """Longest wait for one answer of an environment; a later one fails its sample."""
    placement: PlacementKind | None = None
    """Where environments run: each in a `thread`, or a `process`, of its own; or `in_process`, on one event loop, which
    is for code that only awaits. None: as the environment says, else `thread`."""
    num_workers: int | None = None
    """Episodes that have an environment at a time; None: in threads all that run (`generator.max_concurrency`), in
    processes four per CPU core."""


# --- the whole ------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Config:
    """A whole run. The properties are those of a resolved configuration."""

    trainer: TrainerConfig = attrs.field(factory=TrainerConfig)
    """Training: models, batches, schedule, and what a run leaves."""
    generator: GeneratorConfig = attrs.field(factory=GeneratorConfig)
    """From prompts to trajectories."""
    data: DataConfig = attrs.field(factory=DataConfig)
    """Prompts on disk."""
    environment: EnvironmentConfig = attrs.field(factory=EnvironmentConfig)
    """What judges the responses."""

    @property
    def run_dir(self) -> Path:
        """Where everything a run leaves goes."""
        return Path(resolved("trainer.run_dir", self.trainer.run_dir))

    @property
    def ckpt_dir(self) -> Path:
        """Where checkpoints are written: `trainer.ckpt_path`, or in the run's directory where that is elsewhere."""
        path = resolved("trainer.ckpt_path", self.trainer.ckpt_path)
        return self.run_dir / "checkpoints" if is_remote(path) else Path(path)

    @property
    def export_dir(self) -> Path:
        """Where the model goes, in Hugging Face format."""
        return Path(resolved("trainer.export_path", self.trainer.export_path))

    @property
    def policy_model_path(self) -> str:
        """Directory or name of the model that is trained."""
        return resolved("trainer.policy.model.path", self.trainer.policy.model.path)

    @property
    def temperature(self) -> float:
        """Logits are divided by it when the policy is scored."""
        return resolved("trainer.algorithm.temperature", self.trainer.algorithm.temperature)

    @property
    def pipeline_depth(self) -> int:
        """Steps that generation runs ahead of training; 0: they take turns."""
        return resolved("trainer.pipeline_depth", self.trainer.pipeline_depth)

    @property
    def weight_transport(self) -> str:
        """By which weights get to the engines: a name of `rl plugins` or `package.module:object`."""
        engine = self.generator.inference_engine
        return resolved("generator.inference_engine.weight_sync_backend", engine.weight_sync_backend)

    @property
    def engine_dtype(self) -> Literal["bfloat16", "float16", "float32"]:
        """The engine's dtype: `bfloat16`, `float16` or `float32`."""
        return resolved("generator.inference_engine.model_dtype", self.generator.inference_engine.model_dtype)
