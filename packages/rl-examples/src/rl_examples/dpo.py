"""Direct preference optimisation on two-digit addition: the right sum is preferred to one with a wrong digit.

What it does: creates a pair of answers for each problem, and a start model by short supervised fine-tuning
(`rl_examples.sft`). The start model is both the initial policy and the reference. DPO then takes one optimizer step per
batch of 64 pairs, without an engine. Held-out pairs are evaluated by the same loss; `eval/pair_accuracy` is
the fraction of pairs in which the policy has moved towards the right answer.
Deliberately omitted: human preferences, a reward model that scores answers.

Run:      rl train dpo
IPO:      rl train dpo trainer.algorithm.policy_loss_params.dpo_type=ipo
Rewards:  rl train dpo trainer.algorithm.policy_loss_type=reward_model generator.scored_at_end=true \\
              trainer.algorithm.policy_loss_params={}        (a reward model on the same pairs)
Control:  rl train dpo data.train_data=[runs/arithmetic/random_pairs.parquet]        (random preferences)
"""

from __future__ import annotations

import random
from pathlib import Path

from rl_core.config import Config
from rl_core.interfaces import Recipe
from rl_examples.sft import DIRECTORY, make_fine_tuned
from rl_examples.sft import recipe as sft

_TRAIN = f"{DIRECTORY}/pairs.parquet"
_HELD_OUT = f"{DIRECTORY}/held_out_pairs.parquet"
_RANDOM = f"{DIRECTORY}/random_pairs.parquet"
_START = f"{DIRECTORY}/dpo_start_seed${{trainer.seed}}"

recipe = Recipe(
    summary="direct preference optimisation: right sums against wrong ones, on two CPU cores, in a minute or two",
    config={
        **sft.config,
        "data.train_data": [_TRAIN],
        "data.val_data": [_HELD_OUT],
        "generator.responses": "pair",
        "generator.n_samples_per_prompt": 2,
        "generator.eval_n_samples_per_prompt": 2,
        "trainer.run_name": "dpo",
        "trainer.policy.model.path": _START,
        "trainer.policy.optimizer_config.lr": 1e-3,
        "trainer.algorithm.policy_loss_type": "dpo",
        "trainer.algorithm.loss_reduction": "prompt_token_sum",
        "trainer.max_training_steps": 150,
        "trainer.train_batch_size": 64,
        "trainer.policy_mini_batch_size": 64,
    },
    prepare="rl_examples.dpo:prepare",
    makes=(_TRAIN, _HELD_OUT, _RANDOM, _START),
)

START_STEPS = 150


def prepare(config: Config) -> None:
    """Creates the recipe's pairs and start model if the configuration uses them and they are missing."""
    from rl_examples.arithmetic import NUM_HELD_OUT, write_missing_rows, write_model

    rows = pairs()
    held_out, trained = rows[:NUM_HELD_OUT], rows[NUM_HELD_OUT:]
    write_missing_rows(config, {_TRAIN: trained, _HELD_OUT: held_out, _RANDOM: with_random_preferences(trained)})
    start = Path(_START.replace("${trainer.seed}", str(config.trainer.seed)))
    if config.policy_model_path == str(start):
        make_fine_tuned(start, write_model, steps=START_STEPS, seed=config.trainer.seed)


def pairs() -> list[dict[str, str]]:
    """Every problem with its right answer, and with an answer that has one wrong digit."""
    from rl_examples.arithmetic import problems

    rng, rows = random.Random(0), []
    for problem in problems():
        answer, place = problem["answer"], rng.randrange(3)
        digit = (int(answer[place]) + rng.randrange(1, 10)) % 10
        wrong = answer[:place] + str(digit) + answer[place + 1 :]
        rows.append({"prompt": problem["prompt"], "chosen": answer, "rejected": wrong})
    return rows


def with_random_preferences(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The negative control: the pairs, each with its answers swapped with probability 1/2."""
    rng = random.Random(0)
    turned = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    return [rng.choice(each) for each in zip(rows, turned, strict=True)]
