"""What the tests here share: a Ray session, on loopback and with a small object store, and a worker group."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from rl_core.workers import WorkerGroup, ray_ranks
from tests.local_ray import start_ray
from tests.ray.gloo_backend import GlooBackend, spec_of

START_S = 240.0
"""Longest time for a group to start. On a busy machine, the imports of a rank alone may take half a minute."""
IN_TIME_S = 100.0
"""Longest wait for an error. On a free machine the error comes at once. The deadline of a call is START_S or longer."""
SLEEP_S = str(10_000_000 + os.getpid())
"""Argument of the `sleep` processes that ranks start. No other process has the same argument."""


@pytest.fixture(scope="session", autouse=True)
def ray_session() -> Iterator[None]:
    """A Ray session, shared because Ray takes 5 to 8 s to start, and an actor with torch 3 to 6 s."""
    start_ray()
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def four_ranks(ray_session: None) -> Iterator[WorkerGroup]:
    """A group of two data ranks × two pipeline stages. Ranks 0 and 1 are the first stage and return no results."""
    group = asyncio.run(WorkerGroup.launch(GlooBackend(), spec_of(pipeline=2), ranks_per_node=4, timeout_s=START_S))
    yield group
    asyncio.run(group.close())


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Requires that a test leaves behind no rank, no child process of a rank and no placement group."""
    before = resources_in_use()
    yield
    require_resources(before)


@pytest.fixture
def late_news_of_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives Ray a minute to report the death of a rank after another rank has reported that it lost its peer. The
    wait ends as soon as every rank has answered or is reported dead, so it is short if the rank died in a collective
    call."""
    monkeypatch.setattr(ray_ranks, "_SETTLE_S", 60.0)


async def make_calls(
    launching: Awaitable[WorkerGroup], calls: Callable[[WorkerGroup], Iterable[Callable[[], Awaitable[Any]]]]
) -> None:
    """Makes the calls one after another and closes the group. If a call fails, requires that no ranks are left, and
    sets the error's `seconds` to the time since the start of the call."""
    group, started, before = None, time.monotonic(), resources_in_use()
    try:
        group = await launching
        for call in calls(group):
            started = time.monotonic()
            await call()
    except Exception as error:
        error.seconds = time.monotonic() - started  # pyright: ignore[reportAttributeAccessIssue]
        # The group is not closed yet: the failed call itself must have ended all ranks.
        require_resources(before)
        raise
    finally:
        if group is not None:
            await group.close()


def resources_in_use() -> tuple[list[int], list[int], list[str]]:
    """The process ids of ranks and of their children, and the ids of placement groups, at present."""
    return ranks_running(), children_running(), placements()


def require_resources(expected: tuple[list[int], list[int], list[str]]) -> None:
    """Requires exactly these ranks, children and placement groups, after waiting up to 60 s for processes to end."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and resources_in_use() != expected:
        time.sleep(0.05)
    assert resources_in_use() == expected


def placements() -> list[str]:
    """The ids of the placement groups that hold resources."""
    table = ray.util.placement_group_table()
    return [placement for placement, group in table.items() if group["state"] == "CREATED"]


def ranks_running() -> list[int]:
    """Process ids of the ranks that this process's Ray started."""
    return [pid for pid in _running("ray::RayRank") if os.getpid() in _ancestors(pid)]


def children_running() -> list[int]:
    """Process ids of the `sleep` processes that ranks started, even if the rank is gone."""
    return _running(f"sleep {SLEEP_S}")


def _running(command: str) -> list[int]:
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if command in _read(entry / "cmdline")]


def _ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        # The parent's id is the second field after the command. The command is in brackets and may contain anything.
        fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
        pid = int(fields[1]) if fields else 0
        found.append(pid)
    return found


def _read(path: Path) -> str:
    try:
        return path.read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
