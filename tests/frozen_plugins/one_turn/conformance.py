"""What the package's author runs. Not collected with this repository's tests: it is installed first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from one_turn.generator import OneTurnGenerator

from rl_core.interfaces import Action, Generator, Prompt, Row, Sampler, StepResult
from rl_core.testing.generators import GeneratorConformance


class LikesDigits:
    """Environment: the share of digits in the answer."""

    def __init__(self, row: Row, options: Mapping[str, Any]):
        self._prompt = row["prompt"]

    async def reset(self) -> Prompt:
        return self._prompt

    async def step(self, action: Action) -> StepResult:
        return StepResult(reward=sum(map(str.isdigit, action.text)) / max(1, len(action.text)), done=True)

    async def close(self) -> None:
        pass


class TestOneTurnGenerator(GeneratorConformance):
    row: ClassVar = {"prompt": "count to 3: "}

    def create_generator(self, client: Sampler, tokenizer: Any) -> Generator:
        return OneTurnGenerator(client, tokenizer, lambda row: LikesDigits, {})
