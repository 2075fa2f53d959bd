"""No trained group is older than the bound, and generation runs as far ahead as it may."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.trainer.groups import FinishedGroup
from rl_core.trainer.loop.training_loop import TrainingLoop
from tests.core.loop_checks import EVERYTHING, STALENESS, random_script, require_the_bound
from tests.core.scripted_run import RecordedBuffer, Script, ScriptedRun


def require_generation_as_far_ahead_as_it_may(run: ScriptedRun) -> None:
    """Requires that all groups that the depth allows start as soon as a version is published, and that no others start
    before the next version."""
    script = run.script
    started, started_by_version = 0, []
    for event in [*run.events_of("start", "published"), "published end"]:
        if event.startswith("start"):
            assert int(event.split()[3]) == len(started_by_version), "groups must start at the latest published version"
            started += 1
        else:
            started_by_version.append(started)
    expected = [min(version + script.depth + 1, script.steps) for version in range(script.steps + 1)]
    assert started_by_version == [steps * script.groups_per_step for steps in expected]
    for version in range(1, script.steps):
        times = {
            time for time, event in run.log.entries if event.startswith("start") and event.endswith(f"at {version}")
        }
        assert times <= {run.time_of(f"published {version}")}, "groups must start when their version is published"


@settings(max_examples=40)
@given(
    depth_and_bound=st.sampled_from([(0, 0), (1, 1), (3, 3), (0, 2), (1, 2), (1, 4), (2, 4)]),
    seed=st.integers(0, 10_000),
)
def test_with_any_durations_the_bound_holds_and_generation_runs_fully_ahead(
    tmp_path_factory: pytest.TempPathFactory, depth_and_bound: tuple[int, int], seed: int
):
    depth, bound = depth_and_bound
    run = ScriptedRun(tmp_path_factory.mktemp("run"), random_script(bound, seed, pipeline_depth=depth)).go()
    require_the_bound(run)
    require_generation_as_far_ahead_as_it_may(run)
    assert list(run.reports.rows) == list(range(1, run.script.steps + 1))


@STALENESS
def test_no_group_is_started_before_its_version_is_served(tmp_path: Path, max_staleness: int):
    require_groups_start_at_served_versions(
        ScriptedRun(tmp_path, attrs.evolve(EVERYTHING, max_staleness=max_staleness)).go()
    )


def require_groups_start_at_served_versions(run: ScriptedRun) -> None:
    served = -1
    for event in run.events_of("serve", "start"):
        if event.startswith("serve"):
            served = int(event.split()[1])
        else:
            assert int(event.split()[3]) == served, f"{event} while version {served} is served"


class OneMoreVersion(RecordedBuffer):
    """Wrong: starts groups for one step more than the bound allows."""

    def _has_room(self) -> bool:
        self._pipeline_depth += 1
        try:
            return super()._has_room()
        finally:
            self._pipeline_depth -= 1

    def _choice(self) -> list[FinishedGroup]:
        oldest = sorted(self._finished.values(), key=lambda group: group.group_id)[: self._groups_per_step]
        return oldest if len(oldest) == self._groups_per_step else []


class OneVersionLess(RecordedBuffer):
    """Wrong: generation runs one step less far ahead than it may."""

    def _has_room(self) -> bool:
        self._pipeline_depth -= 1
        try:
            return super()._has_room()
        finally:
            self._pipeline_depth += 1


class StartsBeforePublishing(TrainingLoop):
    """Wrong: starts groups with a version that the engine does not serve yet."""

    async def _publish(self) -> dict[str, float]:
        await self._buffer.published(self.steps_done)
        return await super()._publish()


@STALENESS
def test_the_checks_detect_a_bound_that_is_off_by_one(tmp_path: Path, max_staleness: int):
    """Negative controls of the checks above."""
    script = Script(steps=6, max_staleness=max_staleness)
    loose = ScriptedRun(tmp_path / "loose", script, buffer_class=OneMoreVersion).go()
    with pytest.raises(AssertionError, match="is too old for step"):
        require_the_bound(loose)
    with pytest.raises(AssertionError, match=r"^assert \[\d+, "):
        require_generation_as_far_ahead_as_it_may(loose)
    if max_staleness > 0:
        tight = ScriptedRun(tmp_path / "tight", script, buffer_class=OneVersionLess).go()
        require_the_bound(tight)
        with pytest.raises(AssertionError, match=r"^assert \[\d+, "):
            require_generation_as_far_ahead_as_it_may(tight)
    early = ScriptedRun(tmp_path / "early", script, loop_class=StartsBeforePublishing).go()
    with pytest.raises(AssertionError, match="while version 0 is served"):
        require_groups_start_at_served_versions(early)
