"""Stores in a checkpoint the groups that no step has trained on yet. A resumed run trains on the finished groups, and
continues the groups in progress, which are stored with the engines' answers so far.

Each kind has two files: `finished_groups.json` or `started_groups.json` describes the groups; the `.npz` of the same
name contains the per-token values of all steps or answers, concatenated, and the routed experts of each.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import numpy as np

from rl_core.errors import CheckpointError
from rl_core.interfaces import Completion, KeptTokens, Trajectory, TrajectoryStep, Turn
from rl_core.trainer.groups import FinishedGroup

Answers = Mapping[str, tuple[Completion, ...]]
"""Request (`recorded_answers.request_key`) → the engine's answer."""
_Group = TypeVar("_Group")
_FINISHED, _STARTED = "finished_groups", "started_groups"
_COLUMNS = {
    "tokens": np.int64,
    "sampled": np.bool_,
    "rollout_logprobs": np.float64,
    "policy_version": np.int64,
    "token_rewards": np.float64,
    "loss_mask": np.bool_,
}
"""Per-token field of a step → dtype that stores Python's numbers without rounding."""
_OPTIONAL = ("token_rewards", "loss_mask")
"""Fields that a step may lack."""
_ANSWER_COLUMNS = {"tokens": np.int64, "logprobs": np.float64, "policy_versions": np.int64}
"""Per-token field of a completion → dtype, as in `_COLUMNS`."""


@attrs.frozen(kw_only=True, eq=False)
class StoredGroup:
    """A finished group with its failed samples and greedy tokens, which also count in the metrics of its step."""

    group: FinishedGroup
    failed: tuple[Trajectory, ...] = ()
    """Its samples that failed; `group` has the others."""
    greedy_tokens: int = 0
    """Number of tokens sampled for its greedy answer."""


@attrs.frozen(kw_only=True, eq=False)
class StartedGroup:
    """A group in progress for which engines have sampled tokens."""

    group_id: int
    start_version: int
    answers: Answers
    """The engines' answers so far, including unfinished responses."""


def write_groups(directory: Path, groups: Sequence[StoredGroup]) -> None:
    """Writes the files of finished groups; writes nothing if there are none."""
    arrays: dict[str, Any] = {}
    _write(directory / _FINISHED, [_entry(stored, arrays) for stored in groups], arrays, _COLUMNS)


def write_started_groups(directory: Path, groups: Sequence[StartedGroup]) -> None:
    """Writes the files of groups in progress; writes nothing if there are none."""
    arrays: dict[str, Any] = {}
    _write(directory / _STARTED, [_started_entry(started, arrays) for started in groups], arrays, _ANSWER_COLUMNS)


def read_groups(checkpoint: Path) -> tuple[StoredGroup, ...]:
    """The finished groups of a checkpoint; empty if it has no such files. Raises CheckpointError if they cannot be
    read."""
    return _read(checkpoint / _FINISHED, _group)


def read_started_groups(checkpoint: Path) -> tuple[StartedGroup, ...]:
    """The groups in progress of a checkpoint; empty if it has no such files. Raises CheckpointError if they cannot be
    read."""
    return _read(checkpoint / _STARTED, _started_group)


def _write(path: Path, entries: Sequence[Any], arrays: dict[str, Any], columns: Mapping[str, Any]) -> None:
    if not entries:
        return
    joined = {name: np.concatenate([np.zeros(0, dtype), *arrays.pop(name, [])]) for name, dtype in columns.items()}
    path.with_suffix(".json").write_text(json.dumps(entries, default=float))
    np.savez(path.with_suffix(".npz"), allow_pickle=False, **joined, **arrays)


def _read(path: Path, group_of: Callable[[dict[str, Any], _Tokens], _Group]) -> tuple[_Group, ...]:
    described = path.with_suffix(".json")
    if not described.is_file():
        return ()
    try:
        entries = json.loads(described.read_text())
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
            tokens = _Tokens({name: arrays[name] for name in arrays.files})
        return tuple(group_of(entry, tokens) for entry in entries)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{described}: this version cannot read the stored groups ({error}); resume from an earlier "
            "checkpoint: trainer.resume_mode=from_path trainer.resume_path=…"
        ) from error


def _entry(stored: StoredGroup, arrays: dict[str, Any]) -> dict[str, Any]:
    return {
        "group_id": stored.group.group_id,
        "start_version": stored.group.start_version,
        "greedy_tokens": stored.greedy_tokens,
        "trajectories": [_without_tokens(one, arrays) for one in stored.group.trajectories],
        "failed": [_without_tokens(one, arrays) for one in stored.failed],
    }


