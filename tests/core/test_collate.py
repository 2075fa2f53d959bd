from __future__ import annotations

import attrs
import numpy as np
import pytest

from rl_core.errors import GenerationError
from rl_core.interfaces import KeptTokens, Trajectory, TrajectoryStep
from rl_core.trainer.update.collate import collate
from rl_core.trainer.update.step_merging import merge_steps


def step(tokens: list[int], num_prompt: int, reward: float = 0.0, routes: np.ndarray | None = None) -> TrajectoryStep:
    sampled = [index >= num_prompt for index in range(len(tokens))]
    return TrajectoryStep(
        tokens=tokens,
        sampled=sampled,
        rollout_logprobs=[-0.5 * flag for flag in sampled],
        policy_version=[3 if flag else -1 for flag in sampled],
        reward=reward,
        stop_reason="stop",
        routed_experts=routes,
    )


def trajectory(group: int, *steps: TrajectoryStep) -> Trajectory:
    return Trajectory(
        group_id=group, sample_index=0, steps=steps, prompt_text="", response_text="", start_version=3, metrics={}
    )


def test_steps_are_laid_end_to_end_with_their_reward_on_the_last_sampled_token():
    observed_after = attrs.evolve(step([8, 9, 10], 1, reward=2.0), sampled=[False, True, False])
    batch = collate([trajectory(7, step([1, 2, 3], 2, reward=1.0)), trajectory(9, step([4, 5], 1), observed_after)])
    assert batch["tokens"].tolist() == [1, 2, 3, 4, 5, 8, 9, 10]
    assert batch["rewards"].tolist() == [0, 0, 1, 0, 0, 0, 2, 0]
    assert batch["group_id"].tolist() == [7, 9, 9]
    assert batch["trajectory_id"].tolist() == [0, 1, 1]
    assert batch["step_index"].tolist() == [0, 0, 1]
    assert batch["is_last_step"].tolist() == [True, False, True]
    assert batch["loss_mask"].tolist() == batch["sampled"].tolist()
    assert batch.prompt_lengths.tolist() == [2, 1, 1]


def test_routes_of_the_first_tokens_are_kept_and_the_others_are_marked_unknown():
    routes = np.arange(4, dtype=np.uint8).reshape(2, 1, 2)
    batch = collate([trajectory(1, step([1, 2, 3], 2, routes=routes)), trajectory(2, step([4, 5], 1))])
    assert batch["routed_experts"][:2].tolist() == routes.tolist()
    assert batch["routed"].tolist() == [True, True, False, False, False]


def test_expert_ids_above_255_are_kept_next_to_uint8_routes():
    few, many = np.array([[[3, 200]]], np.uint8), np.array([[[300, 4]]], np.int16)
    batch = collate([trajectory(1, step([1, 2], 1, routes=few)), trajectory(2, step([4, 5], 1, routes=many))])
    assert batch["routed_experts"][batch["routed"]].tolist() == [[[3, 200]], [[300, 4]]]


def kept_step(tokens: list[int], num_prompt: int, *kept: list[int]) -> TrajectoryStep:
    record = KeptTokens.of_each([*([],) * num_prompt, *kept])
    return attrs.evolve(step(tokens, num_prompt), kept_tokens=record)


def test_kept_tokens_stand_at_their_tokens_and_survive_a_merge():
    turns = [kept_step([1, 2, 3], 1, [2, 9], [3, 4, 5]), kept_step([1, 2, 3, 6, 7], 4, [0, 7])]
    batch = collate([trajectory(1, *turns), trajectory(2, kept_step([4, 5], 1, []))])
    assert batch["kept_counts"].tolist() == [0, 2, 3, 0, 0, 0, 0, 2, 0, 0]
    assert batch["kept_ids"].tolist() == [2, 9, 3, 4, 5, 0, 7]
    merged, _ = merge_steps(batch)
    assert merged["tokens"].tolist() == [1, 2, 3, 6, 7, 4, 5]
    assert merged["kept_counts"].tolist() == [0, 2, 3, 0, 2, 0, 0]
    assert merged["kept_ids"].tolist() == [2, 9, 3, 4, 5, 0, 7]


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (KeptTokens.of_each([[], [2, 9], [4, 5]]), r"step 0: token 2 \(3\) is not among its own kept_tokens"),
        (KeptTokens.of_each([[], [2]]), "got kept_tokens of 2 tokens with 1 ids; expected 3 tokens"),
        (KeptTokens(counts=np.array([0, 2, 1]), ids=np.array([2])), r"with 1 ids; expected .* number of ids \(3\)"),
        (None, "1 of 2 steps have kept_tokens; expected all or none"),
    ],
)
def test_kept_tokens_that_do_not_fit_are_refused(kept, message):
    other = attrs.evolve(step([1, 2, 3], 1), kept_tokens=kept)
    with pytest.raises(GenerationError, match=message):
        collate([trajectory(1, other), trajectory(2, kept_step([4, 5], 1, [5]))])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (trajectory(5), "group 5, sample 0: a trajectory without steps"),
        (
            trajectory(5, attrs.evolve(step([1, 2], 1), sampled=[True])),
            "group 5, sample 0, step 0: fields differ in length: "
            "{'tokens': 2, 'sampled': 1, 'rollout_logprobs': 2, 'policy_version': 2}",
        ),
        (trajectory(5, attrs.evolve(step([1, 2], 1), rollout_logprobs=[0.0])), "'rollout_logprobs': 1"),
        (trajectory(5, attrs.evolve(step([1, 2], 1), policy_version=[-1, 3, 3])), "'policy_version': 3"),
        (trajectory(5, attrs.evolve(step([1, 2], 1), token_rewards=[1.0])), "'token_rewards': 1"),
        (trajectory(5, attrs.evolve(step([1, 2], 1), loss_mask=[True])), "'loss_mask': 1"),
        (trajectory(5, step([1, 2], 2)), "got no sampled token"),
        (
            trajectory(5, attrs.evolve(step([1, 2, 3], 2), loss_mask=[False, True, True])),
            "group 5, sample 0, step 0: loss_mask is true at token 1, which the policy did not sample",
        ),
    ],
)
def test_the_error_names_the_wrong_trajectory(broken: Trajectory, message: str):
    with pytest.raises(GenerationError, match=message) as raised:
        collate([trajectory(1, step([1, 2], 1)), broken])
    assert str(raised.value).startswith("group 5, sample 0")
