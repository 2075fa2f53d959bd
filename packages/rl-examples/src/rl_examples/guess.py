"""GRPO on a game of several turns: find a number from 0 to 9 in four guesses, with a hint after each wrong one.

An example is `?=5$<=2$>=3$`: the game asks `?`; the model guesses 5; the number is smaller; it guesses 2; the
number is larger; it guesses 3, which is right. The game's text is never trained on. The model is warm-started on random
guesses, which find one number in three; bisection finds all of them.
Deliberately omitted: a reference model and a KL term, a reward for finding the number sooner.

Run:      rl train guess      (2 cores; see what it plays: rl generate guess --output guesses.jsonl)
Experts:  rl train guess trainer.policy.model.path=runs/guess_data/start_moe_model_seed0      (a small Qwen3-MoE)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_core.config import Config, from_mapping
from rl_core.errors import DataError
from rl_core.interfaces import Action, Environment, Prompt, Recipe, Row, StepResult
from rl_environments.options import own_options

MAX_GUESSES = 4
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '$' if m.role == 'assistant' else '=' }}{% endfor %}"
"""The game's text ends with `=`, which opens the model's turn; a guess ends with `$`."""

_NUMBERS = "runs/guess_data/numbers.parquet"
_START_MODEL = "runs/guess_data/start_model_seed${trainer.seed}"
_START_MOE_MODEL = "runs/guess_data/start_moe_model_seed${trainer.seed}"

recipe = Recipe(
    summary="a small model learns to guess a number in four turns, on two CPU cores",
    config={
        "data.train_data": [_NUMBERS],
        "data.val_data": [_NUMBERS],
        "environment.env_class": "guess",
        "trainer.run_name": "guess",
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
        "trainer.epochs": 80,
        "trainer.train_batch_size": 20,
        "trainer.policy_mini_batch_size": 20,
        "trainer.update_epochs_per_batch": 2,
        "trainer.micro_train_batch_size_per_gpu": 512,
        "trainer.micro_forward_batch_size_per_gpu": 1024,
        "trainer.logprobs_chunk_size": 16384,
        "trainer.eval_interval": 10,
        "trainer.ckpt_interval": -1,
        "generator.max_turns": MAX_GUESSES,
        "generator.n_samples_per_prompt": 16,
        "generator.sampling_params.max_generate_length": 2,
    },
    prepare="rl_examples.guess:prepare",
    makes=(_NUMBERS, _START_MODEL, _START_MOE_MODEL),
)


class GuessEnvironment(Environment):
    """The reward is 1 if the policy finds the row's `number` in four guesses, else 0. Metrics: `accuracy` (equal to the
    reward) and `guesses`.

    The game is lost if a response is not exactly one digit followed by the end token.
    """

    placement = "in_process"  # nothing here is slow

    def __init__(self, row: Row, options: Mapping[str, Any]):
        self._number: int = row["number"]
        self._guesses = 0

    @classmethod
    def require_options(cls, options: Mapping[str, Any]) -> None:
        """See `Environment.require_options`."""
        own_options(options, "guess", [])

    @classmethod
    def require_row(cls, row: Row) -> None:
        """See `Environment.require_row`."""
        if row.get("number") not in range(10):
            raise DataError(f"a guess row needs a number from 0 to 9; got number={row.get('number')!r}")

    async def reset(self) -> Prompt:
        return [{"role": "user", "content": "?"}]

    async def step(self, action: Action) -> StepResult:
        self._guesses += 1
        is_guess = action.text in tuple("0123456789") and action.stop_reason == "stop"
        is_found = is_guess and int(action.text) == self._number
        # Every turn reports the metrics, so that games cut short by a limit count too.
        metrics = {"accuracy": float(is_found), "guesses": float(self._guesses)}
        if is_found or not is_guess or self._guesses == MAX_GUESSES:
            return StepResult(reward=float(is_found), done=True, metrics=metrics)
        hint = "<" if self._number < int(action.text) else ">"
        return StepResult(reward=0.0, done=False, observation=[{"role": "user", "content": hint}], metrics=metrics)


def prepare(config: Config) -> None:
    """Creates the recipe's data and warm-started model if the configuration uses them and they are missing."""
    from rl_examples.arithmetic import write_missing_rows
    from rl_examples.whole_models import is_to_be_made

    write_missing_rows(config, {_NUMBERS: numbers()})
    for start_model, write in ((_START_MODEL, write_model), (_START_MOE_MODEL, write_moe_model)):
        directory = start_model.replace("${trainer.seed}", str(config.trainer.seed))
        if config.policy_model_path == directory and is_to_be_made(Path(directory)):
            _write_start_model(Path(directory), write, seed=config.trainer.seed)


def numbers() -> list[dict[str, Any]]:
    """Returns one row per number; these are all possible games."""
    return [{"prompt": "?", "number": number, "env_class": "guess"} for number in range(10)]


def write_model(directory: Path, *, seed: int) -> None:
    """Writes the untrained model and its tokenizer with the game's chat template."""
    from rl_examples import arithmetic
    from rl_examples.tiny_model import add_chat_template

    arithmetic.write_model(directory, seed=seed)
    add_chat_template(directory, CHAT_TEMPLATE)


def write_moe_model(directory: Path, *, seed: int) -> None:
    """Writes a model like `write_model`, but with four experts in every layer, two of which serve each token."""
    from rl_examples import arithmetic
    from rl_examples.tiny_model import add_chat_template

    arithmetic.write_moe_model(directory, seed=seed)
    add_chat_template(directory, CHAT_TEMPLATE)


def _write_start_model(directory: Path, write: Callable[..., None], *, seed: int) -> None:
    """Warm-starts the model on random guesses, until its greedy games sometimes find the number."""
    from rl_core.trainer.groups import DataRow
    from rl_examples.warm_start import WarmStart, warm_start
    from rl_examples.whole_models import make_whole

    untrained = directory.with_name(directory.name + ".untrained")
    make_whole(untrained, lambda partial: write(partial, seed=seed))
    config = from_mapping({**recipe.config, "trainer.seed": seed, "trainer.policy.model.path": str(untrained)})
    rng = random.Random(seed)
    rows = [DataRow(_random_turn(rng), f"game {number}") for number in range(4000)]
    # A model that always makes the same valid guess finds one number in ten.
    settings = WarmStart(target_accuracy=0.1, updates_per_check=40)
    make_whole(directory, lambda partial: warm_start(config, rows, partial, settings))


def _random_turn(rng: random.Random) -> dict[str, Any]:
    """Returns a demonstration: the prompt is a game of 0 to 3 wrong random guesses, the answer is a random guess."""
    number, said = rng.randrange(10), "?="
    for _ in range(rng.randrange(MAX_GUESSES)):
        guess = rng.choice([digit for digit in range(10) if digit != number])
        said += f"{guess}${'<' if number < guess else '>'}="
    return {"prompt": said, "answer": str(rng.randrange(10)), "number": number, "env_class": "guess"}
