"""Commands and keys as other trainers' documentation writes them; tests load them as `rl train --dry-run` does.

`BASE` and `SCRIPT` are whole commands; a test appends each of `FRAGMENTS` to one of them. `SCRIPTS` are launch scripts
of SkyRL, each with the recipe that replaces it here. The test replaces `$DATA` and `$MODEL` with the paths of its data
and its model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from rl_examples.importing.translation import SKYRL_DEFAULTS, Translation

BASE = (
    'trainer.algorithm.advantage_estimator="grpo"',
    "data.train_data=\"['$DATA/train.parquet']\"",
    "data.val_data=\"['$DATA/validation.parquet']\"",
    'trainer.policy.model.path="$MODEL"',
)
"""The shortest command; the recipe sets all other keys."""

SCRIPT = (
    *BASE,
    "trainer.placement.colocate_all=true",
    "trainer.strategy=fsdp2",
    "trainer.placement.policy_num_gpus_per_node=4",
    "trainer.placement.critic_num_gpus_per_node=4",
    "trainer.placement.ref_num_gpus_per_node=4",
    "generator.num_inference_engines=4",
    "generator.inference_engine_tensor_parallel_size=1",
    "trainer.epochs=20",
    "trainer.eval_batch_size=1024",
    "trainer.eval_before_train=true",
    "trainer.eval_interval=5",
    "trainer.update_epochs_per_batch=1",
    "trainer.train_batch_size=1024",
    "trainer.policy_mini_batch_size=256",
    "trainer.micro_forward_batch_size_per_gpu=64",
    "trainer.micro_train_batch_size_per_gpu=64",
    "trainer.ckpt_interval=10",
    "trainer.max_prompt_length=512",
    "generator.sampling_params.max_generate_length=1024",
    "trainer.policy.optimizer_config.lr=1.0e-6",
    "trainer.algorithm.use_kl_loss=true",
    "generator.backend=vllm",
    "generator.run_engines_locally=true",
    "generator.weight_sync_backend=nccl",
    "generator.async_engine=true",
    "generator.batched=true",
    "environment.env_class=gsm8k",
    "generator.n_samples_per_prompt=5",
    "generator.gpu_memory_utilization=0.8",
    'trainer.logger="console"',
    'trainer.project_name="gsm8k"',
    'trainer.run_name="gsm8k_test"',
    "trainer.resume_mode=null",
    'trainer.ckpt_path="$DATA/ckpts"',
)
"""A whole launch script: the keys of BASE and the other keys that such scripts set."""


@attrs.frozen(kw_only=True)
class Fragment:
    """Keys that a test appends to a command."""

    name: str
    keys: tuple[str, ...]
    base: tuple[str, ...] = BASE
    model: str = "dense"
    """Which of the test's models `$MODEL` stands for."""
    says: tuple[str, ...] = ()
    """Parts of the warnings that the command must give."""
    refused: str | None = None
    """A part of the error that refuses the command; None: the command loads."""


