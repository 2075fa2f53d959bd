"""Finds groups that a killed run lost or trained on twice: compares the run's rows with the ledger of all played
groups.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from rl_core.reports.jsonl import read_rows
from rl_core.trainer.state.checkpoint import RunState


@attrs.frozen(kw_only=True)
class Sizes:
    """The sizes and limits that every step of the run must obey."""

    steps: int
    groups: int
    samples: int
    max_staleness: int
    dynamic_sampling: str | None
    min_replace_ratio: float
    with_tokens: bool
    """Whether the rows of samples contain the trained tokens and log-probs."""


def require_every_group_once(run_dir: Path, ledger: Path, sizes: Sizes) -> None:
    """Requires that every started group is in the rows of exactly one step, within the staleness bound, or was left out
    for a reason that its samples confirm. Its rows must equal what was played. With dynamic sampling "replace", the
    rows of a group without signal must equal the rows of another group of its step.

    A group may have been played more than once, because an attempt was killed. Only the last play counts; it is
    compared token for token if the rows have tokens.
    """
    rows = {row["step"]: row for row in read_rows(run_dir / "metrics.jsonl")}
    assert list(rows) == list(range(sizes.steps + 1)), f"expected one row per step, got steps {list(rows)}"
    assert all(row["rollout/staleness_max"] <= sizes.max_staleness for step, row in rows.items() if step)
    state = json.loads((run_dir / "checkpoints" / f"step_{sizes.steps:06d}" / "run.json").read_text())
    assert state["step"] == sizes.steps
    assert not state["restart_groups"] + state["finished_groups"], "the last checkpoint still lists groups"
    started = set(range(state["next_group"]))
    played = _played(ledger)
    assert started <= played.keys(), f"started, but never played: {sorted(started - played.keys())}"
    trained, failed = _in_samples(run_dir, sizes)
    step_of = {group: step for group, (step, _) in trained.items()}
    assert Counter(step_of.values()) == dict.fromkeys(range(1, sizes.steps + 1), sizes.groups)
    assert trained.keys() <= started, f"trained on, but never started: {sorted(trained.keys() - started)}"
    _require_left_out(started - trained.keys(), played, rows, sizes)
    informative = {group for group in started if _has_signal(played[group])}
    sources: dict[int, list[dict[str, Any]]] = {}
    for group, (step, samples) in trained.items():
        source = played[group]
        if sizes.dynamic_sampling == "replace" and group not in informative:
            others = [played[other] for other in informative if step_of.get(other) == step]
            source = next((other for other in others if _expected_rows(other, sizes) == samples), None)
            assert source, f"group {group}: its rows equal those of no other group of its step"
        assert samples == _expected_rows(source, sizes), f"group {group} is not what was played last"
        assert 0 <= step - 1 - played[group]["start_version"] <= sizes.max_staleness, (
            f"group {group} breaks the staleness bound in step {step}"
        )
        sources.setdefault(step, []).append(source)
    for step, groups in sources.items():
        _require_versions(rows[step], groups, step - 1)
    for group in started:
        expected = sum(sample["reward"] is None for sample in played[group]["samples"])
        assert failed[group] == expected, f"group {group}: {failed[group]} failed samples in rows, {expected} failed"
    counted = sum(row["rollout/failed"] for step, row in rows.items() if step)
    assert counted == sum(failed.values()), f"metrics count {counted} failed samples, rows {sum(failed.values())}"


def require_listed_groups_once(run_dir: Path, resumed_from: Sequence[RunState], sizes: Sizes) -> None:
    """Requires that no group in a checkpoint that the run resumed from was trained on before that checkpoint.

    A checkpoint lists finished groups and groups to be played again. The finished groups must be trained on later,
    unless dynamic sampling is "replace".
    """
    step_of = {group: step for group, (step, _) in _in_samples(run_dir, sizes)[0].items()}
    for state in resumed_from:
        for group in (*state.finished_groups, *state.restart_groups):
            step = step_of.get(group, state.step + 1)
            assert step > state.step, f"group {group} of step {step} is listed by the checkpoint of step {state.step}"
        if sizes.dynamic_sampling != "replace":  # "replace" may drop whole batches
            missing = set(state.finished_groups) - step_of.keys()
            assert not missing, f"in the checkpoint of step {state.step}, but never trained on: {sorted(missing)}"


def _require_versions(row: Mapping[str, float], groups: Sequence[Mapping[str, Any]], version: int) -> None:
    """Requires that the metrics of the step that trains `version` give the right age of its groups and their tokens."""
    ages = [version - group["start_version"] for group in groups]
    assert row["rollout/staleness_mean"] == pytest.approx(sum(ages) / len(ages)), (
        f"wrong ages of groups in step {version + 1}"
    )
    versions = [one for group in groups for sample in _good(group) for one in sample["versions"]]
    stale = sum(one != version for one in versions) / len(versions)
    assert row["rollout/stale_tokens"] == pytest.approx(stale), f"wrong versions of tokens of step {version + 1}"


def _require_left_out(
    left_out: set[int], played: dict[int, dict[str, Any]], rows: dict[int, dict[str, float]], sizes: Sizes
) -> None:
    signals = [group for group in sorted(left_out) if _has_signal(played[group])]
    dropped = sum(row[f"rollout/dropped_{why}"] for row in rows.values() for why in _REASONS if row["step"])
    if sizes.dynamic_sampling == "replace":
        # "replace" drops whole batches in which too few groups have a signal.
        dropped_failed = [group for group in left_out if not _good(played[group])]
        assert (len(left_out) - len(dropped_failed)) % sizes.groups == 0, f"missing: {sorted(left_out)}"
        assert not left_out or len(signals) < sizes.min_replace_ratio * len(left_out), f"missing: {signals}"
        assert dropped == len(dropped_failed)
        return
    assert not signals, f"groups with a signal are in no row: {signals}"
    assert dropped == len(left_out), f"rows count {dropped} dropped groups, {len(left_out)} are missing"
    if sizes.dynamic_sampling is None:
        assert not [group for group in left_out if _good(played[group])], f"missing: {sorted(left_out)}"


_REASONS = ("failed", "zero_variance")


def _played(ledger: Path) -> dict[int, dict[str, Any]]:
    entries = (json.loads(line) for line in ledger.read_text().splitlines())
    return {entry["group"]: entry for entry in entries if entry["is_training"]}


def _in_samples(run_dir: Path, sizes: Sizes) -> tuple[dict[int, tuple[int, list[Any]]], Counter[int]]:
    """The step and the samples of each group, and the number of failed samples of each group."""
    trained: dict[int, tuple[int, list[Any]]] = {}
    failed: Counter[int] = Counter()
    for row in read_rows(run_dir / "samples.jsonl"):
        if row["purpose"] != "train":
            continue
        if row["failure"] is not None:
            failed[row["group"]] += 1
            continue
        step, samples = trained.setdefault(row["group"], (row["step"], []))
        assert step == row["step"], f"group {row['group']} is in steps {step} and {row['step']}"
        entry = [row[name] for name in _compared(sizes)]
        assert entry not in samples, f"group {row['group']} is in step {step} twice"
        samples.append(entry)
    return trained, failed


def _compared(sizes: Sizes) -> tuple[str, ...]:
    names = ("sample", "response", "reward")
    return (*names, "tokens", "rollout_logprobs") if sizes.with_tokens else names


def _expected_rows(entry: Mapping[str, Any], sizes: Sizes) -> list[Any]:
    """What the rows of samples must say about a played group."""
    return [[sample[name] for name in _compared(sizes)] for sample in _good(entry)]


def _good(entry: Mapping[str, Any]) -> list[Any]:
    return [sample for sample in entry["samples"] if sample["reward"] is not None]


def _has_signal(entry: Mapping[str, Any]) -> bool:
    return len({sample["reward"] for sample in _good(entry)}) > 1
