"""Finds a sandbox mechanism that works on this machine: a program that runs in it tries to escape, and must fail.

It would not suffice to check kernel versions and settings: a container's seccomp filter, AppArmor or a missing file can
each forbid a mechanism, or let it start without effect.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import attrs

from rl_core.errors import ConfigError, DeadlineError
from rl_environments.sandbox.bubblewrap import missing_programs
from rl_environments.sandbox.limits import ProgramLimits, SandboxError, Test
from rl_environments.sandbox.sandbox import Mechanism, Sandbox
from rl_environments.sandbox.seccomp import seccomp_filter
from rl_environments.sandbox.slots import MOST_SLOTS

logger = logging.getLogger(__name__)
Kind = Literal["auto", "bubblewrap", "landlock", "none"]
_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
_LIMITS = ProgramLimits(cpu_s=20, wall_s=60.0)
_ESCAPES = """
import os, socket

def escapes(secret, neighbour, port, pid):
    def works(attempt):
        try:
            attempt()
        except OSError:
            return False
        return True

    attempts = {
        "read a file of the run": lambda: open(secret).read(),
        "write outside": lambda: open(neighbour, "w").close(),
        "connect": lambda: socket.create_connection(("127.0.0.1", port), timeout=5).close(),
        "signal another process": lambda: os.kill(pid, 0),
        "read another process's environment": lambda: open(f"/proc/{pid}/environ").read(),
    }
    return [name for name, attempt in attempts.items() if works(attempt)]
"""


async def probe_sandbox(
    kind: Kind = "auto", *, python: str | None = None, readable: Sequence[str] = (), slots: int | None = None
) -> Sandbox:
    """Returns a sandbox that works on this machine: a test program has run in it. Unless `kind` is `none`, the program
    has failed to read, write, connect to or signal anything outside.

    Args:
        kind: `auto` tries bubblewrap, then Landlock. `none` runs programs without protection, so they may do whatever
            this process may.
        python: path of the interpreter that runs the programs; None: the system's, else this process's if the sandbox's
            user may read it.
        readable: directories that programs may read besides the system's.
        slots: maximum number of programs at a time, from 1 to `MOST_SLOTS`; None: one per CPU core.

    Raises:
        ConfigError: a setting is invalid, or no mechanism works on this machine; the message says why, and what to
            install.
    """
    _require_settings(kind, readable)
    slots = min(MOST_SLOTS, len(os.sched_getaffinity(0))) if slots is None else slots
    mechanisms: list[Mechanism] = ["bubblewrap", "landlock"] if kind == "auto" else [kind]
    reasons: dict[str, str] = {}
    for mechanism in mechanisms:
        found = await _first_that_holds(mechanism, python, tuple(readable), slots)
        if isinstance(found, Sandbox):
            _log(found, reasons)
            return found
        reasons[mechanism] = found
    raise ConfigError(_refusal(kind, reasons))


_lock = threading.Lock()
_shared: dict[tuple[Any, ...], Sandbox] = {}
_refused: dict[tuple[Any, ...], tuple[float, str]] = {}
"""Settings with which no mechanism worked → when that was found, and why."""
_REFUSED_S = 60.0
"""Time after which a refused setting is probed again, because the reason may be temporary, such as a busy machine.
Without this delay, each of a step's thousands of samples would probe, one after another."""


async def shared_sandbox(
    kind: Kind = "auto", *, python: str | None = None, readable: Sequence[str] = (), slots: int | None = None
) -> Sandbox:
    """Returns the sandbox with these settings. The first call in a process probes it (`probe_sandbox`), and later calls
    return the same sandbox. If no mechanism works, calls of the next minute raise the same ConfigError."""
    key = (kind, python, tuple(readable), slots)

    def probed() -> Sandbox:
        with _lock:
            found_at, reason = _refused.get(key, (-math.inf, ""))
            if time.monotonic() - found_at < _REFUSED_S:
                raise ConfigError(reason)
            if key not in _shared:
                try:
                    _shared[key] = asyncio.run(probe_sandbox(kind, python=python, readable=readable, slots=slots))
                except ConfigError as error:
                    _refused[key] = time.monotonic(), str(error)
                    raise
            return _shared[key]

    # Probe in another thread, not on the first caller's event loop: callers on other event loops wait for the result.
    return _shared[key] if key in _shared else await asyncio.to_thread(probed)


def _require_settings(kind: Kind, readable: Sequence[str]) -> None:
    if kind not in get_args(Kind):
        raise ConfigError(f"sandbox: got {kind!r}; expected one of {', '.join(get_args(Kind))}")
    if sys.platform != "linux":
        raise ConfigError(f"sandbox: programs can be run only on Linux; this machine is {sys.platform}")
    for path in readable:
        if not Path(path).is_absolute() or not Path(path).exists():
            raise ConfigError(f"readable: got {path!r}; expected absolute paths of files or directories that exist")