FRAGMENTS = (
    Fragment(name="the shortest command", keys=()),
    Fragment(
        name="the whole script",
        keys=(),
        base=SCRIPT,
        says=(
            "generator.num_inference_engines: is called generator.inference_engine.num_engines here",
            "generator.weight_sync_backend: is called",
            "generator.batched: has no effect and can be removed: each prompt is a separate request",
            "generator.async_engine: has no effect",
        ),
    ),
    Fragment(name="fsdp", keys=("trainer.strategy=fsdp",), base=SCRIPT),
    Fragment(name="fsdp2", keys=("trainer.strategy=fsdp2",)),
    Fragment(
        name="fsdp, first version",
        keys=("trainer.strategy=fsdp1", "trainer.placement.policy_num_gpus_per_node=1"),
    ),
    Fragment(
        name="the reference's parameters in CPU memory",
        keys=("trainer.ref.fsdp_config.cpu_offload=true", "trainer.algorithm.use_kl_loss=true"),
    ),
    Fragment(
        name="the policy's parameters in CPU memory, first version",
        keys=(
            "trainer.strategy=fsdp1",
            "trainer.policy.fsdp_config.cpu_offload=true",
            "trainer.placement.policy_num_gpus_per_node=2",
        ),
        refused=r"trainer\.policy\.fsdp_config\.cpu_offload",
    ),
    Fragment(
        name="without packing",
        keys=(
            "trainer.use_sample_packing=false",
            "trainer.micro_train_batch_size_per_gpu=8",
            "trainer.micro_forward_batch_size_per_gpu=32",
        ),
    ),
    Fragment(
        name="memory",
        keys=(
            "trainer.policy.fsdp_config.cpu_offload=false",
            "trainer.ref.fsdp_config.cpu_offload=true",
            "trainer.policy.gradient_checkpointing=true",
        ),
        says=("trainer.policy.gradient_checkpointing: is called trainer.gradient_checkpointing here",),
    ),
    Fragment(
        name="without flash attention",
        keys=("trainer.flash_attn=false",),
        says=("trainer.flash_attn: has no effect and can be removed: the backend selects an attention kernel",),
    ),
    Fragment(name="deepspeed", keys=("trainer.strategy=deepspeed",), base=SCRIPT),
    Fragment(
        name="deepspeed, offloaded",
        keys=(
            "trainer.strategy=deepspeed",
            "deepspeed_config.train.zero_optimization.offload_param.device=cpu",
            "deepspeed_config.train.zero_optimization.offload_optimizer.device=cpu",
            "deepspeed_config.train.zero_optimization.sub_group_size=1e8",
            "deepspeed_config.train.zero_optimization.reduce_bucket_size=1e8",
        ),
    ),
    Fragment(
        name="deepspeed, the reference's parameters in CPU memory",
        keys=(
            "trainer.strategy=deepspeed",
            "trainer.algorithm.use_kl_loss=true",
            "deepspeed_config.train.zero_optimization.stage=3",
            "deepspeed_config.eval.zero_optimization.stage=3",
            "deepspeed_config.eval.zero_optimization.offload_param.device=cpu",
        ),
    ),
    Fragment(
        name="megatron, data ranks only",
        keys=("trainer.strategy=megatron", "trainer.placement.policy_num_gpus_per_node=8"),
    ),
    Fragment(
        name="megatron, every key of its section",
        keys=(
            "trainer.strategy=megatron",
            "trainer.placement.policy_num_gpus_per_node=8",
            "trainer.policy.megatron_config.tensor_model_parallel_size=1",
            "trainer.policy.megatron_config.pipeline_model_parallel_size=1",
            "trainer.policy.megatron_config.context_parallel_size=1",
            "trainer.policy.megatron_config.expert_model_parallel_size=1",
            "trainer.policy.megatron_config.expert_tensor_parallel_size=null",
            "trainer.policy.megatron_config.ddp_config.grad_reduce_in_fp32=true",
            "trainer.policy.megatron_config.ddp_config.overlap_grad_reduce=false",
            "trainer.policy.megatron_config.ddp_config.overlap_param_gather=false",
            "trainer.policy.megatron_config.ddp_config.average_in_collective=true",
            "trainer.policy.megatron_config.optimizer_config_kwargs={}",
            "trainer.policy.megatron_config.transformer_config_kwargs={}",
            "trainer.policy.megatron_config.lora_config.lora_type=lora",
            "trainer.policy.megatron_config.empty_cuda_cache=true",
        ),
        says=("ddp_config.average_in_collective: has no effect and can be removed: tokens are weighted",),
    ),
    Fragment(
        name="megatron, gradients summed during the backward pass",
        keys=("trainer.strategy=megatron", "trainer.policy.megatron_config.ddp_config.overlap_grad_reduce=true"),
        refused=r"ddp_config\.overlap_grad_reduce: got true; gradients accumulate over calls",
    ),
    Fragment(
        name="megatron, parameters gathered during the forward pass",
        keys=("trainer.strategy=megatron", "trainer.policy.megatron_config.ddp_config.overlap_param_gather=true"),
        refused=r"ddp_config\.overlap_param_gather: got true; weights must be whole",
    ),
    Fragment(
        name="megatron, experts over four nodes",
        keys=(
            "trainer.strategy=megatron",
            "trainer.placement.policy_num_nodes=4",
            "trainer.placement.policy_num_gpus_per_node=8",
            "trainer.policy.megatron_config.tensor_model_parallel_size=2",
            "trainer.policy.megatron_config.context_parallel_size=4",
            "trainer.policy.megatron_config.expert_model_parallel_size=8",
            "trainer.policy.megatron_config.expert_tensor_parallel_size=1",
            "generator.inference_engine.weight_sync_backend=nccl",
        ),
        model="experts",
    ),
    Fragment(
        name="megatron, unequal stages, context ranks and replayed routes, asynchronous",
        keys=(
            "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
            "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high=2.0",
            "trainer.placement.colocate_all=false",
            "trainer.strategy=fsdp2",
            "trainer.fully_async.enabled=true",
            "trainer.fully_async.max_staleness_steps=4",
            "generator.inference_engine.enable_return_routed_experts=true",
            "generator.inference_engine.backend=vllm",
            "trainer.placement.policy_num_gpus_per_node=8",
            "trainer.policy.megatron_config.pipeline_model_parallel_size=2",
            "trainer.policy.megatron_config.context_parallel_size=2",
            "trainer.policy.megatron_config.expert_model_parallel_size=4",
            "trainer.policy.megatron_config.expert_tensor_parallel_size=1",
            "trainer.policy.megatron_config.transformer_config_kwargs.moe_enable_routing_replay=true",
            "trainer.policy.megatron_config.transformer_config_kwargs.num_layers_in_first_pipeline_stage=13",
            "trainer.strategy=megatron",
        ),
        model="latent experts",
        says=(
            "trainer.strategy: set twice (command line): 'fsdp', then 'megatron'; the last one is used",
            "trainer.fully_async.max_staleness_steps: is called trainer.max_staleness here",
        ),
    ),
    Fragment(
        name="several turns, a sequence each",
        keys=(
            "generator.step_wise_trajectories=true",
            "generator.use_conversation_multi_turn=true",
            "generator.max_turns=5",
        ),
        says=("generator.use_conversation_multi_turn: has no effect",),
    ),
    Fragment(
        name="eight engines",
        keys=(
            "generator.inference_engine.backend=vllm",
            "generator.inference_engine.num_engines=8",
            "generator.inference_engine.tensor_parallel_size=1",
            "generator.use_conversation_multi_turn=true",
        ),
    ),
    Fragment(
        name="adapters",
        keys=(
            "trainer.policy.model.lora.rank=32",
            "trainer.policy.model.lora.alpha=32",
            "trainer.policy.model.lora.lora_sync_path=$DATA/lora",
        ),
        says=("lora_sync_path: has no effect and can be removed: adapters need no folder",),
    ),
    Fragment(name="a KL term", keys=("trainer.algorithm.use_kl_loss=True",)),
)


