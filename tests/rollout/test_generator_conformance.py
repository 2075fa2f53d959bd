"""The environment generator passes the conformance suite, and generators that cheat fail it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import attrs
import pytest

from rl_core.interfaces import Environment, Generator, GroupRequest, StepResult, Trajectory, TrajectoryStep
from rl_rollout.chat import TokenCodec
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes
from rl_transformers.testing.generators import GeneratorConformance

ROW = {"prompt": "count to 3: "}


class ThreeTurns(Environment):
    """Ends after three responses."""

    def __init__(self, row: Any, options: Any) -> None:
        self._prompt, self._turn = row["prompt"], 0

    async def reset(self) -> str:
        return self._prompt

    async def step(self, action: Any) -> StepResult:
        self._turn += 1
        is_done = self._turn == 3
        return StepResult(reward=1.0, done=is_done, observation=None if is_done else f" {self._turn}? ")


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
class Tampered(Generator):
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


def late(step: TrajectoryStep) -> list[bool]:
    """Marks the sampled tokens of the step's second half."""
    return [flag and i > len(step.sampled) // 2 for i, flag in enumerate(step.sampled)]


def only_late(values: Sequence[Any], step: TrajectoryStep, other: Any) -> list[Any]:
    """The values of late tokens, and `other` for all other tokens."""
    return [value if is_late else other for value, is_late in zip(values, late(step), strict=True)]


def shifted_logprobs(step: TrajectoryStep) -> list[float]:
    """Shifted log-probs: each sampled token has the next sampled token's log-prob, and the last has the first's."""
    logprobs = [value for value, flag in zip(step.rollout_logprobs, step.sampled, strict=True) if flag]
    following = iter(logprobs[1:] + logprobs[:1])
    return [next(following) if flag else 0.0 for flag in step.sampled]


TAMPERS = {
    "two tokens are swapped": (
        on_step(tokens=lambda step: [*step.tokens[:-2], step.tokens[-1], step.tokens[-2]]),
        "the step does not begin with the tokens of the request and its answer",
    ),
    "observations count as sampled": (
        on_step(sampled=lambda step: [True] * len(step.sampled)),
        "the log-prob of a sampled token is not the engine's",
    ),
    "a turn is left out": (
        on_step(
            sampled=late,
            rollout_logprobs=lambda step: only_late(step.rollout_logprobs, step, 0.0),
            policy_version=lambda step: only_late(step.policy_version, step, -1),
        ),
        "each sampled token must be trained on once",
    ),
    "log-probs are shifted": (on_step(rollout_logprobs=shifted_logprobs), "the log-prob belongs to another token"),
    "versions are made up": (
        on_step(policy_version=lambda step: [9 if flag else -1 for flag in step.sampled]),
        "the version belongs to another token",
    ),
    "group is another": (lambda trajectory: attrs.evolve(trajectory, group_id=77), r"\[\(77, 0\)"),
    "samples are in another order": (
        lambda trajectory: attrs.evolve(trajectory, sample_index=5 - trajectory.sample_index),
        r"\[\(\d+, 5\)",
    ),
    "nothing was played": (lambda trajectory: attrs.evolve(trajectory, steps=()), "assert False == "),
}
"""Name → change to a trajectory, and how the suite's error names it."""


@pytest.mark.parametrize("name", TAMPERS)
def test_a_generator_that_cheats_is_rejected(name: str):
    tamper, error = TAMPERS[name]

    class Suite(GeneratorConformance):
        row: ClassVar = ROW

        def create_generator(self, client, tokenizer):
            return Tampered(generator_of(client, tokenizer), tamper)

    with pytest.raises(AssertionError, match=error):
        Suite().test_what_the_engine_sampled_is_what_is_trained_on()
