"""GRPO with a tool: a small model that cannot multiply learns to use a calculator, on two CPU cores, in minutes.

Asked `37*45=`, the model either answers `1665$` directly, or calls `<37*45>$`, receives `1665=`, and answers `1665$`.
A direct answer is right one time in thirty, an answer after a call nearly always. The model is warm-started on
demonstrations in which a fifth of the first turns are calls, so initially it calls a fifth of the time. Only the right
answer is rewarded; the model has to discover that calling pays off.
Deliberately omitted: a reference model and a KL term, a reward or cost for calling.

Run:      rl train calculator      (see what it plays: rl generate calculator --output episodes.jsonl)
Control:  rl train calculator environment.env_class=broken_pocket_calculator        (the tool answers nonsense)
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

from rl_core.config import Config
from rl_core.errors import DataError
from rl_core.interfaces import Action, Prompt, Recipe, Row, StepResult
from rl_environments.tools import Answer, BrokenCall, Call, CallFormat, ToolEnvironment, tool
from rl_examples.small_runs import SmallRun, write_files

NUM_HELD_OUT = 500
MAX_CALLS = 1

_RUN = SmallRun(name="calculator")

recipe = Recipe(
    summary="a small model learns to use a calculator, on two CPU cores, in a minute or two",
    config={
        **_RUN.settings,
        "environment.env_class": "pocket_calculator",
        "generator.max_turns": MAX_CALLS + 1,
        "generator.sampling_params.max_generate_length": 9,
    },
    prepare="rl_examples.calculator:prepare",
    makes=(_RUN.train, _RUN.held_out, _RUN.start_model),
)

START_ACCURACY = 0.15


class AngleCalls:
    """Parses calls such as `<37*45>`, for which a vocabulary of few characters is enough. Other text that begins with
    `<` is a broken call."""

    name = "angles"

    def read(self, text: str) -> Sequence[Call | BrokenCall]:
        """See `CallFormat.read`."""
        if not text.startswith("<"):
            return []
        left, times, right = text[1:-1].partition("*")
        if text.endswith(">") and times and left.isdecimal() and right.isdecimal():
            return [Call(name="multiply", arguments={"left": int(left), "right": int(right)})]
        return [BrokenCall(problem="expected <number*number>")]


class PocketCalculator(ToolEnvironment):
    """The reward is 1 if the response is exactly the row's `answer`, ends with the end token and follows at most one
    call, else 0. Metrics: `accuracy` (equal to the reward), `calls` and `wrong_calls`."""

    placement = "in_process"  # nothing here is slow
    call_format: ClassVar[CallFormat | None] = AngleCalls()

    @classmethod
    def require_row(cls, row: Row) -> None:
        """See `Environment.require_row`."""
        if not (isinstance(row.get("prompt"), str) and isinstance(row.get("answer"), str)):
            columns = ", ".join(map(str, row))
            raise DataError(f"a pocket_calculator row needs prompt and answer as text; the row has {columns}")

    @tool
    async def multiply(self, left: int, right: int) -> str:
        """The product of two numbers, in four digits or more."""
        return f"{left * right:04d}"

    def observation(self, answers: Sequence[Answer]) -> Prompt:
        """See `ToolEnvironment.observation`. The result comes directly before the model's next answer."""
        return "".join("?=" if answer.is_wrong else f"{answer.text}=" for answer in answers)

    async def step(self, action: Action) -> StepResult:
        """See `Environment.step`."""
        if action.stop_reason != "stop" or (self.num_calls == MAX_CALLS and action.text.startswith("<")):
            return StepResult(reward=0.0, done=True, metrics=self.metrics(0.0))
        return await super().step(action)

    async def judge(self, answer: str) -> float:
        """See `ToolEnvironment.judge`."""
        return float(answer == self.row["answer"])


class BrokenPocketCalculator(PocketCalculator):
    """The negative control: its calculator returns four random digits instead of the product."""

    @tool
    async def multiply(self, left: int, right: int) -> str:
        """Four random digits, presented as the product of two numbers."""
        return f"{random.Random(f'{left}*{right}').randrange(10_000):04d}"


def problems() -> list[dict[str, str]]:
    """Returns all products of two numbers below 100, in an order fixed by one seed; the first ones are held out."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(0).shuffle(pairs)
    return [
        {"prompt": f"{a:02d}*{b:02d}=", "answer": f"{a * b:04d}", "env_class": "pocket_calculator"} for a, b in pairs
    ]


def prepare(config: Config) -> None:
    """Creates the recipe's data and warm-started model if the configuration uses them and they are missing."""
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


def demonstrated(problem: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Returns one turn of the policy as a demonstration: four in six turns answer directly, one calls the calculator,
    and one answers after a call."""
    asked, answer = problem["prompt"], problem["answer"]
    call = f"<{asked[:-1]}>"
    turns = 4 * [problem] + [{**problem, "answer": call}, {**problem, "prompt": f"{asked}{call}${answer}="}]
    return rng.choice(turns)
