"""Limits how many sandboxes this user runs at a time on the machine and, if the user is root, gives each sandbox a
separate user.

Each slot has a lock file, so the limit holds for all of this user's processes together. The sandbox's supervisor
inherits the lock: a slot is free when the supervisor and the process that started the supervisor have both ended or
released the lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pwd
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import attrs

from rl_core.errors import ConfigError, DeadlineError

_FIRST_USER, MOST_SLOTS = 60578, 303
"""User ids that no distribution assigns (systemd's table of users and groups: 60578 to 61183) and that lie within a
container's usual mapping of 65,536 ids. A slot uses two of them."""
_RETRY_S = 0.02


@attrs.frozen(kw_only=True)
class Slot:
    """A locked slot, in which one sandbox may run."""

    uid: int
    """Id of the user that runs the sandbox's programs: a separate user per slot if this process is root, else this
    process's user."""
    ending_uid: int
    """User id with which the supervisor kills the slot's processes; no other process has this id."""
    work: Path
    """Directory of this slot, which other users cannot list."""
    lock_fd: int
    """Open descriptor of the locked file."""


@contextlib.asynccontextmanager
async def locked_slot(count: int, *, wait_s: float) -> AsyncIterator[Slot]:
    """Waits for a free slot and keeps it locked until the context ends.

    Args:
        count: number of slots, at most `MOST_SLOTS`.
        wait_s: longest wait in seconds.

    Raises:
        DeadlineError: no slot became free within `wait_s`.
        ConfigError: the directory for the lock files cannot be used.
    """
    deadline = time.monotonic() + wait_s
    while (slot := _free_slot(count)) is None:
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"waited {wait_s:g} s for one of the {count} sandbox slots of this user ({slots_directory()}), "
                "all in use by other programs: raise `slots` if CPU cores are idle, or raise `wait_s`"
            )
        await asyncio.sleep(_RETRY_S)
    try:
        yield slot
    finally:
        os.close(slot.lock_fd)


def slots_directory() -> Path:
    """Returns the directory of this user's lock files; creates it if necessary. Raises ConfigError if the directory
    cannot be used."""
    uid = os.getuid()
    directory = Path("/run/rl-sandbox") if uid == 0 else Path(tempfile.gettempdir()) / f"rl-sandbox-{uid}"
    try:
        # A slot's user must be able to traverse root's directory, but not to list it.
        directory.mkdir(mode=0o711 if uid == 0 else 0o700, exist_ok=True)
        owner = directory.lstat().st_uid
    except OSError as error:
        raise ConfigError(f"the directory of the sandbox's lock files cannot be used: {directory}: {error}") from error
    if owner != uid:
        raise ConfigError(
            f"{directory} belongs to user {owner}; expected {uid}: remove it, and the sandbox creates its own"
        )
    return directory


def _free_slot(count: int) -> Slot | None:
    directory = slots_directory()
    for index in range(count):
        uid = _FIRST_USER + index if os.getuid() == 0 else os.getuid()
        if os.getuid() == 0 and _has_name(uid):
            continue
        fd = os.open(directory / f"{index}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        work = directory / f"work-{index}"
        work.mkdir(mode=0o700, exist_ok=True)
        return Slot(uid=uid, ending_uid=uid + MOST_SLOTS, work=work, lock_fd=fd)
    return None


def _has_name(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True
