"""Asynchronous training of a Mixture of Experts with router replay, on two-digit addition and two CPU cores.

What it does: trains a Qwen3-MoE of 250k parameters on the quick start's task. Answers are sampled while training
continues, with weights that are up to two versions old, so truncated importance sampling corrects the policy's
gradient. The engine reports the experts of each token, and the trainer follows these routes (R3, Ma et al. 2025, arXiv
2510.11370). So neither rounding nor a newer weight version can send a token to other experts than the ones that
produced its log-prob. `rollout/staleness_mean` shows how many versions sampling lags behind, and `correction/…` how
strongly the gradient is corrected.
Deliberately omitted: a GPU's rounding, the main reason why routes differ (here engine and trainer use float32).

Run:      rl train async_r3
Control:  rl train async_r3 trainer.policy.fsdp_config.moe_enable_routing_replay=false \\
              generator.inference_engine.enable_return_routed_experts=false
Server:   rl train async_r3 generator.inference_engine.backend=vllm
"""

from __future__ import annotations

from rl_core.interfaces import Recipe
from rl_examples.quickstart import recipe as quickstart

recipe = Recipe(
    summary="asynchronous training with router replay: a tiny Mixture of Experts learns addition in minutes",
    config={
        **quickstart.config,
        "trainer.run_name": "async_r3",
        "trainer.policy.model.path": "runs/arithmetic/start_moe_model_seed${trainer.seed}",
        "trainer.policy.fsdp_config.moe_enable_routing_replay": True,
        "trainer.max_staleness": 2,
        "trainer.pipeline_depth": 2,
        "trainer.algorithm.off_policy_correction.tis_ratio_type": "token",
        "trainer.max_training_steps": 100,
        "generator.inference_engine.enable_return_routed_experts": True,
    },
    prepare="rl_examples.quickstart:prepare",
    makes=quickstart.makes,
)
