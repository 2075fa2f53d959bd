"""The groups of a checkpoint that can still be trained on are restored bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.config import from_mapping
from rl_core.config.resolving import as_mapping, leaves
from rl_core.errors import CheckpointError
from rl_core.interfaces import Completion, KeptTokens, Trajectory, TrajectoryStep, Turn
from rl_core.trainer.groups import FinishedGroup
from rl_core.trainer.state.checkpoint import RunState
from rl_core.trainer.state.fingerprint import plays_alike
from rl_core.trainer.state.resumed_groups import resumed_groups, within_the_bound
from rl_core.trainer.state.stored_groups import (
    StartedGroup,
    StoredGroup,
    read_groups,
    read_started_groups,
    write_groups,
    write_started_groups,
)


def step(num_tokens: int, **changes: Any) -> TrajectoryStep:
    values = {
        "tokens": list(range(num_tokens)),
        "sampled": [token % 2 == 1 for token in range(num_tokens)],
        "rollout_logprobs": [-(token + 1) / 3 for token in range(num_tokens)],
        "policy_version": [token - 1 for token in range(num_tokens)],
        "reward": 0.1,
        "stop_reason": "stop",
    }
    return TrajectoryStep(**(values | changes))


def trajectory(group_id: int, *steps: TrajectoryStep, **changes: Any) -> Trajectory:
    values = {
        "group_id": group_id,
        "sample_index": 0,
        "prompt_text": "a\ud800?",
        "response_text": "b",
        "start_version": 3,
    }
    return Trajectory(steps=steps, **(values | changes))


def plain(value: Any) -> Any:
    """Converts arrays and records with `eq=False` to plain values, which can be compared."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.tolist())
    if attrs.has(type(value)):
        return {name: plain(one) for name, one in attrs.asdict(value, recurse=False).items()}
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def stored(group_id: int, start_version: int = 3, *trajectories: Trajectory, **changes: Any) -> StoredGroup:
    group = FinishedGroup(group_id=group_id, start_version=start_version, trajectories=trajectories)
    return StoredGroup(group=group, **changes)


def test_groups_come_back_bit_for_bit(tmp_path: Path):
    routes = np.arange(24, dtype=np.uint8).reshape(3, 2, 4)
    turns = (Turn(response="x", observation="y", reward=0.5, stop_reason="stop"),)
    kept = KeptTokens.of_each([[], [3, 1, 70_000], [2]])
    groups = [
        stored(
            7,
            3,
            trajectory(
                7,
                step(4, routed_experts=routes),
                step(3, kept_tokens=kept),
                step(1, kept_tokens=KeptTokens.none(1), routed_experts=routes[:1]),
                step(2, token_rewards=[0.0, 1 / 7]),
                step(2, loss_mask=[True, False]),
                turns=turns,
            ),
            trajectory(7, step(1), metrics={"digits": 1 / 3}, end="context", greedy_reward=0.7),
            failed=(trajectory(7, failure="OSError: gone", failure_kind="OSError"),),
            greedy_tokens=9,
        ),
        # The step with routes follows one without, so its arrays must be found by name, not by position.
        stored(9, 4, trajectory(9, step(3), step(5, routed_experts=routes[:2], reward=np.float32(0.1)))),
    ]
    write_groups(tmp_path, groups)
    found = read_groups(tmp_path)
    assert plain(found) == plain(groups)
    assert found[1].group.trajectories[0].steps[1].reward == float(np.float32(0.1))


@given(values=st.lists(st.floats(allow_nan=False, max_value=0.0), min_size=1, max_size=20))
def test_log_probs_come_back_without_rounding(tmp_path_factory: pytest.TempPathFactory, values: list[float]):
    directory = tmp_path_factory.mktemp("groups")
    write_groups(directory, [stored(1, 0, trajectory(1, step(len(values), rollout_logprobs=values)))])
    (found,) = read_groups(directory)
    assert list(found.group.trajectories[0].steps[0].rollout_logprobs) == values


def test_an_empty_list_leaves_no_file_and_a_file_with_too_few_tokens_is_refused(tmp_path: Path):
    write_groups(tmp_path, [])
    assert not list(tmp_path.iterdir())
    assert read_groups(tmp_path) == ()
    write_groups(tmp_path, [stored(1, 0, trajectory(1, step(4)))])
    described = json.loads((tmp_path / "finished_groups.json").read_text())
    described[0]["trajectories"][0]["steps"][0]["num_tokens"] = 5
    (tmp_path / "finished_groups.json").write_text(json.dumps(described))
    with pytest.raises(
        CheckpointError,
        match=r"finished_groups\.json: this version cannot read the stored groups .* too few tokens.*resume_path",
    ):
        read_groups(tmp_path)


