"""No group is trained on beyond the staleness bound or discarded for its age, and generation runs as far ahead as the
depth allows."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import DeadlineError, GenerationError
from rl_core.trainer.loop.buffer import GroupBuffer


def make_buffer(*, groups_per_step: int, max_staleness: int, steps: int, depth: int | None = None) -> GroupBuffer:
    """A buffer whose generation runs ahead as far as the bound allows, unless `depth` is set."""
    return GroupBuffer(
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
        pipeline_depth=max_staleness if depth is None else depth,
        version=0,
        last_version=steps - 1,
    )


async def start_all_possible(buffer: GroupBuffer, next_group: int) -> int:
    """Starts groups until the buffer makes one wait or needs no more; returns the first group number not started."""
    while True:
        waiting = asyncio.create_task(buffer.permission(next_group))
        for _ in range(3):
            await asyncio.sleep(0)
        if not waiting.done():
            waiting.cancel()
            return next_group
        if waiting.result() is None:
            return next_group
        next_group += 1


async def test_synchronous_training_starts_one_batch_and_no_more_until_its_version_is_published():
    buffer = make_buffer(groups_per_step=3, max_staleness=0, steps=2)
    assert await start_all_possible(buffer, 0) == 3
    for group in (2, 0, 1):
        await buffer.finish(group, ())
    assert [group.group_id for group in await buffer.take(1)] == [0, 1, 2]
    assert await start_all_possible(buffer, 3) == 3
    await buffer.published(1)
    assert await start_all_possible(buffer, 3) == 6


async def test_one_step_off_policy_training_runs_one_batch_ahead():
    buffer = make_buffer(groups_per_step=2, max_staleness=1, steps=9)
    assert await start_all_possible(buffer, 0) == 4
    for group in range(4):
        await buffer.finish(group, ())
    await buffer.take(1)
    assert await start_all_possible(buffer, 4) == 4
    await buffer.published(1)
    assert await start_all_possible(buffer, 4) == 6


async def test_groups_that_an_earlier_run_started_keep_their_age_and_their_places():
    """The bound is 2. A group of version 1 has to be in step 4; another group may overtake a group of version 2."""
    for started, first in (({1: 1, 2: 2}, [1]), ({1: 2, 2: 3}, [3])):
        buffer = GroupBuffer(
            groups_per_step=1, max_staleness=2, pipeline_depth=2, version=3, last_version=9, started=started
        )
        assert buffer.outstanding == (1, 2)
        assert await start_all_possible(buffer, 3) == 4, "three steps hold three groups, so one more may start"
        await buffer.finish(3, ())
        taking = asyncio.create_task(buffer.take(60))
        await asyncio.sleep(0.0)
        await buffer.finish(1, ())
        assert [group.group_id for group in await taking] == first


async def test_depth_one_under_a_wider_bound_starts_one_batch_ahead_and_no_more():
    buffer = make_buffer(groups_per_step=2, max_staleness=4, depth=1, steps=9)
    assert await start_all_possible(buffer, 0) == 4
    assert (len(buffer.finished), buffer.num_under_way) == (0, 4)
    for group in (0, 2, 3):
        await buffer.finish(group, ())
    assert [group.group_id for group in await buffer.take(1)] == [0, 2], (
        "under bound 4, group 1 can still wait for a later step"
    )
    assert (len(buffer.finished), buffer.num_under_way) == (1, 1)
    assert await start_all_possible(buffer, 4) == 4
    await buffer.published(1)
    assert await start_all_possible(buffer, 4) == 6


async def test_depth_zero_under_a_wider_bound_is_synchronous():
    buffer = make_buffer(groups_per_step=2, max_staleness=4, depth=0, steps=9)
    assert await start_all_possible(buffer, 0) == 2
    await buffer.finish(0, ())
    with pytest.raises(DeadlineError, match=r"step 1: still needs 2 of its 2 groups .* 1 finished, 1 in progress"):
        await buffer.take(0.01)


async def test_no_group_is_started_that_no_step_needs():
    buffer = make_buffer(groups_per_step=2, max_staleness=5, steps=3)
    assert await start_all_possible(buffer, 0) == 6


async def test_another_group_may_start_after_a_drop():
    buffer = make_buffer(groups_per_step=2, max_staleness=0, steps=1)
    assert await start_all_possible(buffer, 0) == 2
    await buffer.drop(0)
    assert await start_all_possible(buffer, 2) == 3


async def test_after_a_rejected_batch_the_same_step_takes_another_one():
    buffer = make_buffer(groups_per_step=1, max_staleness=0, steps=1)
    assert await start_all_possible(buffer, 0) == 1
    await buffer.finish(0, ())
    await buffer.take(1)
    assert await start_all_possible(buffer, 1) == 1
    await buffer.rejected()
    assert await start_all_possible(buffer, 1) == 2
    await buffer.finish(1, ())
    assert [group.group_id for group in await buffer.take(1)] == [1]


async def test_training_waits_for_an_expiring_group_even_if_enough_others_are_finished():
    buffer = make_buffer(groups_per_step=1, max_staleness=1, steps=9)
    assert await start_all_possible(buffer, 0) == 2
    await buffer.finish(0, ())
    await buffer.take(1)
    await buffer.published(1)
    assert await start_all_possible(buffer, 2) == 3
    await buffer.finish(2, ())
    with pytest.raises(DeadlineError, match=r"step 2: still needs 1 of its 1 groups .* 1 finished, 1 in progress"):
        await buffer.take(0.01)
    await buffer.finish(1, ())
    assert [group.group_id for group in await buffer.take(1)] == [1]


async def test_an_error_of_generation_is_raised_in_the_training_task():
    buffer = make_buffer(groups_per_step=1, max_staleness=0, steps=1)
    await buffer.fail(GenerationError("the engine is gone"))
    with pytest.raises(GenerationError, match="the engine is gone"):
        await buffer.take(1)


@settings(max_examples=60, deadline=None)
@given(
    groups_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 4),
    ahead=st.sampled_from([0.0, 0.5, 1.0]),
    steps=st.integers(1, 12),
    drop_rate=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 10_000),
)
def test_each_group_is_trained_on_within_the_bound_in_any_order_of_finishing(
    groups_per_step: int, max_staleness: int, ahead: float, steps: int, drop_rate: float, seed: int
):
    rng = random.Random(seed)

    async def run() -> list[tuple[int, int]]:
        depth = round(ahead * max_staleness)
        buffer = make_buffer(groups_per_step=groups_per_step, max_staleness=max_staleness, steps=steps, depth=depth)
        trained: list[tuple[int, int]] = []
        dropped: set[int] = set()

        async def play(group: int) -> None:
            for _ in range(rng.choice([0, 1, 2, 30])):
                await asyncio.sleep(0)
            if rng.random() < drop_rate:
                dropped.add(group)
                await buffer.drop(group)
            else:
                await buffer.finish(group, ())

        async def generate() -> int:
            group = 0
            async with asyncio.TaskGroup() as playing:
                while await buffer.permission(group) is not None:
                    playing.create_task(play(group))
                    group += 1
            return group

        generating = asyncio.create_task(generate())
        for step in range(steps):
            for group in await buffer.take(250):
                trained.append((group.group_id, step - group.start_version))
            for _ in range(rng.choice([0, 3, 10])):
                await asyncio.sleep(0)
            await buffer.trained()
            await buffer.published(step + 1)
        started = await generating
        assert {group for group, _ in trained} | dropped == set(range(started))
        assert buffer.outstanding == ()
        return trained

    trained = asyncio.run(run())
    assert len(trained) == steps * groups_per_step
    assert max(staleness for _, staleness in trained) <= max_staleness


async def test_a_buffer_that_ignores_the_age_of_groups_does_not_wait_for_an_expiring_group(
    monkeypatch: pytest.MonkeyPatch,
):
    """Negative control: `_choice` ignores the age of groups."""
    monkeypatch.setattr(
        GroupBuffer,
        "_choice",
        lambda self: list(self._finished.values())[: self._groups_per_step] if self._finished else [],
    )
    buffer = make_buffer(groups_per_step=1, max_staleness=1, steps=9)
    await start_all_possible(buffer, 0)
    await buffer.finish(0, ())
    await buffer.take(1)
    await buffer.published(1)
    await start_all_possible(buffer, 2)
    await buffer.finish(2, ())
    assert [group.group_id for group in await buffer.take(0.01)] == [2]
