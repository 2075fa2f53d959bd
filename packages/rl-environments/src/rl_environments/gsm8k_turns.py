"""The environment `gsm8k_turns`: the policy answers a GSM8K question, is told whether the answer is right,
and may correct it in later turns.

Row:       `prompt`, and a number as `answer` or `reward_spec.ground_truth` (as in rows of `rl_examples.gsm8k_data`)
Reward:    1 for the right number after `####` in the first try, `later_reward` in a later one, else 0
Options:   `max_tries` (3; `generator.max_turns` must be at least as large), `later_reward` (1.0)
Metrics:   `accuracy` (right in any try), `first_accuracy`, `tries`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_core.interfaces import Action, Environment, Prompt, Row, StepResult
from rl_environments.answers import number_behind_hashes, number_of_row, require_prompt
from rl_environments.options import number_up_to, own_options, whole_number

WRONG = "That is not the right number. Find the mistake, correct it, and end with #### and the number."
NO_NUMBER = "There is no number behind ####. End your answer with #### and the number."


class Gsm8kTurnsEnvironment(Environment):
    """See the module."""

    placement = "in_process"  # nothing here is slow

    def __init__(self, row: Row, options: Mapping[str, Any]) -> None:
        self._prompt: Prompt = row["prompt"]
        self._answer = number_of_row(row, "gsm8k_turns")
        self._max_tries, self._later_reward = _settings(options)
        self._tries = 0

    @classmethod
    def require_options(cls, options: Mapping[str, Any]) -> None:
        """See `Environment.require_options`."""
        _settings(options)

    @classmethod
    def require_row(cls, row: Row) -> None:
        """See `Environment.require_row`."""
        require_prompt(row, "gsm8k_turns")
        number_of_row(row, "gsm8k_turns")

    async def reset(self) -> Prompt:
        """See `Environment.reset`."""
        return self._prompt

    async def step(self, action: Action) -> StepResult:
        """See `Environment.step`."""
        self._tries += 1
        number = number_behind_hashes(action.answer)
        is_right = number == self._answer
        metrics = {
            "accuracy": float(is_right),
            "first_accuracy": float(is_right and self._tries == 1),
            "tries": float(self._tries),
        }
        if is_right or self._tries == self._max_tries:
            reward = (1.0 if self._tries == 1 else self._later_reward) if is_right else 0.0
            return StepResult(reward=reward, done=True, metrics=metrics)
        said = NO_NUMBER if number is None else WRONG
        # In a text episode, only blank lines separate the environment's text from the policy's.
        observation = f"\n\n{said}\n\n" if isinstance(self._prompt, str) else said
        return StepResult(reward=0.0, done=False, observation=observation, metrics=metrics)


def _settings(options: Mapping[str, Any]) -> tuple[int, float]:
    """Returns `max_tries` and `later_reward`."""
    own = own_options(options, "gsm8k_turns", ["max_tries", "later_reward"])
    return whole_number(own, "max_tries", 3), number_up_to(own, "later_reward", 1.0, highest=1)