@attrs.frozen(kw_only=True)
class Script:
    """A launch script of SkyRL and the recipe that replaces it. docs/coming_from.md has a table row for each script."""

    name: str
    """The script's path in SkyRL, or what it trains."""
    recipe: str
    keys: tuple[str, ...] = ()
    """What follows the recipe's name on the command line."""
    appended: tuple[str, ...] = ()
    """Keys that users of the script append to it."""
    says: tuple[str, ...] = ()
    """Parts of the warnings that the command must give."""
    rows: str = "train.parquet"
    """The file of rows that the command reads."""
    plan: str = ""
    """A part of the policy's line in the printed plan."""

    @property
    def command(self) -> str:
        """The command as docs/coming_from.md prints it."""
        return " ".join(("rl train", self.recipe, *self.keys)).replace("$DATA/", "").replace("$MODEL", "MODEL")


_SEARCH = (
    "environment.env_class=search",
    "environment.options.corpus=$DATA/documents.jsonl",
    'generator.sampling_params.stop=["</search>","</answer>"]',
    "generator.max_turns=5",
)
_EIGHT_ENGINES = ("generator.inference_engine.num_engines=8", "generator.inference_engine.tensor_parallel_size=1")
_TURNS_ARE_MESSAGES = "generator.use_conversation_multi_turn: has no effect"

