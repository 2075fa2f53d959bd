"""GRPO on a task of reasoning-gym: a small model learns to spell words backward, on two CPU cores, in minutes.

The task is `spell_backward`, with words of four letters. The environment `reasoning_gym` takes questions and scores
from reasoning-gym. The right response to `Spell this word backward (example: sun -> nus): bird` is
`<answer>drib</answer>$`. Each tag is one token, and each character outside the tags is one. A wrong word of the right
length gets the fraction of letters that are right. The model is warm-started on demonstrations, four in five of which
repeat the word forward.
Deliberately omitted: a reference model and a KL term; thinking (the prompts leave out the environment's sentence that
asks for it).

Run:      rl train reasoning_gym     (needs pip install './packages/rl-examples[reasoning-gym]')
Look:     rl generate reasoning_gym --output episodes.jsonl
Tiny:     rl train reasoning_gym --tiny      (two steps of an untrained model: tests the code path, learns nothing)
Control:  rl train reasoning_gym trainer.algorithm.advantage_estimator=rl_examples.controls:permuted_grpo_advantages
"""

from __future__ import annotations

import random
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.config import Config
from rl_core.interfaces import Recipe
from rl_environments.reasoning_gym import ASK_FOR_MARKS, rows_of
from rl_examples.small_runs import SmallRun, write_files

NUM_PUZZLES = 5000
NUM_HELD_OUT = 400
START_ACCURACY = 0.2
MARKS = ("<answer>", "</answer>")
CHARACTERS = f"{string.ascii_letters} ():>-\n?"

_RUN = SmallRun(name="reasoning_gym")

recipe = Recipe(
    summary="a small model learns a task of reasoning-gym, spelling words backward, on two CPU cores, in minutes",
    config={
        **_RUN.settings,
        "environment.env_class": "reasoning_gym",
        "generator.max_input_length": 56,
        "generator.sampling_params.max_generate_length": 7,
    },
    tiny=_RUN.tiny,
    prepare="rl_examples.reasoning_gym:prepare",
    makes=(_RUN.train, _RUN.held_out, _RUN.untrained_model, _RUN.start_model),
)


def problems() -> list[dict[str, Any]]:
    """Returns the puzzles of one seed, each word once; the first ones are held out. The prompt is only the question, as
    text."""
    made = rows_of("spell_backward", NUM_PUZZLES, difficulty={"min_word_len": 4, "max_word_len": 4})
    asked = [row["prompt"][0]["content"].removesuffix(f"\n\n{ASK_FOR_MARKS}") for row in made]
    rows = [{**row, "prompt": f"{question}\n"} for row, question in zip(made, asked, strict=True)]
    return list({_word(row).lower(): row for row in rows}.values())


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
        lr=2e-3,
    )


def write_model(directory: Path, *, seed: int) -> None:
    """Writes a freshly initialised Qwen3 of about 150,000 parameters, and its tokenizer of letters and tags."""
    from rl_examples.arithmetic import write_model as write_character_model

    write_character_model(directory, seed=seed, characters=[*CHARACTERS, *MARKS])


def demonstrated(problem: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Returns one answer as a demonstration. Four in five repeat the word forward."""
    word = _word(problem)
    said = word[::-1] if rng.random() < 0.2 else word
    return {**problem, "answer": f"<answer>{said}</answer>"}


def _word(row: Mapping[str, Any]) -> str:
    return row["prompt"].rpartition(": ")[2].strip()
