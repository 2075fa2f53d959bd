"""Shared by the tests of the sandbox: the mechanisms this machine has, and ways to run programs and find processes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import attrs
import pytest

from rl_core.errors import ConfigError
from rl_environments.sandbox import Limits, Outcome, Sandbox, Test, shared_sandbox

MECHANISMS = ("bubblewrap", "landlock")
LIMITS = Limits(cpu_s=10, wall_s=60.0)
"""Large enough that tests of something else do not reach them on a busy machine."""
SLOTS = 8
DEADLINE_S = 60.0


async def sandbox_by(mechanism: Any) -> Sandbox:
    """A sandbox that uses `mechanism`; skips the test if this machine cannot provide it."""
    try:
        return await shared_sandbox(mechanism, slots=SLOTS)
    except ConfigError as error:
        pytest.skip(f"this machine has no sandbox by {mechanism}: {error}")


async def sandbox_without_mounts(directory: Path) -> Sandbox:
    """A Landlock sandbox as in most containers: root without the right to mount, so without a writable directory."""
    sandbox = await sandbox_by("landlock")
    python = directory / "python"
    rights = "-sys_admin,-sys_ptrace"
    python.write_text(f'#!/bin/sh\nexec setpriv --bounding-set {rights} --inh-caps {rights} {sandbox.python} "$@"\n')
    python.chmod(0o755)
    return attrs.evolve(sandbox, python=str(python), has_disk=False)


async def outcome_of(sandbox: Sandbox, program: str, *, limits: Limits = LIMITS, **test: Any) -> Outcome:
    """The outcome of one test of a program."""
    (outcome,) = await sandbox.run(program, [Test(**test)], limits=limits)
    return outcome


async def answer_of(sandbox: Sandbox, program: str, *arguments: Any, limits: Limits = LIMITS) -> Any:
    """What the program's function `attack` returns; fails the test if the function does not return."""
    outcome = await outcome_of(sandbox, program, limits=limits, function="attack", arguments=arguments)
    assert outcome.is_complete, outcome
    return outcome.value


def processes_named(marker: str) -> list[int]:
    """The ids of all processes on this machine whose command line contains `marker`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if marker.encode() in words:
            found.append(int(path.parent.name))
    return found


def wait_until_gone(marker: str) -> None:
    """Waits until no process has `marker` in its command line; fails at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while left := processes_named(marker):
        assert time.monotonic() < deadline, f"still there after {DEADLINE_S:g} s: {left}"
        time.sleep(0.02)
