"""GRPO on GSM8K: samples several answers to each question, and rewards those with the right number after ####.

Deliberately omitted: a critic (the group's mean is the baseline), a KL term, a format reward.
Data:      python -m rl_examples.gsm8k_data --train train.jsonl --test test.jsonl --output ~/data/gsm8k
Real run:  rl train gsm8k data.train_data=[~/data/gsm8k/train.parquet] data.val_data=[~/data/gsm8k/validation.parquet]
Tiny:      rl train gsm8k --tiny      (2 cores, a random model, handwritten problems: tests the code path)
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from rl_core.config import Config
from rl_core.errors import DataError
from rl_core.interfaces import Action, Environment, Prompt, Recipe, Row, StepResult
from rl_environments.answers import finite_number, number_behind_hashes
from rl_examples.gsm8k_data import HOW_TO_MAKE, write_tiny_data

_TINY_TRAIN = "runs/gsm8k_tiny_data/train.parquet"
_TINY_VALIDATION = "runs/gsm8k_tiny_data/validation.parquet"
_TINY_MODEL = "runs/gsm8k_tiny_data/start_model"

recipe = Recipe(
    summary="GRPO on grade-school mathematics, with the field's usual rows and settings",
    config={
        "data.train_data": ["~/data/gsm8k/train.parquet"],
        "data.val_data": ["~/data/gsm8k/validation.parquet"],
        "environment.env_class": "gsm8k",
        "trainer.run_name": "gsm8k",
        "trainer.policy.model.path": "Qwen/Qwen2.5-1.5B-Instruct",
        "trainer.policy.optimizer_config.lr": 1e-6,
        "trainer.algorithm.advantage_estimator": "grpo",
        "trainer.epochs": 20,
        "trainer.train_batch_size": 1024,
        "trainer.policy_mini_batch_size": 256,
        "trainer.max_tokens_per_microbatch": 32768,
        "trainer.eval_interval": 5,
        "generator.n_samples_per_prompt": 5,
        "generator.sampling_params.max_generate_length": 1024,
    },
    tiny={
        "data.train_data": [_TINY_TRAIN],
        "data.val_data": [_TINY_VALIDATION],
        "trainer.run_name": "gsm8k_tiny",
        "trainer.policy.model.path": _TINY_MODEL,
        "trainer.bf16": False,
        "trainer.num_threads": 1,
        "trainer.max_training_steps": 5,
        "trainer.train_batch_size": 4,
        "trainer.policy_mini_batch_size": 4,
        "trainer.max_tokens_per_microbatch": 4096,
        "generator.n_samples_per_prompt": 4,
        "generator.sampling_params.max_generate_length": 32,
    },
    prepare="rl_examples.gsm8k:prepare",
    needs=HOW_TO_MAKE,
    makes=(_TINY_TRAIN, _TINY_VALIDATION, _TINY_MODEL),
)


class Gsm8kEnvironment(Environment):
    """The reward is 1 if the last number that follows a `####` in the response equals the row's, else 0. Metrics:
    `accuracy` (equal to the reward) and `has_answer`."""

    placement = "in_process"  # nothing here is slow

    def __init__(self, row: Row, options: Mapping[str, Any]):
        self._prompt: Prompt = row["prompt"]
        self._ground_truth = ground_truth(row)

    @classmethod
    def require_row(cls, row: Row) -> None:
        """See `Environment.require_row`."""
        ground_truth(row)

    async def reset(self) -> Prompt:
        return self._prompt

    async def step(self, action: Action) -> StepResult:
        answer = number_behind_hashes(action.answer)
        reward = float(answer is not None and answer == self._ground_truth)
        metrics = {"accuracy": reward, "has_answer": float(answer is not None)}
        return StepResult(reward=reward, done=True, metrics=metrics)


def ground_truth(row: Row) -> Decimal:
    """Returns the row's number, from `reward_spec.ground_truth`. Raises DataError if the row has none."""
    spec = row.get("reward_spec")
    number = finite_number(spec.get("ground_truth")) if isinstance(spec, Mapping) else None
    if number is None:
        columns = ", ".join(map(str, row))
        raise DataError(
            f"a gsm8k row needs reward_spec.ground_truth, a number; got reward_spec={spec!r} (the row has {columns})"
        )
    return number


def prepare(config: Config) -> None:
    """Creates the tiny run's data and model if the configuration uses them and they are missing."""
    from rl_examples.tiny_model import write_tiny_chat_model
    from rl_examples.whole_models import is_to_be_made, make_whole

    for path, split in ((_TINY_TRAIN, "train"), (_TINY_VALIDATION, "validation")):
        if path in (*config.data.train_data, *config.data.val_data) and not Path(path).exists():
            write_tiny_data(Path(path), split=split)
    if config.policy_model_path == _TINY_MODEL and is_to_be_made(Path(_TINY_MODEL)):
        make_whole(Path(_TINY_MODEL), lambda partial: write_tiny_chat_model(partial, seed=0))
