"""GSPO on two-digit addition: clips one ratio per answer instead of one per token, on two CPU cores.

What it does: trains the quick start's model on the same problems, with the loss of Zheng et al. 2025 (arXiv
2507.18071). The ratio of an answer is the geometric mean of its tokens' ratios. This ratio is clipped, and all answers
have the same weight.
Deliberately omitted: a reference model and a KL term, as in the paper; a Mixture of Experts, for which GSPO was
designed (`trainer.policy.model.path=runs/arithmetic/start_moe_model_seed0` is one).

Run:      rl train gspo
Tokens:   rl train gspo trainer.algorithm.policy_loss_type=gspo_token      (a ratio per answer, gradients per token)
"""

from __future__ import annotations

from rl_core.interfaces import Recipe
from rl_examples.quickstart import recipe as quickstart

recipe = Recipe(
    summary="GSPO: one ratio per answer; a small model learns addition on two CPU cores, in minutes",
    config={
        **quickstart.config,
        "trainer.run_name": "gspo",
        "trainer.algorithm.policy_loss_type": "gspo",
        "trainer.algorithm.loss_reduction": "sequence_mean",
        # The paper's bounds, 3e-4 and 4e-4, are for answers of thousands of tokens; here the ratio is a mean over four
        # tokens and varies about a hundred times more.
        "trainer.algorithm.eps_clip_low": 0.1,
        "trainer.algorithm.eps_clip_high": 0.15,
        "trainer.max_training_steps": 80,
    },
    prepare="rl_examples.quickstart:prepare",
    makes=quickstart.makes,
)
