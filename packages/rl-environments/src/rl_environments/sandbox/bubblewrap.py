"""Builds the command line of bubblewrap, which gives the sandbox separate namespaces for files, network, processes and
users."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

WORK = "/work"
SUPERVISOR = "/supervisor"
_NOBODY = "65534"
_MERGED = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""These paths are links into /usr on most systems, and directories on others."""


def missing_programs() -> list[str]:
    """Returns the programs that bubblewrap needs and that are not installed."""
    needed = ["bwrap", "setpriv"] if os.getuid() == 0 else ["bwrap"]
    return [name for name in needed if shutil.which(name) is None]


def _found(name: str) -> str:
    """Returns the path of a program. The command runs with a shorter PATH than this process, so a name alone may not be
    found."""
    return shutil.which(name) or name


def bubblewrap_command(
    command: Sequence[str], *, uid: int, disk_bytes: int, readable: Sequence[str], files: Mapping[str, int]
) -> list[str]:
    """Returns the command line that runs `command` as process 1 of the sandbox.

    Args:
        uid: id of the sandbox's user as seen from outside. If this process is root, `uid` must not be root's,
            because limits do not apply to root.
        disk_bytes: size of the sandbox's only writable directory, which is kept in memory.
        readable: paths mounted read-only, besides the system's programs and libraries.
        files: open file descriptors by the path at which the sandbox sees their content.
    """
    return [
        *(_as_user(uid) if os.getuid() == 0 else []),
        *(_found("bwrap"), "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"),
        *("--uid", _NOBODY, "--gid", _NOBODY, "--hostname", "sandbox"),
        *("--ro-bind", "/usr", "/usr", *_system_directories()),
        *("--dir", "/etc", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
        *(word for path in readable for word in ("--ro-bind", path, path)),
        *("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"),
        *("--size", str(disk_bytes), "--tmpfs", WORK, "--symlink", WORK.lstrip("/"), "/tmp"),
        *(word for path, fd in files.items() for word in ("--ro-bind-data", str(fd), path)),
        # Otherwise the root is a writable in-memory file system without a limit.
        *("--remount-ro", "/", "--chdir", "/"),
        "--",
        *command,
    ]


def _as_user(uid: int) -> list[str]:
    # Runs a program instead of passing `user` to `Popen`: with `user`, Python calls fork instead of vfork, and fork
    # copies the page tables of a whole trainer.
    return [_found("setpriv"), f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]


def _system_directories() -> list[str]:
    words: list[str] = []
    for path in map(Path, _MERGED):
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    return words
