"""A generator's trajectories are checked, collated and merged before training."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest

from rl_core.errors import GenerationError
from rl_core.interfaces import Generator, GroupRequest, SamplingParams, Trajectory, TrajectoryStep
from rl_core.trainer.loop.rollouts import generate_group
from rl_core.trainer.update.collate import collate, merged

REQUEST = GroupRequest(
    group_id=3, row={}, row_place="train.jsonl:7", num_samples=2, params=SamplingParams(), seed=0, start_version=0
)


def step(tokens: Sequence[int], num_prompt: int, **changes: object) -> TrajectoryStep:
    sampled = [index >= num_prompt for index in range(len(tokens))]
    whole = TrajectoryStep(
        tokens=tokens,
        sampled=sampled,
        rollout_logprobs=[-0.5 * flag for flag in sampled],
        policy_version=[0 if flag else -1 for flag in sampled],
        reward=1.0,
        stop_reason="stop",
    )
    return attrs.evolve(whole, **changes)


def trajectory(sample_index: int, *steps: TrajectoryStep, **changes: object) -> Trajectory:
    whole = Trajectory(
        group_id=3, sample_index=sample_index, steps=steps, prompt_text="", response_text="", start_version=0
    )
    return attrs.evolve(whole, **changes)


@attrs.frozen
class Answers(Generator):
    """A generator that returns fixed trajectories."""

    trajectories: tuple[Trajectory, ...]

    def prompt_length(self, row: object) -> int:
        return 1

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        return self.trajectories


GOOD = (trajectory(0, step([1, 2], 1)), trajectory(1, failure="OSError: gone"))


async def test_samples_in_order_with_steps_or_a_failure_are_accepted():
    assert await generate_group(Answers(GOOD), REQUEST) == GOOD


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (GOOD[:1], r"must return 2 samples of group 3, in order; got \(group, sample\) \[\(3, 0\)\]"),
        (GOOD[::-1], r"\[\(3, 1\), \(3, 0\)\]"),
        ((GOOD[0], GOOD[0]), r"\[\(3, 0\), \(3, 0\)\]"),
        ((attrs.evolve(GOOD[0], group_id=4), GOOD[1]), r"\[\(4, 0\), \(3, 1\)\]"),
        ((GOOD[0], trajectory(1)), "sample 1 with 0 steps and failure None"),
        ((trajectory(0, step([1, 2], 1), failure="x"), GOOD[1]), "sample 0 with 1 steps and failure 'x'"),
    ],
)
async def test_answers_that_do_not_fit_the_request_are_refused(answer: tuple[Trajectory, ...], message: str):
    with pytest.raises(GenerationError, match=f"train.jsonl:7: the generator Answers.*{message}"):
        await generate_group(Answers(answer), REQUEST)


def test_without_token_rewards_a_steps_reward_is_on_its_last_sampled_token():
    several = step([1, 2, 3, 4], 1, reward=3.0, token_rewards=[0.0, 1.0, 0.0, 2.0])
    ends_unsampled = step([1, 2, 3], 1, sampled=[False, True, False])
    batch = collate([trajectory(0, several), trajectory(1, ends_unsampled)])
    assert batch["rewards"].tolist() == [0, 1, 0, 2, 0, 1, 0]
    with pytest.raises(GenerationError, match="fields differ in length"):
        collate([trajectory(0, attrs.evolve(several, token_rewards=[1.0]))])


def test_steps_that_continue_each_other_merge_and_keep_their_rewards():
    first, second = step([1, 2, 3], 1), step([1, 2, 3, 4, 5], 4, reward=2.0)
    other = step([9, 8], 1)
    batch, metrics = merged(collate([trajectory(0, first, second), trajectory(1, first, other)]))
    assert batch["tokens"].tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 9, 8]
    assert batch["sampled"].int().tolist() == [0, 1, 1, 0, 1, 0, 1, 1, 0, 1]
    assert batch["rewards"].tolist() == [0, 0, 1, 0, 2, 0, 0, 1, 0, 1]
    assert batch["trajectory_id"].tolist() == [0, 1, 1]
    assert batch["is_last_step"].tolist() == [True, False, True]
    assert metrics["rollout/merged_tokens"] == (pytest.approx(3), 13)