async def _first_that_holds(
    mechanism: Mechanism, python: str | None, readable: tuple[str, ...], slots: int
) -> Sandbox | str:
    """Returns a sandbox that works with this mechanism, or the reason why there is none."""
    try:
        lacking = _what_is_missing(mechanism)
    except ConfigError as error:
        lacking = str(error)
    if lacking is not None:
        return lacking
    reasons: list[str] = []
    for candidate in [python] if python else [*filter(os.path.exists, _PYTHONS), _own_python()]:
        sandbox = Sandbox(
            mechanism=mechanism, python=candidate, readable=(*readable, *_prefix_of(candidate)), slots=slots
        )
        found = await _tried(sandbox)
        if isinstance(found, Sandbox):
            return found
        reasons.append(f"with {candidate}: {found}")
    return "; ".join(reasons)


def _what_is_missing(mechanism: Mechanism) -> str | None:
    if mechanism == "none":
        return None
    seccomp_filter()  # raises ConfigError on a processor whose system calls the sandbox cannot filter
    if mechanism == "bubblewrap":
        missing = missing_programs()
        return f"not installed: {' and '.join(missing)}" if missing else None
    return None if os.getuid() == 0 else f"it needs root, to run programs as another user; this is user {os.getuid()}"


async def _tried(sandbox: Sandbox) -> Sandbox | str:
    """Tries to escape. Returns the sandbox with the measured `has_disk`, or the reason why it cannot be used."""
    try:
        found, has_disk = await escapes(sandbox)
    except (SandboxError, DeadlineError, OSError) as error:
        return str(error)
    if found and sandbox.mechanism != "none":
        return f"it is not secure: a program in it could {', '.join(found)}"
    return attrs.evolve(sandbox, has_disk=has_disk)


async def escapes(sandbox: Sandbox) -> tuple[list[str], bool]:
    """Runs a program that tries to escape; returns the forbidden actions that succeeded, and whether programs have a
    directory to write to.

    Raises:
        SandboxError, DeadlineError: the program cannot be run.
    """
    with tempfile.TemporaryDirectory() as directory, socket.create_server(("127.0.0.1", 0)) as server:
        # Everyone may read and write this directory, so that only the sandbox can keep the program out.
        Path(directory).chmod(0o777)
        secret = Path(directory) / "secret"
        secret.write_text("secret")
        test = Test(
            function="escapes",
            arguments=[str(secret), f"{directory}/written", server.getsockname()[1], os.getpid()],
        )
        async with sandbox.opened(_ESCAPES, limits=_LIMITS) as session:
            outcome = await session.run(test)
    if not outcome.is_complete:
        raise SandboxError(f"the program that tries to escape failed: {outcome.end}, {outcome.stderr[-300:]!r}")
    return outcome.value, session.has_disk


def _own_python() -> str:
    """Returns the path of this process's interpreter, outside of its virtual environment."""
    return str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")


def _prefix_of(python: str) -> tuple[str, ...]:
    """Returns the directory that contains an interpreter and its library; nothing if it lies below /usr, which programs
    may read anyway."""
    prefix = Path(python).resolve().parent.parent
    return () if prefix.is_relative_to("/usr") else (str(prefix),)


def _log(sandbox: Sandbox, reasons: dict[str, str]) -> None:
    if sandbox.mechanism == "none":
        logger.warning("programs run WITHOUT a sandbox, as this user, because sandbox=none is set")
        return
    passed_over = "".join(f"; {mechanism} does not work: {reason}" for mechanism, reason in reasons.items())
    disk = "" if sandbox.has_disk else ", without a directory to write in"
    logger.info("programs run in a %s sandbox with %s%s%s", sandbox.mechanism, sandbox.python, disk, passed_over)


def _refusal(kind: Kind, reasons: dict[str, str]) -> str:
    tried = "; ".join(f"{mechanism}: {reason}" for mechanism, reason in reasons.items())
    return (
        f"sandbox: {kind!r} cannot run untrusted programs on this machine ({tried}). Install bubblewrap (`apt-get "
        "install bubblewrap`, or your distribution's command), which needs user namespaces; or run as root on a kernel "
        "with Landlock (5.13 or later). Either needs a Python 3.8 or later that every user may read (`apt-get install "
        "python3`). "
        "sandbox=none runs programs without a sandbox: code that the policy writes can then do whatever this user can"
    )
