"""GRPO with a model as judge: a small model learns to answer correctly in a sentence, on two CPU cores, in minutes.

Asked `Mia has 46 pens and loses 2. How many?`, the model answers `Mia has 44 pens.$` or `44$`. The environment `judge`
sends question, right answer and response to a server with an OpenAI API. The server's score from 0 to 10, divided by
10, is the reward. The model is warm-started on answers of which three in four use the wrong operation, and half are
only a number. The problems are those of the recipe `gsm8k_turns`.
Deliberately omitted: a reference model and a KL term; a server for the judge. Use your own, or `tests/rule_judge.py`,
which grades by rule: 10 for the right sentence, 5 for only the right number, else 0.

Serve:    vllm serve MODEL --served-model-name judge      or, in a checkout:      python -m tests.rule_judge
Run:      rl train judge      (or with environment.options.url=http://HOST:PORT/v1 environment.options.model=NAME)
Look:     rl generate judge --output episodes.jsonl
Tiny:     rl train judge --tiny      (two steps of an untrained model: tests the code path, learns nothing)
Control:  rl train judge trainer.algorithm.advantage_estimator=rl_examples.controls:permuted_grpo_advantages
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from rl_core.config import Config
from rl_core.interfaces import Recipe
from rl_examples import gsm8k_turns
from rl_examples.small_runs import SmallRun, write_files

NUM_HELD_OUT = 400
START_ACCURACY = 0.15

_RUN = SmallRun(name="judge")

recipe = Recipe(
    summary="a small model learns to answer as a judge wants, on two CPU cores, in minutes; needs a judge server",
    config={
        **_RUN.settings,
        "environment.env_class": "judge",
        "environment.options.url": "http://127.0.0.1:8000/v1",
        "environment.options.model": "judge",
        "trainer.max_training_steps": 80,
        "trainer.eval_interval": 20,
        "generator.sampling_params.max_generate_length": 8,
    },
    tiny=_RUN.tiny,
    prepare="rl_examples.judge:prepare",
    makes=(_RUN.train, _RUN.held_out, _RUN.untrained_model, _RUN.start_model),
)


def problems() -> list[dict[str, str]]:
    """Returns the problems of `gsm8k_turns` with sentences as right answers. The first NUM_HELD_OUT are held out."""
    return [_problem(row["prompt"], row["answer"]) for row in gsm8k_turns.problems()]


def prepare(config: Config) -> None:
    """Creates the recipe's data and models if the configuration uses them and they are missing. The run's judge also
    scores the warm-started model."""
    options = {f"environment.options.{name}": value for name, value in config.environment.options.items()}
    write_files(
        config,
        _RUN,
        attrs.evolve(recipe, config={**recipe.config, **options}),
        problems(),
        num_held_out=NUM_HELD_OUT,
        demonstrate=demonstrated,
        write_model=write_model,
        target_accuracy=START_ACCURACY,
        updates_per_check=25,
    )


def write_model(directory: Path, *, seed: int) -> None:
    """Writes a freshly initialised Qwen3 of about 150,000 parameters, and its tokenizer of words and digits."""
    gsm8k_turns.write_model(directory, seed=seed, said="")


def demonstrated(problem: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """The problem with an answer for the warm start. With probability 3/4 the answer uses the wrong operation, and with
    probability 1/2 it is only a number."""
    name, has, right, thing = problem["reference"].split()
    wrong = gsm8k_turns.with_wrong_operation(problem["prompt"], right)
    said = right if rng.random() < 0.25 else wrong
    return {**problem, "answer": rng.choice((f"{name} {has} {said} {thing}", said))}


def _problem(question: str, answer: str) -> dict[str, str]:
    name, has, _, thing = question.split()[:4]
    return {"prompt": question, "reference": f"{name} {has} {answer} {thing}.", "env_class": "judge"}
