"""Creates temporary folders in memory or on disk, and removes them after the process that created them has ended.

A folder's name contains its purpose, the run and the process id; run and process id are only for human readers. A
process holds a lock on each of its folders: flock(2) on a file in the folder, which the kernel releases when the
process ends. Such locks also work if containers share the parent directory but not process ids. Before a process
creates a folder, it removes the user's folders that no process holds any more: in the same parent, in the temporary
directory, and in memory (/dev/shm). So the next run on the machine removes the folders that a killed run left there,
whichever transport it uses. While a process creates a folder, it holds a shared lock on the parent. So if no process
holds the parent's lock, no folder is being created, and a folder without a lock has been abandoned.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

logger = logging.getLogger(__name__)

_KINDS = ("weights", "proof")
_MEMORY = Path("/dev/shm")
_HELD = ".held"
_YOUNG_S = 60.0
"""A folder older than this many seconds that still has no lock counts as abandoned."""
_LOCK_S = 5.0
"""Seconds to wait for the parent's lock. Processes that create folders hold this lock together (shared); a process that
removes abandoned folders holds it alone, but only briefly."""
_held: dict[str, int] = {}
"""Folder of this process → file descriptor of its lock. A forked child closes its copies of the descriptors; otherwise
the lock would last until the child ends too."""


def make_folder(parent: str | Path | None, run: str, kind: Literal["weights", "proof"] = "weights") -> str:
    """Creates a folder that only this user can read, held until `remove_folder` or the end of this process.

    Args:
        parent: the parent directory; None: the temporary directory.
        run: name of the run, part of the folder's name.
        kind: purpose, part of the folder's name.
    """
    place = Path(parent or tempfile.gettempdir())
    reclaim_folders(place)
    name = re.sub(r"[^\w.]+", "_", run)[:40] or "run"
    with _locked(place, fcntl.LOCK_SH, timeout_s=_LOCK_S):
        folder = tempfile.mkdtemp(prefix=f"rl-{kind}-{name}-{os.getpid()}-", dir=place)
        descriptor = os.open(Path(folder, _HELD), os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks; folders on it are never reclaimed
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.write(descriptor, b"locked\n")
    _held[folder] = descriptor
    return folder


def remove_folder(folder: str) -> None:
    """Removes the folder; a second call does nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    descriptor = _held.pop(folder, None)
    if descriptor is not None:
        os.close(descriptor)


@contextlib.contextmanager
def held_folder(run: str, kind: Literal["weights", "proof"]) -> Iterator[Path]:
    """Context that creates a folder in the temporary directory, and removes it at the end of the block."""
    folder = make_folder(None, run, kind)
    try:
        yield Path(folder)
    finally:
        remove_folder(folder)


def reclaim_folders(*places: Path) -> None:
    """Removes this user's folders that no process holds: in the temporary directory, in memory, and in `places`."""
    for place in {Path(tempfile.gettempdir()), _MEMORY, *places}:
        for folder in (found for kind in _KINDS for found in place.glob(f"rl-{kind}-*")):
            with contextlib.suppress(OSError):  # another process is just removing it, or it belongs to another user
                if str(folder) not in _held and folder.stat().st_uid == os.getuid() and _is_abandoned(folder):
                    shutil.rmtree(folder)
                    logger.warning("removed %s, which a killed run had left behind", folder)


def _is_abandoned(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / _HELD, os.O_RDWR)
    except FileNotFoundError:
        return _is_unmade(folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The creator writes to the file once it holds the lock. An empty file may belong to a folder being created.
        return os.fstat(descriptor).st_size > 0 or _is_unmade(folder)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _is_unmade(folder: Path) -> bool:
    """Whether the process that was creating this folder ended before it locked the folder."""
    if time.time() - folder.stat().st_mtime > _YOUNG_S:
        return True
    with _locked(folder.parent, fcntl.LOCK_EX, timeout_s=0.0) as nobody_makes_any:
        # Check again, because the folder's creator may just have finished.
        held = folder / _HELD
        return nobody_makes_any and not (held.exists() and held.stat().st_size > 0)


@contextlib.contextmanager
def _locked(place: Path, kind: int, *, timeout_s: float) -> Iterator[bool]:
    """Context that locks the directory `place` itself; its value is whether the lock was acquired in time."""
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _lock(descriptor, kind, time.monotonic() + timeout_s)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)
        except OSError:  # a file system without locks
            return False


def _give_up() -> None:
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_give_up)