def _without_tokens(trajectory: Trajectory, arrays: dict[str, Any]) -> dict[str, Any]:
    """The JSON form of a trajectory. Its per-token values are appended to `arrays`."""
    steps = []
    for step in trajectory.steps:
        steps.append(
            {
                "num_tokens": len(step.tokens),
                **{f"has_{name}": getattr(step, name) is not None for name in _OPTIONAL},
                "reward": step.reward,
                "stop_reason": step.stop_reason,
                **_moved(step, arrays, _COLUMNS),
            }
        )
    plain = attrs.asdict(trajectory, recurse=False, filter=lambda field, _: field.name != "steps")
    turns = [attrs.asdict(turn) for turn in trajectory.turns]
    return {**plain, "metrics": dict(trajectory.metrics), "turns": turns, "steps": steps}


def _started_entry(started: StartedGroup, arrays: dict[str, Any]) -> dict[str, Any]:
    def without_tokens(one: Completion) -> dict[str, Any]:
        arrays_of = _moved(one, arrays, _ANSWER_COLUMNS)
        return {"num_tokens": len(one.tokens), "stop_reason": one.stop_reason, **arrays_of}

    return {
        "group_id": started.group_id,
        "start_version": started.start_version,
        "answers": {key: [without_tokens(one) for one in answer] for key, answer in started.answers.items()},
    }


def _moved(
    record: TrajectoryStep | Completion, arrays: dict[str, Any], columns: Mapping[str, Any]
) -> dict[str, str | None]:
    """Appends the record's per-token values to `arrays`. Returns the names under which `arrays` holds its routes and
    kept tokens; None if it has none."""
    for name, dtype in columns.items():
        values = getattr(record, name)
        if values is not None:
            arrays.setdefault(name, []).append(np.asarray(values, dtype))
    kept = record.kept_tokens
    others = {
        "routed_experts": record.routed_experts,
        "kept_counts": None if kept is None else kept.counts,
        "kept_ids": None if kept is None else kept.ids,
    }
    names: dict[str, str | None] = dict.fromkeys(others)
    for name, values in others.items():
        if values is not None:
            names[name] = stored = f"{name}_{len(arrays)}"  # a new name: every such array makes `arrays` longer
            arrays[stored] = values
    return names


class _Tokens:
    """Reads the values of each array in the order in which they were written."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays
        self._position: Counter[str] = Counter()

    def next(self, name: str, count: int) -> list[Any]:
        start = self._position[name]
        self._position[name] += count
        values = self.arrays[name][start : start + count].tolist()
        if len(values) != count:
            raise ValueError(f"its .npz has too few {name}")
        return values

    def others(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        """The routes and kept tokens of a record."""
        names = {name: plain[name] for name in ("routed_experts", "kept_counts", "kept_ids")}
        routes, counts, ids = (None if name is None else self.arrays[name] for name in names.values())
        kept = None if counts is None or ids is None else KeptTokens(counts=counts, ids=ids)
        return {"routed_experts": routes, "kept_tokens": kept}


def _group(entry: dict[str, Any], tokens: _Tokens) -> StoredGroup:
    trajectories = tuple(_trajectory(one, tokens) for one in entry["trajectories"])
    return StoredGroup(
        group=FinishedGroup(
            group_id=entry["group_id"], start_version=entry["start_version"], trajectories=trajectories
        ),
        failed=tuple(_trajectory(one, tokens) for one in entry["failed"]),
        greedy_tokens=entry["greedy_tokens"],
    )


def _trajectory(plain: dict[str, Any], tokens: _Tokens) -> Trajectory:
    steps = tuple(_step(step, tokens) for step in plain["steps"])
    turns = tuple(Turn(**turn) for turn in plain["turns"])
    return Trajectory(**{**plain, "steps": steps, "turns": turns})


def _step(plain: dict[str, Any], tokens: _Tokens) -> TrajectoryStep:
    count = plain["num_tokens"]
    given = (name for name in _COLUMNS if name not in _OPTIONAL or plain[f"has_{name}"])
    return TrajectoryStep(
        **{name: tokens.next(name, count) for name in given},
        reward=plain["reward"],
        stop_reason=plain["stop_reason"],
        **tokens.others(plain),
    )


def _started_group(entry: dict[str, Any], tokens: _Tokens) -> StartedGroup:
    answers = {key: tuple(_completion(one, tokens) for one in answer) for key, answer in entry["answers"].items()}
    return StartedGroup(group_id=entry["group_id"], start_version=entry["start_version"], answers=answers)


def _completion(plain: dict[str, Any], tokens: _Tokens) -> Completion:
    return Completion(
        **{name: tuple(tokens.next(name, plain["num_tokens"])) for name in _ANSWER_COLUMNS},
        stop_reason=plain["stop_reason"],
        **tokens.others(plain),
    )
