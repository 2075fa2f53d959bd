"""GRPO over several tries: a small model adds, is told which digits are wrong, and corrects them, on two CPU cores.

Asked `37+45=`, it answers `290$` (lowest digit first, as sums are computed; right is 280), is told `+-+=`, a mark for
each digit, and tries again: `280$`. It has three tries. It is warm-started on tries whose digits are random half of the
time, except those already marked as right. Only the outcome is rewarded, so all tries of an episode share its
advantage: the model learns to add, to keep right digits, and to change wrong ones.
Deliberately omitted: a reference model and a KL term, a higher reward for the first try.

Run:      rl train second_try       (see what it plays: rl generate second_try --output episodes.jsonl)
Control:  rl train second_try trainer.algorithm.advantage_estimator=rl_examples.controls:permuted_grpo_advantages
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_core.config import Config, from_mapping
from rl_core.interfaces import Action, Prompt, Recipe, Row, StepResult
from rl_examples.arithmetic import ArithmeticEnvironment

NUM_HELD_OUT = 300
MAX_TRIES = 3

_DIRECTORY = "runs/second_try_data"
_TRAIN = f"{_DIRECTORY}/train.parquet"
_HELD_OUT = f"{_DIRECTORY}/held_out.parquet"
_START_MODEL = f"{_DIRECTORY}/start_model_seed${{trainer.seed}}"

recipe = Recipe(
    summary="a small model learns to correct its sums in three tries, on two CPU cores, in minutes",
    config={
        "data.train_data": [_TRAIN],
        "data.val_data": [_HELD_OUT],
        "environment.env_class": "second_try",
        "trainer.run_name": "second_try",
        "trainer.resume_mode": "none",
        "trainer.policy.model.path": _START_MODEL,
        "trainer.policy.optimizer_config.lr": 1e-3,
        "trainer.policy.optimizer_config.adam_betas": [0.9, 0.95],
        "trainer.policy.optimizer_config.weight_decay": 0.0,
        "trainer.policy.optimizer_config.num_warmup_steps": 5,
        "trainer.policy.optimizer_config.scheduler": "linear",
        "trainer.algorithm.eps_clip_high": 0.28,
        "trainer.seed": 0,
        "trainer.bf16": False,
        "trainer.gradient_checkpointing": False,
        "trainer.num_threads": 1,
        "trainer.max_training_steps": 100,
        "trainer.train_batch_size": 32,
        "trainer.policy_mini_batch_size": 32,
        "trainer.update_epochs_per_batch": 2,
        "trainer.micro_train_batch_size_per_gpu": 512,
        "trainer.micro_forward_batch_size_per_gpu": 512,
        "trainer.logprobs_chunk_size": 16384,
        "trainer.eval_interval": 20,
        "trainer.ckpt_interval": -1,
        "generator.max_turns": MAX_TRIES,
        "generator.max_input_length": 40,
        "generator.n_samples_per_prompt": 16,
        "generator.sampling_params.max_generate_length": 4,
        "generator.eval_sampling_params.temperature": 1.0,
    },
    prepare="rl_examples.second_try:prepare",
    makes=(_TRAIN, _HELD_OUT, _START_MODEL),
)

START_ACCURACY = 0.2


class SecondTry(ArithmeticEnvironment):
    """Reward 1 for exactly the row's `answer` in one of three tries; the episode is lost if a response is not three
    digits or the model does not end it itself. Metrics: `accuracy` (equal to the reward) and `tries`."""

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
    """The observation after a try: `+-+=` if the second of three digits is wrong."""
    return "".join("+" if mine == right else "-" for mine, right in zip(said, answer, strict=True)) + "="


def prepare(config: Config) -> None:
    """Creates the recipe's data and warm-started model if the configuration uses them and they are missing."""
    from rl_examples.arithmetic import problems, write_rows
    from rl_examples.whole_models import is_to_be_made

    rows = [{**row, "env_class": "second_try"} for row in problems()]
    for path, part in ((_TRAIN, rows[NUM_HELD_OUT:]), (_HELD_OUT, rows[:NUM_HELD_OUT])):
        if path in (*config.data.train_data, *config.data.val_data) and not Path(path).exists():
            write_rows(Path(path), part)
    directory = Path(_START_MODEL.replace("${trainer.seed}", str(config.trainer.seed)))
    if config.policy_model_path == str(directory) and is_to_be_made(directory):
        _write_start_model(directory, rows[NUM_HELD_OUT:], seed=config.trainer.seed)


def _write_start_model(directory: Path, rows: Sequence[dict[str, str]], *, seed: int) -> None:
    """Warm-starts the model on demonstrations, until enough of its samples are right."""
    from rl_core.trainer.data import DataRow
    from rl_examples.arithmetic import write_model
    from rl_examples.warm_start import WarmStart, warm_start
    from rl_examples.whole_models import make_whole

    untrained = directory.with_name(directory.name + ".untrained")
    make_whole(untrained, lambda partial: write_model(partial, seed=seed))
    config = from_mapping({**recipe.config, "trainer.seed": seed, "trainer.policy.model.path": str(untrained)})
    rng = random.Random(seed)
    shown = [DataRow(demonstrated(rng.choice(rows), rng), f"demonstration {number}") for number in range(20_000)]
    played = [DataRow(row, f"problem {number}") for number, row in enumerate(rows)]
    settings = WarmStart(target_accuracy=START_ACCURACY, temperature=1.0, updates_per_check=20)
    make_whole(directory, lambda partial: warm_start(config, shown, partial, settings, check_rows=played))


def demonstrated(problem: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """One try: keeps digits that were marked as right; half of the others are right, plus a few by chance."""
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
    """Keeps known digits; each other digit is the right one or a random one with equal probability."""
    digits = (
        right if mark == "+" or rng.random() < 0.5 else str(rng.randrange(10))
        for mark, right in zip(heard, answer, strict=False)
    )
    return "".join(digits)
