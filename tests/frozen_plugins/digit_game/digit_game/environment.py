"""One question, one answer, a part of the reward for each digit that is right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_core.interfaces import Action, Prompt, Row, StepResult


class DigitGame:
    """Environment of one turn. `options["whole_only"]`: only the whole answer is worth anything."""

    def __init__(self, row: Row, options: Mapping[str, Any]):
        self._prompt: str = row["prompt"]
        self._answer: str = row["answer"]
        self._whole_only: bool = options.get("whole_only", False)

    async def reset(self) -> Prompt:
        return self._prompt

    async def step(self, action: Action) -> StepResult:
        is_right = action.text == self._answer
        digits = sum(said == meant for said, meant in zip(action.text, self._answer, strict=False))
        part = 0.0 if self._whole_only else digits / len(self._answer)
        return StepResult(reward=1.0 if is_right else part, done=True, metrics={"accuracy": float(is_right)})

    async def close(self) -> None:
        pass
