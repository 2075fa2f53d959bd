"""How groups are started and placed, and the errors if this is impossible."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from rl_core.errors import ConfigError, DeadlineError
from rl_core.workers import MicroBatchLimits, WorkerGroup
from rl_core.workers.ray_cluster import reserved
from tests.passing_time import until
from tests.ray.conftest import START_S, placements
from tests.ray.gloo_backend import GlooBackend, GlooWorker, spec_of
from tests.ray.test_dispatch import batch_of

pytestmark = pytest.mark.timeout(900)

LIMITS = MicroBatchLimits(max_sequences=1)


async def on_device(group: WorkerGroup) -> list[bool]:
    return [answer["is_on_device"] for answer in await group._ranks.call(GlooWorker.describe)]


def asked_for() -> int:
    """The number of placement groups that have their resources or wait for them."""
    return sum(group["state"] != "REMOVED" for group in ray.util.placement_group_table().values())


async def test_groups_that_share_devices_share_a_placement_group_and_take_turns():
    num_placements = len(placements())
    policy = await WorkerGroup.launch(GlooBackend(), spec_of(), ranks_per_node=2, timeout_s=START_S)
    reference = await WorkerGroup.launch(
        GlooBackend(), spec_of("reference"), ranks_per_node=2, share_devices_of=policy, timeout_s=START_S
    )
    assert (await on_device(policy), await on_device(reference)) == ([False] * 2, [True] * 2)
    batch = batch_of([3, 4])
    scores = await asyncio.gather(*(g.forward(batch, LIMITS, temperature=1.0) for g in (policy, reference)))
    assert all((score["logprobs"] == batch["tokens"] + 1.0).all() for score in scores)
    assert (await on_device(policy), await on_device(reference)) == ([False] * 2, [True] * 2)
    await policy.optim_step()
    assert (await on_device(policy), await on_device(reference)) == ([True] * 2, [False] * 2)
    await policy.offload()
    assert await on_device(policy) == [False] * 2
    assert len(placements()) == num_placements + 1
    # The group that created the placement group closes first, and the other one still works.
    await policy.close()
    await reference.forward(batch, LIMITS, temperature=1.0)
    await reference.close()
    assert len(placements()) == num_placements


async def test_groups_can_share_devices_only_with_equal_numbers_of_ranks(four_ranks):
    with pytest.raises(ConfigError, match="reference: 1 nodes × 2 ranks cannot share the devices of 1 × 4: set"):
        await WorkerGroup.launch(GlooBackend(), spec_of("reference"), ranks_per_node=2, share_devices_of=four_ranks)


async def test_a_backend_can_require_a_process_for_its_only_rank():
    group = await WorkerGroup.launch(GlooBackend(), spec_of(), timeout_s=START_S)
    (answer,) = await group._ranks.call(GlooWorker.describe)
    await group.close()
    assert answer["pid"] != os.getpid()


async def test_more_ranks_than_the_cluster_holds_are_refused_before_anything_starts():
    before = asked_for()
    with pytest.raises(ConfigError, match=r"1 nodes with 4 CPU, 0 GPU each .* Ray has 1 nodes: 2 CPU, 0 GPU"):
        await WorkerGroup.launch(GlooBackend(), spec_of(), ranks_per_node=64, timeout_s=START_S)
    assert asked_for() == before


async def test_a_start_gives_up_waiting_for_occupied_devices_at_its_deadline(four_ranks):
    before = asked_for()
    with pytest.raises(DeadlineError, match=r"waited 1 s .* 2 CPU, 0 GPU each; free in Ray's cluster: 1\.\d+ CPU"):
        await WorkerGroup.launch(GlooBackend(), spec_of(), ranks_per_node=32, timeout_s=1)
    assert asked_for() == before


async def test_a_cancelled_reservation_withdraws_its_request(four_ranks):
    before = asked_for()
    start = asyncio.ensure_future(reserved([{"CPU": 2.0}], "PACK", START_S))
    await until(lambda: asked_for() > before)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert asked_for() == before


def test_a_temporary_directory_that_is_too_deep_for_rays_sockets_is_an_error(tmp_path: Path):
    """Starts Ray in another process, because it already runs in this one."""
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    code = "from rl_core.workers.ray_cluster import ray_session; ray_session.enter()"
    environment = {**os.environ, "RAY_TMPDIR": str(deep)}
    environment.pop("RAY_ADDRESS", None)
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=250)
    assert ran.returncode != 0
    assert "ConfigError: Ray cannot start: the path of its temporary directory is too long for sockets" in ran.stderr
    assert ran.stderr.rstrip().endswith("Set RAY_TMPDIR to a shorter path")
