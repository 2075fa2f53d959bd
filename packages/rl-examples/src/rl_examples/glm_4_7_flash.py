"""GRPO on GSM8K with GLM-4.7-Flash on two machines of eight 80 GB GPUs: FSDP, colocated.

The recipe uses FSDP, which trains transformers' model code, because Megatron-Bridge 0.3.1 does not convert this model
(`glm4_moe_lite`: latent attention, 64 experts and a shared expert in 46 of 47 layers). transformers does not load the
checkpoint's additional layer for multi-token prediction, so that layer is neither trained nor saved.
Deliberately omitted: a KL term, an auxiliary load-balancing loss.
Data:   python -m rl_examples.gsm8k_data --train train.jsonl --test test.jsonl --output ~/data/gsm8k
Run:    rl train glm_4_7_flash
Plan:   rl plan glm_4_7_flash --gpu-memory 80
Tiny:   rl train glm_4_7_flash --tiny        (a small random copy of the model: tests the code path, learns nothing)
"""

from __future__ import annotations

from rl_core.interfaces import Recipe
from rl_examples import gsm8k
from rl_examples.gsm8k_data import HOW_TO_MAKE
from rl_examples.tiny_copies import MADE, TINY, tiny_copy

_MODEL = "zai-org/GLM-4.7-Flash"

recipe = Recipe(
    summary="GRPO on GSM8K with GLM-4.7-Flash on 2 × 8 GPUs, FSDP",
    config={
        **gsm8k.recipe.config,
        "trainer.run_name": "glm_4_7_flash",
        "trainer.policy.model.path": _MODEL,
        "trainer.placement.policy_num_nodes": 2,
        "trainer.placement.policy_num_gpus_per_node": 8,
        "trainer.max_tokens_per_microbatch": 32768,
        # The model has 20 attention heads, which four GPUs can split and eight cannot.
        "generator.inference_engine.backend": "vllm",
        "generator.inference_engine.num_engines": 4,
        "generator.inference_engine.tensor_parallel_size": 4,
        "generator.inference_engine.weight_sync_backend": "broadcast",
    },
    tiny={
        **TINY,
        "trainer.run_name": "glm_4_7_flash_tiny",
        "trainer.policy.model.path": tiny_copy(_MODEL),
    },
    prepare="rl_examples.tiny_copies:prepare",
    needs=HOW_TO_MAKE,
    makes=(*MADE, tiny_copy(_MODEL)),
)
