"""Environments that force a response with a grammar. Environment processes import this module, so it imports little."""

from __future__ import annotations

import json
from typing import Any

from rl_core.interfaces import Environment, StepResult

CALL = r"add=[0-9]{1,2},[0-9]{1,2}\."
"""Text that a random model with one token per character almost never writes by chance."""


class Forces(Environment):
    """Three turns with rewards of 1, 2 and 4. A grammar forces the second response to be a call like `add=12,3.`"""

    forces_responses = True

    def __init__(self, row: Any, options: Any) -> None:
        self._turn = 0

    async def reset(self) -> Any:
        return "count= "

    async def structural_tag(self, example_call: str | None) -> str | None:
        tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": CALL}}
        return json.dumps(tag) if self._turn == 1 else None

    async def step(self, action: Any) -> StepResult:
        self._turn += 1
        is_done = self._turn == 3
        observation = None if is_done else f"{self._turn},"
        return StepResult(reward=2.0 ** (self._turn - 1), done=is_done, observation=observation)


class ForcesEveryTurn(Forces):
    async def structural_tag(self, example_call: str | None) -> str | None:
        return '{"type": "structural_tag", "format": {"type": "regex", "pattern": "[0-9]"}}'


class ForcesByAMapping(Forces):
    async def structural_tag(self, example_call: str | None) -> Any:
        return {"type": "structural_tag"}
