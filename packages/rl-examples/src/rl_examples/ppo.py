"""PPO on two-digit addition: a critic predicts each answer's reward token by token, on two CPU cores.

What it does: trains the quick start's model on the same problems, with one answer to each of 512 problems per step
instead of sixteen to each of 64. An answer has no group to be compared with, so advantages come from generalised
advantage estimation (Schulman et al. 2016, arXiv 1506.02438) with the values of a critic. The critic is a copy of the
start model with a value head, and is trained alongside the policy with a clipped value loss. Advantages are whitened
over the batch.
Deliberately omitted: a reference model and a KL penalty in the reward (staying close to the weak start model has no
use), a warm-up of the critic before the policy is trained.

Run:      rl train ppo
Grouped:  rl train ppo trainer.train_batch_size=64 trainer.policy_mini_batch_size=64 \\
              trainer.critic_mini_batch_size=64 generator.n_samples_per_prompt=16         (the quick start's batch)
"""

from __future__ import annotations

from rl_core.interfaces import Recipe
from rl_examples.quickstart import recipe as quickstart

recipe = Recipe(
    summary="PPO with a critic and GAE, one answer per problem; a small model learns addition in minutes",
    config={
        **quickstart.config,
        "trainer.run_name": "ppo",
        "trainer.algorithm.advantage_estimator": "gae",
        "trainer.algorithm.gamma": 1.0,
        "trainer.algorithm.lambd": 0.95,
        "trainer.algorithm.advantage_batch_normalize": True,
        "trainer.critic.model.path": quickstart.config["trainer.policy.model.path"],
        "trainer.critic.optimizer_config.lr": 1e-3,
        "trainer.critic.optimizer_config.adam_betas": [0.9, 0.95],
        "trainer.critic.optimizer_config.weight_decay": 0.0,
        "trainer.critic.optimizer_config.num_warmup_steps": 5,
        "trainer.max_training_steps": 100,
        "trainer.train_batch_size": 512,
        "trainer.policy_mini_batch_size": 512,
        "trainer.critic_mini_batch_size": 512,
        "generator.n_samples_per_prompt": 1,
    },
    prepare="rl_examples.quickstart:prepare",
    makes=quickstart.makes,
)
