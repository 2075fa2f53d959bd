"""GRPO on GSM8K with Moonlight-16B-A3B: Megatron on one machine of eight 80 GB GPUs, engines on another, asynchronous.

The policy's eight GPUs are split into tensor 2 × context 2 × pipeline 2, with expert parallelism 4 in each stage. The
first stage has 13 of the 27 layers, and the embedding. Generation runs one step ahead, and training data is at most two
policy versions old. Per-token importance weights are truncated at 2 (TIS), and tokens are routed to the experts that
the engine chose (router replay, R3).
Deliberately omitted: a KL term. The model's tokenizer is code in the model's repository, which is not run here: use a
copy of the model that has the tokenizer as tokenizer.json (trainer.policy.model.path=DIRECTORY).
Data:   python -m rl_examples.gsm8k_data --train train.jsonl --test test.jsonl --output ~/data/gsm8k
Run:    rl train moonlight_16b_a3b
Plan:   rl plan moonlight_16b_a3b --gpu-memory 80
Tiny:   rl train moonlight_16b_a3b --tiny        (a small random copy of the model: tests the code path, learns nothing)
"""

from __future__ import annotations

from rl_core.interfaces import Recipe
from rl_examples import gsm8k
from rl_examples.gsm8k_data import HOW_TO_MAKE
from rl_examples.tiny_copies import MADE, TINY, tiny_copy

_MODEL = "moonshotai/Moonlight-16B-A3B-Instruct"

recipe = Recipe(
    summary="asynchronous GRPO on GSM8K with Moonlight-16B-A3B, pipeline and context parallel, router replay",
    config={
        **gsm8k.recipe.config,
        "trainer.run_name": "moonlight_16b_a3b",
        "trainer.policy.model.path": _MODEL,
        "trainer.strategy": "megatron",
        "trainer.placement.policy_num_gpus_per_node": 8,
        "trainer.placement.colocate_all": False,
        "trainer.policy.megatron_config.tensor_model_parallel_size": 2,
        "trainer.policy.megatron_config.context_parallel_size": 2,
        "trainer.policy.megatron_config.pipeline_model_parallel_size": 2,
        "trainer.policy.megatron_config.num_layers_in_first_pipeline_stage": 13,
        "trainer.policy.megatron_config.expert_model_parallel_size": 4,
        "trainer.policy.megatron_config.expert_tensor_parallel_size": 1,
        "trainer.policy.megatron_config.moe_enable_routing_replay": True,
        "trainer.max_staleness": 2,
        "trainer.algorithm.off_policy_correction.tis_ratio_type": "token",
        "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high": 2.0,
        "trainer.max_tokens_per_microbatch": 32768,
        "generator.inference_engine.backend": "vllm",
        "generator.inference_engine.num_engines": 8,
        "generator.inference_engine.enable_return_routed_experts": True,
        "generator.inference_engine.weight_sync_backend": "broadcast",
    },
    tiny={
        **TINY,
        "trainer.run_name": "moonlight_16b_a3b_tiny",
        "trainer.policy.model.path": tiny_copy(_MODEL),
        # Two ranks instead of eight, one per stage; three layers, with the dense one on the first stage.
        "trainer.placement.policy_num_gpus_per_node": 2,
        "trainer.placement.colocate_all": False,
        "trainer.policy.megatron_config.tensor_model_parallel_size": 1,
        "trainer.policy.megatron_config.context_parallel_size": 1,
        "trainer.policy.megatron_config.num_layers_in_first_pipeline_stage": 1,
        "trainer.policy.megatron_config.expert_model_parallel_size": 1,
    },
    prepare="rl_examples.tiny_copies:prepare",
    needs=HOW_TO_MAKE,
    makes=(*MADE, tiny_copy(_MODEL)),
)
