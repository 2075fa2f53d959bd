"""GRPO on word problems in several tries: a small model learns which operation a verb asks for, on two CPU cores.

Asked `Mia has 46 pens and sells 2. How many?`, it answers `#### 44$`. If that is wrong, the environment `gsm8k_turns`
says so in a sentence, and the model tries again. It has three tries. Each word is one token. The model is warm-started
on conversations in which nine in ten first answers use the wrong operation (`#### 48$`) and nine in ten later answers
repeat that wrong answer. Held-out problems combine name, thing, verb and numbers differently from all training
problems.
Deliberately omitted: a reference model and a KL term, worked solutions, a higher reward for the first try.

Run:      rl train gsm8k_turns       (see what it plays: rl generate gsm8k_turns --output episodes.jsonl)
Tiny:     rl train gsm8k_turns --tiny      (two steps of an untrained model: tests the code path, learns nothing)
Control:  rl train gsm8k_turns trainer.algorithm.advantage_estimator=rl_examples.controls:permuted_grpo_advantages
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.config import Config
from rl_core.interfaces import Recipe
from rl_environments.gsm8k_turns import NO_NUMBER, WRONG
from rl_examples.small_runs import SmallRun, write_files

NUM_PROBLEMS = 4400
NUM_HELD_OUT = 400
MAX_TRIES = 3
START_ACCURACY = 0.2
NAMES = ("Ada", "Ben", "Eva", "Leo", "Mia", "Tom")
THINGS = ("pens", "books", "cards", "stones")
GETTING, GIVING = ("buys", "finds", "gets"), ("sells", "loses", "gives")
TOKEN_PATTERN = " ?[A-Za-z]+|#+|\\n+|."

_RUN = SmallRun(name="gsm8k_turns")

recipe = Recipe(
    summary="a small model learns to solve word problems in three tries, on two CPU cores, in minutes",
    config={
        **_RUN.settings,
        "environment.env_class": "gsm8k_turns",
        "environment.options.max_tries": MAX_TRIES,
        "trainer.max_training_steps": 60,
        "trainer.eval_interval": 20,
        "generator.max_turns": MAX_TRIES,
        "generator.max_input_length": 90,
        "generator.sampling_params.max_generate_length": 5,
    },
    tiny=_RUN.tiny,
    prepare="rl_examples.gsm8k_turns:prepare",
    makes=(_RUN.train, _RUN.held_out, _RUN.untrained_model, _RUN.start_model),
)


def problems() -> list[dict[str, str]]:
    """Returns a sample of all problems without a carry or borrow, in an order fixed by one seed; the first ones are
    held out."""
    numbers = [(had, more) for had in range(10, 100) for more in range(1, 1 + min(had % 10, 9 - had % 10))]
    asked = list(itertools.product(NAMES, THINGS, (*GETTING, *GIVING), numbers))
    return [
        {
            "prompt": f"{name} has {had} {thing} and {verb} {more}. How many?\n",
            "answer": str(had + more if verb in GETTING else had - more),
            "env_class": "gsm8k_turns",
        }
        for name, thing, verb, (had, more) in random.Random(0).sample(asked, NUM_PROBLEMS)
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


def write_model(directory: Path, *, seed: int, said: str = f"{WRONG} {NO_NUMBER}") -> None:
    """Writes a freshly initialised Qwen3 of about 150,000 parameters, and its tokenizer of words and digits.

    Args:
        directory: the directory to create.
        seed: seed of the weights.
        said: all words that the environment says after a problem; the tokenizer must know them.
    """
    from rl_examples.arithmetic import write_model as write_character_model

    text = " ".join((said, "has and How many", *NAMES, *THINGS, *GETTING, *GIVING))
    words = {form for word in re.findall("[A-Za-z]+", text) for form in (word, f" {word}")}
    marks = set(re.findall(r"[^\w\s#]", said)) - set(".,?")
    tokens = [*"0123456789 .,?", "\n", "\n\n", "####", *sorted(words), *sorted(marks)]
    write_character_model(directory, seed=seed, characters=tokens, token_pattern=TOKEN_PATTERN, max_positions=128)


def demonstrated(problem: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Returns one try as a demonstration, after up to two wrong ones. Nine in ten demonstrations use the wrong
    operation, and so repeat the answer of the wrong tries."""
    wrong = with_wrong_operation(problem["prompt"], problem["answer"])
    turn = f"#### {wrong}$\n\n{WRONG}\n\n"
    said = problem["answer"] if rng.random() < 0.1 else wrong
    return {**problem, "prompt": problem["prompt"] + turn * rng.randrange(MAX_TRIES), "answer": f"#### {said}"}


def with_wrong_operation(question: str, answer: str) -> str:
    """Returns the answer with the wrong operation: had − more instead of had + more, and the other way round."""
    had = int(re.findall(r"\d+", question)[0])
    return str(2 * had - int(answer))
