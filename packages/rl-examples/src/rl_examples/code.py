"""GRPO on programs: a small model learns to write functions that do what examples show, on two CPU cores, in minutes.

Asked `f(0,0)=4,f(1,0)=6,f(0,1)=7`, it writes `f=lambda x,y:2*x+3*y+4` in a fenced block. The environment `code` runs
this program in its sandbox, once for each of the row's four tests. The reward is the fraction of tests that pass: a
program with the right constant and one right coefficient gets a half. The model is warm-started on demonstrations in
which half of the coefficients are wrong, because the constant was not subtracted: `6*x`, from `f(1,0)=6`, instead of
`2*x`. Held-out functions occur in no demonstration or training problem.
Deliberately omitted: a reference model, a KL term, programs that read standard input.

Run:      rl train code       (needs bubblewrap, or root and Landlock: docs/sandbox.md)
Look:     rl generate code --output episodes.jsonl
Tiny:     rl train code --tiny      (two steps of an untrained model: tests the code path, learns nothing)
Control:  rl train code trainer.algorithm.advantage_estimator=rl_examples.controls:permuted_grpo_advantages
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.config import Config
from rl_core.interfaces import Recipe
from rl_examples.small_runs import SmallRun, write_files

NUM_HELD_OUT = 129
START_ACCURACY = 0.2
CHARACTERS = "0123456789+*(),=:fabdelmxy` \n?"

_RUN = SmallRun(name="code")

recipe = Recipe(
    summary="a small model learns to write functions that pass tests in a sandbox, on two CPU cores, in minutes",
    config={
        **_RUN.settings,
        "environment.env_class": "code",
        "environment.options.reward": "fraction",
        # With a learning rate of 1e-3 and 16 prompts per step, half of the programs became syntax errors within a few
        # steps, and the final held-out accuracy was 0.69.
        "trainer.policy.optimizer_config.lr": 5e-4,
        "trainer.max_training_steps": 24,
        "trainer.eval_interval": 12,
        "generator.sampling_params.max_generate_length": 33,
    },
    tiny=_RUN.tiny,
    prepare="rl_examples.code:prepare",
    makes=(_RUN.train, _RUN.held_out, _RUN.untrained_model, _RUN.start_model),
)


def problems() -> list[dict[str, str]]:
    """Returns all functions `a*x+b*y+c` with coefficients from 1 to 9, in an order fixed by one seed; the first ones
    are held out. The four tests check the constant, `a`, `b`, and both together."""
    rows = [_problem(a, b, c) for a, b, c in itertools.product(range(1, 10), repeat=3)]
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
        write_model=write_model,
        target_accuracy=START_ACCURACY,
        updates_per_check=100,
        rows_per_check=200,
    )


def write_model(directory: Path, *, seed: int) -> None:
    """Writes a freshly initialised Qwen3 of about 150,000 parameters, and its tokenizer of characters."""
    from rl_examples.arithmetic import write_model as write_character_model

    write_character_model(directory, seed=seed, characters=CHARACTERS)


def demonstrated(problem: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Returns one program as a demonstration. Each coefficient is wrong with probability 1/2: it is then the value that
    the prompt shows, from which the constant was not subtracted."""
    constant, with_x, with_y = (int(value) for value in re.findall(r"=(\d+)", problem["prompt"]))
    a, b = (value - rng.choice((0, constant)) for value in (with_x, with_y))
    return {**problem, "answer": f"```\nf=lambda x,y:{a}*x+{b}*y+{constant}\n```"}


def _problem(a: int, b: int, c: int) -> dict[str, str]:
    tests = [
        {"function": "f", "input": [x, y], "output": a * x + b * y + c} for x, y in ((0, 0), (2, 0), (0, 3), (4, 5))
    ]
    prompt = f"f(0,0)={c},f(1,0)={a + c},f(0,1)={b + c}\n"
    return {"prompt": prompt, "tests": json.dumps(tests), "env_class": "code"}
