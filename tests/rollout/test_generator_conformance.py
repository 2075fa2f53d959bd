"""The environment generator passes the conformance suite, and generators that cheat fail it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import pytest

from rl_core.errors import GenerationError
from rl_core.interfaces import GroupRequest, StepResult, Trajectory
from rl_core.testing.generators import GeneratorConformance
from rl_rollout.chat import TokenCodec
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes

ROW = {"prompt": "count to 3: "}


class ThreeTurns:
    """Ends after three responses."""

    def __init__(self, row: Any, options: Any) -> None:
        self._prompt, self._turn = row["prompt"], 0

    async def reset(self) -> str:
        return self._prompt

    async def step(self, action: Any) -> StepResult:
        self._turn += 1
        is_done = self._turn == 3
        return StepResult(reward=1.0, done=is_done, observation=None if is_done else f" {self._turn}? ")

    async def close(self) -> None: ...


def generator_of(client: Any, tokenizer: Any, *, step_wise: bool = False, **limits: Any) -> EnvironmentGenerator:
    codec = TokenCodec(tokenizer, chat_template_kwargs={})
    return EnvironmentGenerator(
        client,
        codec,
        Episodes(environment_of=lambda row: ThreeTurns, limits=Limits(max_turns=3, **limits), step_wise=step_wise),
    )


class TestEnvironmentGenerator(GeneratorConformance):
    row: ClassVar = ROW

    def create_generator(self, client, tokenizer):
        return generator_of(client, tokenizer)


class TestStepWise(GeneratorConformance):
    row: ClassVar = ROW

    def create_generator(self, client, tokenizer):
        return generator_of(client, tokenizer, step_wise=True)


@attrs.frozen
class Tampered:
    """The generator, with a change made to each trajectory."""

    inner: EnvironmentGenerator
    tamper: Callable[[Trajectory], Trajectory]

    def prompt_length(self, row: Any) -> int:
        return self.inner.prompt_length(row)

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        return tuple(self.tamper(trajectory) for trajectory in await self.inner.generate(request))


def on_step(**changes: Callable[[Any], Any]) -> Callable[[Trajectory], Trajectory]:
    """Makes a function that changes fields of a trajectory's last step."""

    def tamper(trajectory: Trajectory) -> Trajectory:
        step = trajectory.steps[-1]
        values = {name: change(step) for name, change in changes.items()}
        return attrs.evolve(trajectory, steps=(*trajectory.steps[:-1], attrs.evolve(step, **values)))

    return tamper


TAMPERS = {
    "encoded anew": on_step(tokens=lambda step: [*step.tokens[:-2], step.tokens[-1], step.tokens[-2]]),
    "observations count as sampled": on_step(sampled=lambda step: [True] * len(step.sampled)),
    "a turn is left out": on_step(
        sampled=lambda step: [flag and i > len(step.sampled) // 2 for i, flag in enumerate(step.sampled)]
    ),
    "log-probs are shifted": on_step(rollout_logprobs=lambda step: [0.0, *step.rollout_logprobs[:-1]]),
    "versions are made up": on_step(policy_version=lambda step: [9 * flag for flag in step.sampled]),
    "group is another": lambda trajectory: attrs.evolve(trajectory, group_id=77),
    "samples are in another order": lambda trajectory: attrs.evolve(
        trajectory, sample_index=5 - trajectory.sample_index
    ),
    "nothing was played": lambda trajectory: attrs.evolve(trajectory, steps=()),
}


@pytest.mark.parametrize("name", TAMPERS)
def test_a_generator_that_cheats_is_rejected(name: str):
    class Suite(GeneratorConformance):
        row: ClassVar = ROW

        def create_generator(self, client, tokenizer):
            return Tampered(generator_of(client, tokenizer), TAMPERS[name])

    with pytest.raises((AssertionError, GenerationError)):
        Suite().test_what_the_engine_sampled_is_what_is_trained_on()
