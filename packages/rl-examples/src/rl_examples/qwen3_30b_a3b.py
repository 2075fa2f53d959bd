"""GRPO on GSM8K with Qwen3-30B-A3B on four machines of eight 80 GB GPUs: Megatron, colocated.

The 32 GPUs are split into tensor 2 × data 16 outside the experts, and expert 8 × expert data 4 for the experts (128
experts, 16 per GPU, each set of 16 on four GPUs). This layout is often written as DP4·TP2·EP8.
Deliberately omitted: pipeline and context parallelism (nothing has to be split further), a KL term, an auxiliary
load-balancing loss.
Data:   python -m rl_examples.gsm8k_data --train train.jsonl --test test.jsonl --output ~/data/gsm8k
Run:    rl train qwen3_30b_a3b
Plan:   rl plan qwen3_30b_a3b --gpu-memory 80
Tiny:   rl train qwen3_30b_a3b --tiny        (a small random copy of the model: tests the code path, learns nothing)
"""

from __future__ import annotations

from rl_core.interfaces import Recipe
from rl_examples import gsm8k
from rl_examples.gsm8k_data import HOW_TO_MAKE
from rl_examples.tiny_copies import MADE, TINY, tiny_copy

_MODEL = "Qwen/Qwen3-30B-A3B"

recipe = Recipe(
    summary="GRPO on GSM8K with Qwen3-30B-A3B on 4 × 8 GPUs, Megatron",
    config={
        **gsm8k.recipe.config,
        "trainer.run_name": "qwen3_30b_a3b",
        "trainer.policy.model.path": _MODEL,
        "trainer.strategy": "megatron",
        "trainer.placement.policy_num_nodes": 4,
        "trainer.placement.policy_num_gpus_per_node": 8,
        "trainer.policy.megatron_config.tensor_model_parallel_size": 2,
        "trainer.policy.megatron_config.expert_model_parallel_size": 8,
        "trainer.policy.megatron_config.expert_tensor_parallel_size": 1,
        "trainer.max_tokens_per_microbatch": 32768,
        "generator.inference_engine.backend": "vllm",
        "generator.inference_engine.num_engines": 8,
        "generator.inference_engine.tensor_parallel_size": 4,
        "generator.inference_engine.weight_sync_backend": "broadcast",
    },
    tiny={
        **TINY,
        "trainer.run_name": "qwen3_30b_a3b_tiny",
        "trainer.policy.model.path": tiny_copy(_MODEL),
        # Two ranks instead of 32: tensor 2 outside the experts, expert 2 inside.
        "trainer.placement.policy_num_gpus_per_node": 2,
        "trainer.policy.megatron_config.expert_model_parallel_size": 2,
    },
    prepare="rl_examples.tiny_copies:prepare",
    needs=HOW_TO_MAKE,
    makes=(*MADE, tiny_copy(_MODEL)),
)
