"""GRPO on an environment of skyrl-gym: a small model solves word problems in two turns, on two CPU cores, in minutes.

The environment `skyrl_gym` runs skyrl-gym's `gsm8k_multi_turn` unchanged. The problems are those of the recipe
`gsm8k_turns`, as rows in SkyRL's form. Asked `Mia has 46 pens and sells 2. How many?`, the model answers `#### 44$`.
After a wrong answer, skyrl-gym asks for `only the final numeric answer`, and the model answers again. The rewards are
skyrl-gym's: 1 for the right number, 0.1 for another number in the right form. The model is warm-started on
conversations in which nine in ten answers use the wrong operation (`#### 48$`).
Deliberately omitted: a reference model and a KL term, worked solutions, rewards other than skyrl-gym's.

Run:      rl train skyrl_gym       (needs pip install './packages/rl-examples[skyrl-gym]')
Look:     rl generate skyrl_gym --output episodes.jsonl
Tiny:     rl train skyrl_gym --tiny      (two steps of an untrained model: tests the code path, learns nothing)
Control:  rl train skyrl_gym trainer.algorithm.advantage_estimator=rl_examples.controls:permuted_grpo_advantages
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.config import Config
from rl_core.interfaces import Recipe
from rl_examples import gsm8k_turns
from rl_examples.small_runs import SmallRun, write_files

NUM_HELD_OUT = 400
MAX_TURNS = 2
START_ACCURACY = 0.25
"""Includes the 0.1 for each wrong number."""
LAST_TURN = "Now provide only the final numeric answer in the exact format: '#### ANSWER'."
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '$' if m.role == 'assistant' else '\\n' }}{% endfor %}"

_RUN = SmallRun(name="skyrl_gym")

recipe = Recipe(
    summary="a small model learns in an environment of skyrl-gym, on two CPU cores, in minutes",
    config={
        **_RUN.settings,
        "environment.env_class": "skyrl_gym",
        "environment.options.env": "gsm8k_multi_turn",
        "environment.options.max_turns": MAX_TURNS,
        "trainer.max_training_steps": 60,
        "trainer.eval_interval": 20,
        "generator.max_turns": MAX_TURNS,
        "generator.max_input_length": 48,
        "generator.sampling_params.max_generate_length": 5,
    },
    tiny=_RUN.tiny,
    prepare="rl_examples.skyrl_gym:prepare",
    makes=(_RUN.train, _RUN.held_out, _RUN.untrained_model, _RUN.start_model),
)


def problems() -> list[dict[str, Any]]:
    """Returns the problems of `gsm8k_turns` with SkyRL's columns; the first ones are held out."""
    return [
        {
            "prompt": [{"role": "user", "content": problem["prompt"].strip()}],
            "reward_spec": {"method": "rule", "ground_truth": problem["answer"]},
            "env_class": "skyrl_gym",
        }
        for problem in gsm8k_turns.problems()
    ]


def prepare(config: Config) -> None:
    """Creates the recipe's data and models if the configuration uses them and they are missing."""
    write_files(
        config,
        _RUN,
        recipe,
        problems(),
        num_held_out=NUM_HELD_OUT,
        demonstrate=demonstrated,
        write_model=write_model,
        target_accuracy=START_ACCURACY,
        updates_per_check=25,
    )


def write_model(directory: Path, *, seed: int) -> None:
    """Writes a freshly initialised Qwen3 of about 150,000 parameters, its tokenizer of words and digits, and its chat
    template."""
    from rl_examples.tiny_model import add_chat_template

    gsm8k_turns.write_model(directory, seed=seed, said=LAST_TURN)
    add_chat_template(directory, CHAT_TEMPLATE)


def demonstrated(problem: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Returns a first answer as a demonstration, or a second answer after a wrong first one. Nine in ten use the wrong
    operation."""
    asked, right = problem["prompt"][0]["content"], problem["reward_spec"]["ground_truth"]
    wrong = gsm8k_turns.with_wrong_operation(asked, right)
    turn = f"#### {wrong}${LAST_TURN}\n"
    said = right if rng.random() < 0.1 else wrong
    return {"prompt": f"{asked}\n" + turn * rng.randrange(MAX_TURNS), "answer": f"#### {said}"}
