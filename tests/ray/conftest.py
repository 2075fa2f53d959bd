"""One Ray for all tests of this folder, on loopback and with a small object store; groups that several tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

# First: it makes Ray listen on loopback alone, which Ray reads when it is imported.
from rl_core.workers import WorkerGroup
from tests.ray.gloo_backend import GlooBackend, spec_of


@pytest.fixture(scope="session", autouse=True)
def ray_session() -> Iterator[None]:
    """Ray starts in 5 to 8 s, an actor with torch in 3 to 6 s."""
    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 * 2**20,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[WorkerGroup]:
    """Two data ranks × two pipeline stages: ranks 0 and 1 are the first stage and hold no results."""
    group = asyncio.run(WorkerGroup.launch(GlooBackend(), spec_of(pipeline=2), ranks_per_node=4, timeout_s=60))
    yield group
    asyncio.run(group.close())


def running(command: str) -> list[int]:
    """Process ids of this machine whose command line contains `command`; a rank is called `ray::RayRank`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode() if entry.name.isdigit() else ""
        except OSError:
            continue
        if command in line:
            found.append(int(entry.name))
    return found