def test_answers_of_groups_in_progress_come_back_bit_for_bit(tmp_path: Path):
    def completion(num_tokens: int, **changes: Any) -> Completion:
        values = {
            "tokens": tuple(range(num_tokens)),
            "logprobs": tuple(-(token + 1) / 3 for token in range(num_tokens)),
            "policy_versions": (3,) * num_tokens,
            "stop_reason": "abort",
        }
        return Completion(**(values | changes))

    routes = np.arange(24, dtype=np.uint8).reshape(3, 2, 4)
    groups = [
        StartedGroup(group_id=7, start_version=2, answers={"one": (completion(4),), "waits": (completion(0),)}),
        StartedGroup(
            group_id=9,
            start_version=3,
            answers={"two": (completion(2, routed_experts=routes[:1], stop_reason="stop"), completion(1))}
            | {"three": (completion(3, routed_experts=routes, kept_tokens=KeptTokens.of_each([[0], [], [2, 9]])),)},
        ),
    ]
    write_started_groups(tmp_path, groups)
    found = read_started_groups(tmp_path)
    assert [plain(one.answers) for one in found] == [plain(one.answers) for one in groups]
    assert [(one.group_id, one.start_version) for one in found] == [(7, 2), (9, 3)]
    assert read_groups(tmp_path) == ()
    (tmp_path / "started_groups.json").write_text("[{}]")
    with pytest.raises(
        CheckpointError, match=r"started_groups\.json: this version cannot read the stored groups .*resume"
    ):
        read_started_groups(tmp_path)


def kept(groups: list[StoredGroup], **settings: int) -> list[int]:
    values = {"version": 4, "last_version": 9, "groups_per_step": 2, "max_staleness": 2} | settings
    return sorted(within_the_bound({one.group.group_id: one.group.start_version for one in groups}, **values))


def test_a_resumed_run_keeps_what_it_can_train_on_within_its_bound():
    groups = [stored(group, version) for group, version in ((1, 2), (2, 2), (3, 3), (4, 3), (5, 4))]
    assert kept(groups) == [1, 2, 3, 4, 5], "steps 5, 6, 7 take them, each at most 2 versions behind"
    assert kept(groups, max_staleness=1) == [3, 4, 5], "groups 1 and 2 are two versions behind already"
    assert kept(groups, max_staleness=0) == [5]
    assert kept(groups, groups_per_step=1) == [1, 3, 5], "with one group per step, each is at most 2 versions behind"
    assert kept(groups, last_version=4) == [1, 2], "one step with room for two groups is left"
    assert kept(list(reversed(groups))) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("key", "is_alike"),
    [
        ("trainer.max_training_steps", True),
        ("trainer.train_batch_size", True),
        ("generator.n_samples_per_prompt", False),
        ("environment.env_class", False),
        ("trainer.algorithm.advantage_estimator", False),
    ],
)
def test_only_changes_of_settings_that_affect_generation_discard_stored_groups(
    tmp_path: Path, key: str, is_alike: bool
):
    settings = {"trainer.max_training_steps": 1, "generator.n_samples_per_prompt": 1}
    assert not plays_alike(tmp_path, {"settings": settings}), (
        "without a fingerprint it is unknown how the groups were played"
    )
    (tmp_path / "fingerprint.json").write_text(json.dumps({"settings": settings}))
    assert plays_alike(tmp_path, {"settings": dict(settings)})
    assert plays_alike(tmp_path, {"settings": settings | {key: 2}}) is is_alike


@pytest.mark.parametrize(
    ("overrides", "finished", "started", "again"),
    [
        ([], [1], [2, 3], (4,)),
        (["trainer.max_staleness=1"], [], [3], (1, 2, 4)),
        (["trainer.pipeline_depth=0"], [1], [], (2, 3, 4)),
        (["generator.n_samples_per_prompt=9"], [], [], (1, 2, 3, 4)),
    ],
)
def test_a_resumed_run_continues_what_it_can_train_on_within_its_bound(
    tmp_path: Path, overrides: list[str], finished: list[int], started: list[int], again: tuple[int, ...]
):
    """Groups 1 and 2 are two versions old, group 3 is one version old; nothing of group 4 has been sampled."""
    config = from_mapping({"trainer.max_staleness": 2, "trainer.pipeline_depth": 2, "trainer.train_batch_size": 2})
    now = {"settings": dict(leaves(as_mapping(config)))}
    (tmp_path / "fingerprint.json").write_text(json.dumps(now, default=str))
    write_groups(tmp_path, [stored(1, 2)])
    answer = Completion(tokens=(1,), logprobs=(-1.0,), policy_versions=(2,), stop_reason="abort")
    write_started_groups(
        tmp_path,
        [StartedGroup(group_id=group, start_version=group, answers={"request": (answer,)}) for group in (2, 3)],
    )
    state = RunState(
        step=4, next_group=5, restart_groups=(2, 3, 4), finished_groups=(1,), kl_coef=0.0, nonfinite_steps=0
    )
    changed = from_mapping(as_mapping(config), overrides)
    now = json.loads(json.dumps({"settings": dict(leaves(as_mapping(changed)))}, default=str))
    found = resumed_groups(changed, tmp_path, state, now, total_steps=9)
    assert [one.group.group_id for one in found.finished] == finished
    assert [(one.group_id, one.start_version) for one in found.started] == [(group, group) for group in started]
    assert found.state.restart_groups == again
