"""GRPO on GSM8K with adapters on Qwen3-30B-A3B, on one machine of eight 80 GB GPUs: FSDP, colocated.

The frozen weights are in bfloat16 (57 GiB in all, 7 GiB per GPU). The adapters, of rank 32 on every layer's attention,
are in float32, and only they have gradients and moments. Engines get whole weights with the adapters merged.
Deliberately omitted: adapters on experts, because only linear layers can have adapters, and transformers stores the
experts of a layer as stacked tensors.
Data:   python -m rl_examples.gsm8k_data --train train.jsonl --test test.jsonl --output ~/data/gsm8k
Run:    rl train qwen3_30b_a3b_lora
Plan:   rl plan qwen3_30b_a3b_lora --gpu-memory 80
Tiny:   rl train qwen3_30b_a3b_lora --tiny      (a small random copy of the model: tests the code path, learns nothing)
"""

from __future__ import annotations

from rl_core.interfaces import Recipe
from rl_examples import gsm8k
from rl_examples.gsm8k_data import HOW_TO_MAKE
from rl_examples.tiny_copies import MADE, TINY, tiny_copy

_MODEL = "Qwen/Qwen3-30B-A3B"

recipe = Recipe(
    summary="GRPO on GSM8K with LoRA on Qwen3-30B-A3B on eight GPUs, FSDP",
    config={
        **gsm8k.recipe.config,
        "trainer.run_name": "qwen3_30b_a3b_lora",
        "trainer.policy.model.path": _MODEL,
        "trainer.policy.model.lora.rank": 32,
        "trainer.policy.model.lora.alpha": 64,
        "trainer.policy.model.lora.target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "trainer.policy.optimizer_config.lr": 2e-5,
        "trainer.placement.policy_num_gpus_per_node": 8,
        "trainer.max_tokens_per_microbatch": 32768,
        "generator.inference_engine.backend": "vllm",
        "generator.inference_engine.num_engines": 2,
        "generator.inference_engine.tensor_parallel_size": 4,
        "generator.inference_engine.weight_sync_backend": "shared_memory",
    },
    tiny={
        **TINY,
        "trainer.run_name": "qwen3_30b_a3b_lora_tiny",
        "trainer.policy.model.path": tiny_copy(_MODEL),
        "trainer.policy.model.lora.rank": 4,
    },
    prepare="rl_examples.tiny_copies:prepare",
    needs=HOW_TO_MAKE,
    makes=(*MADE, tiny_copy(_MODEL)),
)
