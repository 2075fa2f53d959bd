"""GRPO on GSM8K with Qwen3-235B-A22B on sixteen machines of eight 80 GB GPUs: Megatron, colocated.

The 128 GPUs are split into pipeline 8 × tensor 4 × data 4 outside of the experts, and pipeline 8 × expert 16 for the
experts. Of the 94 layers, the first and the last stage have 11 each, besides embedding and output layer; the other
stages have 12. During the weight sync, a GPU holds an eighth of an engine's weights in addition to its rank's weights
and gradients: see `rl plan`.
Deliberately omitted: running on eight machines (63 GiB of weights, gradients and moments per GPU, besides an engine),
and an optimizer in host memory, which the Megatron backend here does not support.
Data:   python -m rl_examples.gsm8k_data --train train.jsonl --test test.jsonl --output ~/data/gsm8k
Run:    rl train qwen3_235b_a22b
Plan:   rl plan qwen3_235b_a22b --gpu-memory 80
Tiny:   rl train qwen3_235b_a22b --tiny        (a small random copy of the model: tests the code path, learns nothing)
"""

from __future__ import annotations

from rl_core.interfaces import Recipe
from rl_examples import gsm8k
from rl_examples.gsm8k_data import HOW_TO_MAKE
from rl_examples.tiny_copies import MADE, TINY, tiny_copy

_MODEL = "Qwen/Qwen3-235B-A22B"

recipe = Recipe(
    summary="GRPO on GSM8K with Qwen3-235B-A22B on 16 × 8 GPUs, Megatron",
    config={
        **gsm8k.recipe.config,
        "trainer.run_name": "qwen3_235b_a22b",
        "trainer.policy.model.path": _MODEL,
        "trainer.strategy": "megatron",
        "trainer.placement.policy_num_nodes": 16,
        "trainer.placement.policy_num_gpus_per_node": 8,
        "trainer.policy.megatron_config.tensor_model_parallel_size": 4,
        "trainer.policy.megatron_config.pipeline_model_parallel_size": 8,
        "trainer.policy.megatron_config.num_layers_in_first_pipeline_stage": 11,
        "trainer.policy.megatron_config.num_layers_in_last_pipeline_stage": 11,
        "trainer.policy.megatron_config.expert_model_parallel_size": 16,
        "trainer.policy.megatron_config.expert_tensor_parallel_size": 1,
        "trainer.max_tokens_per_microbatch": 16384,
        # One engine per machine: 55 GiB of weights per GPU, the rest for the KV cache.
        "generator.inference_engine.backend": "vllm",
        "generator.inference_engine.num_engines": 16,
        "generator.inference_engine.tensor_parallel_size": 8,
        "generator.inference_engine.gpu_memory_utilization": 0.9,
        "generator.inference_engine.weight_sync_backend": "broadcast",
    },
    tiny={
        **TINY,
        "trainer.run_name": "qwen3_235b_a22b_tiny",
        "trainer.policy.model.path": tiny_copy(_MODEL),
        # Two ranks instead of 128: pipeline 2, with one of three layers on the last stage.
        "trainer.placement.policy_num_gpus_per_node": 2,
        "trainer.policy.megatron_config.tensor_model_parallel_size": 1,
        "trainer.policy.megatron_config.pipeline_model_parallel_size": 2,
        "trainer.policy.megatron_config.num_layers_in_first_pipeline_stage": None,
        "trainer.policy.megatron_config.num_layers_in_last_pipeline_stage": 1,
        "trainer.policy.megatron_config.expert_model_parallel_size": 1,
    },
    prepare="rl_examples.tiny_copies:prepare",
    needs=HOW_TO_MAKE,
    makes=(*MADE, tiny_copy(_MODEL)),
)
