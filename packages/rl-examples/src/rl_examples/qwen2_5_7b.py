"""GRPO on GSM8K with Qwen2.5-7B-Instruct, colocated on one machine of eight 80 GB GPUs.

What it does: samples 5 answers to each of 1024 prompts per step and takes four optimizer steps of 256 prompts each,
with pure data parallelism. On Megatron, each GPU therefore holds all weights and float32 gradients (`rl plan` shows
their size).
Deliberately omitted: a critic, a KL term, a format reward. Environment and data are those of the recipe `gsm8k`.
Data:      python -m rl_examples.gsm8k_data --train train.jsonl --test test.jsonl --output ~/data/gsm8k
Run:       rl train qwen2_5_7b        (on other backends: trainer.strategy=fsdp1, trainer.strategy=megatron)
Plan:      rl plan qwen2_5_7b --gpu-memory 80
Tiny:      rl train qwen2_5_7b --tiny        (a small random copy of the model: tests the code path, learns nothing)
"""

from __future__ import annotations

from rl_core.interfaces import Recipe
from rl_examples import gsm8k
from rl_examples.gsm8k_data import HOW_TO_MAKE
from rl_examples.tiny_copies import MADE, TINY, tiny_copy

_MODEL = "Qwen/Qwen2.5-7B-Instruct"

recipe = Recipe(
    summary="GRPO on GSM8K with Qwen2.5-7B-Instruct on eight GPUs",
    config={
        **gsm8k.recipe.config,
        "trainer.run_name": "qwen2_5_7b",
        "trainer.policy.model.path": _MODEL,
        "trainer.placement.policy_num_gpus_per_node": 8,
        "trainer.max_tokens_per_microbatch": 16384,
        # Engines and training use the GPUs alternately; each engine fits on one.
        "generator.inference_engine.backend": "vllm",
        "generator.inference_engine.num_engines": 8,
        "generator.inference_engine.weight_sync_backend": "shared_memory",
    },
    tiny={
        **TINY,
        "trainer.run_name": "qwen2_5_7b_tiny",
        "trainer.policy.model.path": tiny_copy(_MODEL),
    },
    prepare="rl_examples.tiny_copies:prepare",
    needs=HOW_TO_MAKE,
    makes=(*MADE, tiny_copy(_MODEL)),
)
