"""GRPO on mathematics: a small model learns to multiply fractions, judged by math-verify, on two CPU cores, in minutes.

The answer to `3/4*2/5=` may be any equal expression: `6/20$`, `3/10$` or `.3$`. The environment `mathematics` judges
the answers, as it does for large models. The model is warm-started on demonstrations of which three in four divide the
fractions instead, so at first one in nine of its answers is right. Only the reward shows that multiplying is right. A
response has at most six tokens, too few to repeat the question, which would be an equal expression.
Deliberately omitted: a reference model and a KL term, worked solutions.

Run:      rl train mathematics       (see what it answers: rl generate mathematics --output episodes.jsonl)
Tiny:     rl train mathematics --tiny      (two steps of an untrained model: tests the code path, learns nothing)
Control:  rl train mathematics trainer.algorithm.advantage_estimator=rl_examples.controls:permuted_grpo_advantages
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Any

from rl_core.config import Config
from rl_core.interfaces import Recipe
from rl_examples.small_runs import SmallRun, write_files

NUM_HELD_OUT = 400
START_ACCURACY = 0.12

_RUN = SmallRun(name="mathematics")

recipe = Recipe(
    summary="a small model learns to multiply fractions, judged by math-verify, on two CPU cores, in minutes",
    config={
        **_RUN.settings,
        "environment.env_class": "mathematics",
        "generator.sampling_params.max_generate_length": 6,
    },
    tiny=_RUN.tiny,
    prepare="rl_examples.mathematics:prepare",
    makes=(_RUN.train, _RUN.held_out, _RUN.untrained_model, _RUN.start_model),
)


def problems() -> list[dict[str, str]]:
    """Returns products of two fractions of the digits 1 to 9, in an order fixed by one seed; the first ones are held
    out. Products that equal the fractions' quotient are left out. Answers are not reduced to lowest terms."""
    digits = itertools.product(range(1, 10), repeat=4)
    rows = [
        {"prompt": f"{a}/{b}*{c}/{d}=", "answer": f"{a * c}/{b * d}", "env_class": "mathematics"}
        for a, b, c, d in digits
        if c != d
    ]
    random.Random(0).shuffle(rows)
    return rows


def prepare(config: Config) -> None:
    """Creates the recipe's data and models if the configuration uses them and they are missing."""
    write_files(
        config,
        _RUN,
        recipe,
        problems(),
        num_held_out=NUM_HELD_OUT,
        demonstrate=demonstrated,
        target_accuracy=START_ACCURACY,
        updates_per_check=25,
    )


def demonstrated(problem: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Returns one answer as a demonstration. Three in four divide the first fraction by the second."""
    if rng.random() < 0.25:
        return dict(problem)
    (a, b), (c, d) = (fraction.split("/") for fraction in problem["prompt"].removesuffix("=").split("*"))
    return {**problem, "answer": f"{int(a) * int(d)}/{int(b) * int(c)}"}
