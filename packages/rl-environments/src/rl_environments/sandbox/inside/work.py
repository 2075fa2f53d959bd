"""Prepares the only directory that a test may write to, and empties it before each test."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from rl_environments.sandbox.inside import confinement


def prepare_work(box: dict[str, Any]) -> None:
    """If the mechanism is Landlock, moves this process to its own mount namespace, in which `empty_work` mounts the
    directory with a limited size. If this is not permitted, tests get no directory: `box["work"]` becomes None."""
    box["is_mounted"] = False
    if box["mechanism"] == "landlock":
        try:
            confinement.leave_mounts()
            box["is_mounted"] = True
        except PermissionError:  # root without CAP_SYS_ADMIN, as in most containers
            box["work"] = None


def empty_work(box: dict[str, Any]) -> None:
    """Gives the next test an empty directory. Raises OSError if the old content cannot be removed or the directory
    cannot be mounted."""
    if box["is_mounted"]:
        with contextlib.suppress(OSError):  # nothing is mounted before the first test
            confinement.unmount(box["work"])
        confinement.mount_memory(box["work"], box["uid"], box["limits"]["disk_bytes"], box["limits"]["files"])
    elif box["work"]:
        _remove_below(box["work"])


def _remove_below(directory: str) -> None:
    """Removes all content of a directory, including entries that the program made inaccessible; links are removed, not
    followed."""
    directories = [directory]
    # The loop appends subdirectories after their parent. All tests have ended, so no process creates files meanwhile.
    for path in directories:
        os.chmod(path, 0o700)
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    directories.append(entry.path)
                else:
                    os.unlink(entry.path)
    for path in reversed(directories[1:]):
        os.rmdir(path)