SCRIPTS = (
    Script(
        name="gsm8k/run_gsm8k.sh",
        recipe="qwen2_5_1_5b",
        appended=("trainer.ref.fsdp_config.cpu_offload=true",),
        plan="Qwen/Qwen2.5-1.5B-Instruct (fsdp, bfloat16), data 8",
    ),
    Script(name="training_backends/fsdp/run_fsdp.sh", recipe="qwen2_5_1_5b", keys=("trainer.strategy=fsdp1",)),
    Script(name="training_backends/fsdp/run_fsdp2.sh", recipe="qwen2_5_1_5b", keys=("trainer.strategy=fsdp",)),
    Script(
        name="training_backends/deepspeed/run_deepspeed.sh",
        recipe="qwen2_5_1_5b",
        keys=("trainer.strategy=deepspeed",),
        appended=(
            "deepspeed_config.train.zero_optimization.offload_param.device=cpu",
            "deepspeed_config.train.zero_optimization.offload_optimizer.device=cpu",
        ),
        plan="(deepspeed, bfloat16), data 8",
    ),
    Script(
        name="training_backends/run_no_seq_pack.sh",
        recipe="qwen2_5_1_5b",
        keys=(
            "trainer.use_sample_packing=false",
            "trainer.micro_train_batch_size_per_gpu=8",
            "trainer.micro_forward_batch_size_per_gpu=32",
        ),
    ),
    Script(
        name="turn_level_rewards/run_gsm8k_multi_turn.sh",
        recipe="qwen2_5_1_5b",
        keys=("environment.env_class=skyrl_gym", "environment.options.env=gsm8k_multi_turn", "generator.max_turns=5"),
        appended=(
            "generator.step_wise_trajectories=true",
            "generator.use_conversation_multi_turn=true",
            "generator.max_turns=5",
        ),
        says=(_TURNS_ARE_MESSAGES,),
    ),
    Script(
        name="search/run_search.sh",
        recipe="qwen2_5_3b",
        keys=_SEARCH,
        appended=(*_EIGHT_ENGINES, "generator.use_conversation_multi_turn=true"),
        says=(_TURNS_ARE_MESSAGES,),
        rows="search.jsonl",
        plan="Qwen/Qwen2.5-3B-Instruct (fsdp, bfloat16), data 8",
    ),
    Script(
        name="`STEP_WISE=true` before search/run_search.sh",
        recipe="qwen2_5_3b",
        keys=(*_SEARCH, "generator.step_wise_trajectories=true"),
        appended=(*_EIGHT_ENGINES, "generator.use_conversation_multi_turn=true"),
        says=(_TURNS_ARE_MESSAGES,),
        rows="search.jsonl",
    ),
    Script(
        name="lora/run_qwen2_5_0.5b_gsm8k_grpo_lora.sh",
        recipe="gsm8k",
        keys=(
            "trainer.policy.model.path=$MODEL",
            "trainer.policy.model.lora.rank=32",
            "trainer.policy.model.lora.alpha=32",
            "trainer.placement.policy_num_gpus_per_node=4",
        ),
        appended=("trainer.policy.model.lora.lora_sync_path=$DATA/lora",),
        says=("lora_sync_path: has no effect and can be removed",),
        plan="data 4",
    ),
    Script(
        name="megatron: Search-R1 with Qwen3-30B-A3B",
        recipe="qwen3_30b_a3b",
        keys=_SEARCH,
        rows="search.jsonl",
        plan="tensor 2 × data 16 × expert 8 × expert_data 4",
    ),
    Script(
        name="megatron: GSM8K with Qwen3-235B-A22B",
        recipe="qwen3_235b_a22b",
        plan="Qwen/Qwen3-235B-A22B (megatron, bfloat16), tensor 4 × pipeline 8 × data 4 × expert 16",
    ),
    Script(
        name="router_replay: Moonlight-16B-A3B",
        recipe="moonlight_16b_a3b",
        appended=(
            "trainer.policy.megatron_config.transformer_config_kwargs.moe_enable_routing_replay=true",
            "trainer.policy.megatron_config.transformer_config_kwargs.num_layers_in_first_pipeline_stage=13",
        ),
        plan="tensor 2 × pipeline 2 × context 2",
    ),
    Script(
        name="megatron: GLM-4.7-Flash with LoRA",
        recipe="glm_4_7_flash",
        keys=(
            "trainer.policy.model.lora.rank=32",
            # Attention layers only: transformers stores the experts of a layer as one tensor.
            "trainer.policy.model.lora.target_modules=[q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj]",
        ),
        plan="zai-org/GLM-4.7-Flash (fsdp, bfloat16), data 16",
    ),
)


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def written(translation: Translation) -> dict[str, Any]:
    """The translated values, without the keys of SKYRL_DEFAULTS."""
    return {key: value for key, value in translation.values.items() if key not in SKYRL_DEFAULTS}
