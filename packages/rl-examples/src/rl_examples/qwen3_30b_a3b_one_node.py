"""GRPO on GSM8K with Qwen3-30B-A3B on one machine of eight 80 GB GPUs, all weights trained: FSDP, colocated.

Weights, gradients and Adam moments need 455 GiB in float32 (57 GiB per GPU), so they are in host memory, and each layer
is copied to the GPUs when it computes. `rl plan` shows the peak of GPU and host memory.
Deliberately omitted: Megatron, which on eight GPUs would shard the experts' states only over EP8 and need at least 65
GiB per GPU, besides activations.
Data:   python -m rl_examples.gsm8k_data --train train.jsonl --test test.jsonl --output ~/data/gsm8k
Run:    rl train qwen3_30b_a3b_one_node
Plan:   rl plan qwen3_30b_a3b_one_node --gpu-memory 80
Tiny:   rl train qwen3_30b_a3b_one_node --tiny   (a small random copy of the model: tests the code path)
"""

from __future__ import annotations

from rl_core.interfaces import Recipe
from rl_examples import gsm8k
from rl_examples.gsm8k_data import HOW_TO_MAKE
from rl_examples.tiny_copies import MADE, TINY, tiny_copy

_MODEL = "Qwen/Qwen3-30B-A3B"

recipe = Recipe(
    summary="GRPO on GSM8K with all of Qwen3-30B-A3B on eight GPUs, FSDP with offloading",
    config={
        **gsm8k.recipe.config,
        "trainer.run_name": "qwen3_30b_a3b_one_node",
        "trainer.policy.model.path": _MODEL,
        "trainer.placement.policy_num_gpus_per_node": 8,
        "trainer.policy.fsdp_config.cpu_offload": True,
        "trainer.max_tokens_per_microbatch": 32768,
        "generator.inference_engine.backend": "vllm",
        "generator.inference_engine.num_engines": 2,
        "generator.inference_engine.tensor_parallel_size": 4,
        "generator.inference_engine.weight_sync_backend": "shared_memory",
    },
    tiny={
        **TINY,
        "trainer.run_name": "qwen3_30b_a3b_one_node_tiny",
        "trainer.policy.model.path": tiny_copy(_MODEL),
    },
    prepare="rl_examples.tiny_copies:prepare",
    needs=HOW_TO_MAKE,
    makes=(*MADE, tiny_copy(_MODEL)),
)
