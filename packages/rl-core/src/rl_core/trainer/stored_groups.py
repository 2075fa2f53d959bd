"""Stores finished but untrained groups in a checkpoint, so that a resumed run can train on them.

Two files: `finished_groups.json` describes the groups; `finished_groups.npz` holds the per-token values of all steps,
concatenated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rl_core.errors import CheckpointError
from rl_core.interfaces import Trajectory, TrajectoryStep, Turn
from rl_core.trainer.buffer import FinishedGroup

_GROUPS, _TOKENS = "finished_groups.json", "finished_groups.npz"
_COLUMNS = {
    "tokens": np.int64,
    "sampled": np.bool_,
    "rollout_logprobs": np.float64,
    "policy_version": np.int64,
    "token_rewards": np.float64,
    "loss_mask": np.bool_,
}
"""Per-token fields of a step → dtype that holds Python's numbers without rounding."""
_OPTIONAL = ("token_rewards", "loss_mask")


@attrs.frozen(kw_only=True, eq=False)
class StoredGroup:
    """A finished group, and its other contributions to the metrics of its step."""

    group: FinishedGroup
    failed: tuple[Trajectory, ...] = ()
    """Its failed samples, including a failed greedy answer."""
    greedy_tokens: int = 0
    """Number of tokens sampled for its greedy answer."""


def write_groups(directory: Path, groups: Sequence[StoredGroup]) -> None:
    """Writes both files; writes nothing if there are no groups."""
    if not groups:
        return
    arrays: dict[str, Any] = {}
    entries = [_entry(stored, arrays) for stored in groups]
    columns = {name: np.concatenate([np.zeros(0, dtype), *arrays.pop(name, [])]) for name, dtype in _COLUMNS.items()}
    (directory / _GROUPS).write_text(json.dumps(entries, default=float))
    np.savez(directory / _TOKENS, allow_pickle=False, **columns, **arrays)


def read_groups(checkpoint: Path) -> tuple[StoredGroup, ...]:
    """The groups of a checkpoint; empty if it has no such files. Raises CheckpointError if they cannot be read."""
    if not (checkpoint / _GROUPS).is_file():
        return ()
    try:
        entries = json.loads((checkpoint / _GROUPS).read_text())
        with np.load(checkpoint / _TOKENS, allow_pickle=False) as arrays:
            tokens = _Tokens({name: arrays[name] for name in arrays.files})
        return tuple(_group(entry, tokens) for entry in entries)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint / _GROUPS}: this version cannot read the stored groups ({error}); resume from an earlier "
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
        for name, dtype in _COLUMNS.items():
            values = getattr(step, name)
            if values is not None:
                arrays.setdefault(name, []).append(np.asarray(values, dtype))
        routes = None
        if step.routed_experts is not None:
            routes = f"routed_experts_{len(arrays)}"
            arrays[routes] = step.routed_experts
        steps.append(
            {
                "num_tokens": len(step.tokens),
                **{f"has_{name}": getattr(step, name) is not None for name in _OPTIONAL},
                "reward": step.reward,
                "stop_reason": step.stop_reason,
                "routed_experts": routes,
            }
        )
    plain = attrs.asdict(trajectory, recurse=False, filter=lambda field, _: field.name != "steps")
    turns = [attrs.asdict(turn) for turn in trajectory.turns]
    return {**plain, "metrics": dict(trajectory.metrics), "turns": turns, "steps": steps}


class _Tokens:
    """Reads the arrays in the order in which they were written."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays
        self._position = dict.fromkeys(_COLUMNS, 0)

    def next(self, name: str, count: int) -> list[Any]:
        start = self._position[name]
        self._position[name] += count
        values = self.arrays[name][start : start + count].tolist()
        if len(values) != count:
            raise ValueError(f"{_TOKENS} has too few {name}")
        return values


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
    count, routes = plain["num_tokens"], plain["routed_experts"]
    given = (name for name in _COLUMNS if name not in _OPTIONAL or plain[f"has_{name}"])
    return TrajectoryStep(
        **{name: tokens.next(name, count) for name in given},
        reward=plain["reward"],
        stop_reason=plain["stop_reason"],
        routed_experts=tokens.arrays[routes] if routes is not None else None,
    )
