"""Shared code of the sandbox tests: creates sandboxes, runs programs in them, and finds processes left behind."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import attrs
import pytest

from rl_core.errors import ConfigError
from rl_environments.sandbox import ProgramLimits, ProgramOutcome, Sandbox, Test, shared_sandbox

MECHANISMS = ("bubblewrap", "landlock")
LIMITS = ProgramLimits(cpu_s=10, wall_s=60.0)
"""Limits for tests that do not test limits; high enough for a busy machine."""
WALL_LIMITS_S = (0.5, 5.0, 50.0)
"""Wall-clock limits for programs that must do something before the limit ends them. A busy machine may pause a program
for longer than the first limit; then the test is repeated with the next limit."""
SLOTS = 8
DEADLINE_S = 120.0


async def sandbox_by(mechanism: Any) -> Sandbox:
    """A sandbox that uses `mechanism`. Skips the test if this machine does not support it."""
    try:
        return await shared_sandbox(mechanism, slots=SLOTS)
    except ConfigError as error:
        pytest.skip(f"this machine does not support {mechanism} sandboxes: {error}")


async def sandbox_without_mounts(directory: Path) -> Sandbox:
    """A Landlock sandbox as in most containers: root without the right to mount, so programs have no directory to write
    to. Its interpreter is a script in `directory` that drops the capabilities."""
    sandbox = await sandbox_by("landlock")
    python = directory / "python"
    rights = "-sys_admin,-sys_ptrace"
    python.write_text(f'#!/bin/sh\nexec setpriv --bounding-set {rights} --inh-caps {rights} {sandbox.python} "$@"\n')
    python.chmod(0o755)
    return attrs.evolve(sandbox, python=str(python), has_disk=False)


async def outcome_of(sandbox: Sandbox, program: str, *, limits: ProgramLimits = LIMITS, **test: Any) -> ProgramOutcome:
    """Runs one test of a program and returns its outcome."""
    (outcome,) = await sandbox.run(program, [Test(**test)], limits=limits)
    return outcome


async def answer_of(sandbox: Sandbox, program: str, *arguments: Any, limits: ProgramLimits = LIMITS) -> Any:
    """Calls the program's function `attack` and returns its value. Fails if the call does not complete."""
    outcome = await outcome_of(sandbox, program, limits=limits, function="attack", arguments=arguments)
    assert outcome.is_complete, outcome
    return outcome.value


def processes_named(marker: str) -> list[int]:
    """Ids of all processes on this machine whose command line contains `marker`."""
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
    """Waits until no command line contains `marker`. Fails if a process is left after `DEADLINE_S`."""
    deadline = time.monotonic() + DEADLINE_S
    while left := processes_named(marker):
        assert time.monotonic() < deadline, f"processes still running after {DEADLINE_S:g} s: {left}"
        time.sleep(0.02)
