"""Supervised fine-tuning, then GRPO: a model first learns two-digit addition from answers, and then from rewards.

What it does: fine-tunes the quick start's model on the problems' answers (`rl_examples.sft`) until it solves some of
them, then trains it as the quick start does. The fine-tuning run, with its report, is kept next to the model, as
`runs/arithmetic/sft_start_seed0.run`.
Deliberately omitted: different data for the two stages, a KL term that keeps the policy near its start.

Run:      rl train sft_grpo
Or run the two stages separately:
          rl train sft trainer.max_training_steps=335
          rl train quickstart trainer.policy.model.path=runs/sft/model
"""

from __future__ import annotations

from pathlib import Path

from rl_core.config import Config
from rl_core.interfaces import Recipe
from rl_examples.quickstart import recipe as quickstart
from rl_examples.sft import DIRECTORY, HELD_OUT, TRAIN, make_fine_tuned, write_missing_data

_START = f"{DIRECTORY}/sft_start_seed${{trainer.seed}}"

recipe = Recipe(
    summary="supervised fine-tuning, then GRPO: a small model learns addition in two stages, in minutes",
    config={**quickstart.config, "trainer.run_name": "sft_grpo", "trainer.policy.model.path": _START},
    prepare="rl_examples.sft_grpo:prepare",
    makes=(TRAIN, HELD_OUT, _START),
)

START_STEPS = 335


def prepare(config: Config) -> None:
    """Creates the recipe's data and fine-tuned start model if the configuration uses them and they are missing."""
    from rl_examples.arithmetic import write_model

    write_missing_data(config)
    start = Path(_START.replace("${trainer.seed}", str(config.trainer.seed)))
    if config.policy_model_path == str(start):
        make_fine_tuned(start, write_model, steps=START_STEPS, seed=config.trainer.seed)
