"""GRPO over several tries: a small model adds, reads which digits are wrong, and corrects them, on two CPU cores.

Asked `37+45=`, the model answers `290$` (lowest digit first, as sums are computed; 280 is right), receives `+-+=`, a
mark for each digit, and tries again: `280$`. It has three tries. The model is warm-started on tries that keep the
digits marked as right, and in which each remaining digit is random half of the time. Only the outcome is rewarded, so
all tries of an episode share one advantage: the model learns to add, to keep right digits, and to change wrong ones.
Deliberately omitted: a reference model and a KL term, a higher reward for the first try.

Run:      rl train second_try       (see what it plays: rl generate second_try --output episodes.jsonl)
Control:  rl train second_try trainer.algorithm.advantage_estimator=rl_examples.controls:permuted_grpo_advantages
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from rl_core.config import Config
from rl_core.interfaces import Action, Prompt, Recipe, Row, StepResult
from rl_examples.arithmetic import ArithmeticEnvironment
from rl_examples.small_runs import SmallRun, write_files

NUM_HELD_OUT = 300
MAX_TRIES = 3

_RUN = SmallRun(name="second_try")

recipe = Recipe(
    summary="a small model learns to correct its sums in three tries, on two CPU cores, in minutes",
    config={
        **_RUN.settings,
        "environment.env_class": "second_try",
        "trainer.policy.optimizer_config.scheduler": "linear",
        "trainer.max_training_steps": 100,
        "trainer.micro_train_batch_size_per_gpu": 512,
        "trainer.micro_forward_batch_size_per_gpu": 512,
        "trainer.eval_interval": 20,
        "generator.max_turns": MAX_TRIES,
        "generator.n_samples_per_prompt": 16,
        "generator.sampling_params.max_generate_length": 4,
    },
    prepare="rl_examples.second_try:prepare",
    makes=(_RUN.train, _RUN.held_out, _RUN.start_model),
)

START_ACCURACY = 0.2


class SecondTry(ArithmeticEnvironment):
    """The reward is 1 if one of three tries is exactly the row's `answer`, else 0. A response that is not three digits
    followed by the end token ends the episode. Metrics: `accuracy` (equal to the reward) and `tries`."""

    def __init__(self, row: Row, options: Mapping[str, Any]):
        super().__init__(row, options)
        self._tries = 0

    async def reset(self) -> Prompt:
        return self._prompt

    async def step(self, action: Action) -> StepResult:
        self._tries += 1
        is_try = len(action.text) == len(self._answer) and action.text.isdecimal() and action.stop_reason == "stop"
        is_right = is_try and action.text == self._answer
        metrics = {"accuracy": float(is_right), "tries": float(self._tries)}
        if is_right or not is_try or self._tries == MAX_TRIES:
            return StepResult(reward=float(is_right), done=True, metrics=metrics)
        return StepResult(reward=0.0, done=False, observation=marks(action.text, self._answer), metrics=metrics)


def marks(said: str, answer: str) -> str:
    """Returns the observation after a try, such as `+-+=` if only the second of three digits is wrong."""
    return "".join("+" if mine == right else "-" for mine, right in zip(said, answer, strict=True)) + "="


def prepare(config: Config) -> None:
    """Creates the recipe's data and warm-started model if the configuration uses them and they are missing."""
    from rl_examples.arithmetic import problems

    write_files(
        config,
        _RUN,
        recipe,
        [{**row, "env_class": "second_try"} for row in problems()],
        num_held_out=NUM_HELD_OUT,
        demonstrate=demonstrated,
        target_accuracy=START_ACCURACY,
        updates_per_check=20,
    )


def demonstrated(problem: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Returns a demonstration: one try, with up to two earlier tries in its prompt. `_guess` chooses their digits."""
    answer: str = problem["answer"]
    said, heard = problem["prompt"], "-" * len(answer)
    guess = _guess(heard, answer, rng)
    for _ in range(rng.randrange(MAX_TRIES)):
        if guess == answer:
            break
        heard = marks(guess, answer)
        said += f"{guess}${heard}"
        guess = _guess(heard, answer, rng)
    return {**problem, "prompt": said, "answer": guess}


def _guess(heard: str, answer: str, rng: random.Random) -> str:
    """Returns the digits of a try: digits marked as right stay; each remaining digit is, with equal probability, the
    right one or a random one."""
    digits = (
        right if mark == "+" or rng.random() < 0.5 else str(rng.randrange(10))
        for mark, right in zip(heard, answer, strict=False)
    )
    return "".join(digits)
