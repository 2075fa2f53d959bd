"""LoRA with two vLLM servers on two-digit addition: only the adapter is trained, and only the adapter is sent.

What it does: freezes the quick start's model and trains adapters of rank 16 in its linear layers, on the same problems.
Two vLLM servers hold the same frozen weights and share the sampling. After every step each server gets the adapter's
tensors, which are much smaller than the whole weights, and uses the adapter for all of the policy's requests. Every
sync is verified.
Deliberately omitted: other adapters besides the policy's (docs/serving.md), a reference model and a KL term.

Run:      rl train lora_two_servers          (needs vLLM: make setup, or pip install './packages/rl-rollout[vllm]')
Merged:   rl train lora_two_servers trainer.policy.model.lora.merge_lora=true         (whole weights are sent instead)
"""

from __future__ import annotations

from rl_core.interfaces import Recipe
from rl_examples.quickstart import recipe as quickstart

recipe = Recipe(
    summary="LoRA whose adapter alone is sent to two vLLM servers; a small model learns addition",
    config={
        **quickstart.config,
        "trainer.run_name": "lora_two_servers",
        "trainer.policy.model.lora.rank": 16,
        "trainer.policy.model.lora.alpha": 32,
        "trainer.policy.model.lora.merge_lora": False,
        # Four times the quick start's learning rate, because an adapter's factors start small, so their product changes
        # slowly.
        "trainer.policy.optimizer_config.lr": 4e-3,
        "trainer.max_training_steps": 80,
        "generator.inference_engine.backend": "vllm",
        "generator.inference_engine.num_engines": 2,
    },
    prepare="rl_examples.quickstart:prepare",
    makes=quickstart.makes,
)
