"""DAPO on two-digit addition: GRPO with the four changes of Yu et al. 2025 (arXiv 2503.14476), on two CPU cores.

What it does: trains the quick start's model on the same problems, with four changes. Clip-higher: a ratio may rise by
0.28 and fall by 0.2. Token-level loss: all tokens have the same weight. Dynamic sampling: a problem teaches nothing if
all of its samples have the same reward, so other problems are sampled until the batch is full. Overlong shaping: a
penalty grows to 1 over the last tokens before the limit, so that a response without an end is worse than a wrong one.
`rollout/dropped_zero_variance` counts the dropped problems, and `environment/penalty` is the shaping penalty.
Deliberately omitted: a reference model and a KL term, as in the paper.

Run:      rl train dapo
Copies:   rl train dapo trainer.algorithm.dynamic_sampling.type=replace     (copies replace dropped problems)
"""

from __future__ import annotations

import attrs

from rl_core.config import Config
from rl_core.interfaces import Action, Recipe, StepResult
from rl_examples.arithmetic import ArithmeticEnvironment
from rl_examples.quickstart import recipe as quickstart

ANSWER_TOKENS = 4
"""Length of a right answer: three digits and the end token."""
MAX_TOKENS = 8

_TRAIN = "runs/dapo_data/train.parquet"
_HELD_OUT = "runs/dapo_data/held_out.parquet"

recipe = Recipe(
    summary="DAPO: dynamic sampling, clip-higher, overlong shaping; a small model learns addition in minutes",
    config={
        **quickstart.config,
        "data.train_data": [_TRAIN],
        "data.val_data": [_HELD_OUT],
        "environment.env_class": "shaped_arithmetic",
        "trainer.run_name": "dapo",
        "trainer.algorithm.eps_clip_low": 0.2,
        "trainer.algorithm.eps_clip_high": 0.28,
        "trainer.algorithm.loss_reduction": "token_mean",
        "trainer.algorithm.dynamic_sampling.type": "filter",
        "trainer.max_training_steps": 60,
        "generator.sampling_params.max_generate_length": MAX_TOKENS,
    },
    prepare="rl_examples.dapo:prepare",
    makes=(*quickstart.makes, _TRAIN, _HELD_OUT),
)


class ShapedArithmetic(ArithmeticEnvironment):
    """The reward is the accuracy plus DAPO's length penalty, which is at most 0. Metrics: `accuracy` (1 if the response
    is exactly the answer, else 0) and `penalty`."""

    async def step(self, action: Action) -> StepResult:
        import torch

        from rl_core.algorithms import soft_overlong_penalty

        judged = await super().step(action)
        length_N = torch.tensor([len(action.tokens)])
        penalty = soft_overlong_penalty(length_N, max_len=MAX_TOKENS, cache_len=MAX_TOKENS - ANSWER_TOKENS).item()
        metrics = {**judged.metrics, "penalty": penalty}
        return attrs.evolve(judged, reward=judged.reward + penalty, metrics=metrics)


def prepare(config: Config) -> None:
    """Creates the quick start's model, and its problems for this environment, if the configuration uses them and they
    are missing."""
    from rl_examples import quickstart
    from rl_examples.arithmetic import NUM_HELD_OUT, problems, write_missing_rows

    quickstart.prepare(config)
    rows = [{**row, "env_class": "shaped_arithmetic"} for row in problems()]
    write_missing_rows(config, {_TRAIN: rows[NUM_HELD_OUT:], _HELD_OUT: rows[:NUM_HELD_OUT]})
