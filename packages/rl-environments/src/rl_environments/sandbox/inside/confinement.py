"""Restricts a process before it runs a program: limits, user, files, system calls.

The constants come from the kernel's headers. The C library has no functions for Landlock, so its system calls are made
by number.
"""

from __future__ import annotations

import base64
import ctypes
import os
import resource
import signal
import stat
import struct
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1, 2, 4, 8, 1 << 14
_CLONE_NEWNS, _MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 0x20000, 2, 4, 0x4000, 0x40000
_NICENESS = 5


def confine(box: dict[str, Any]) -> None:
    """Confines this process, a child of the supervisor, so that it may run the program. Raises OSError."""
    limit_resources(box["limits"], box["max_processes"])
    if box["mechanism"] == "landlock":
        change_user(box["uid"])
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A change of user clears the dumpable flag, without which the supervisor cannot read this process's memory use.
    _prctl(_PR_SET_DUMPABLE, 1)
    # Lower priority, so that the supervisor can check clock and memory even if all processors are busy.
    os.nice(_NICENESS)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if box["mechanism"] == "landlock":
        restrict_files(box["readable"], [box["work"]] if box["work"] else [])
    if box["mechanism"] != "none":
        filter_calls(base64.b64decode(box["filter"]))


def limit_resources(limits: dict[str, Any], max_processes: int | None) -> None:
    """Sets the limits that the kernel enforces, for this process and each of its children.

    Args:
        max_processes: maximum number of processes of this process's user in its namespace; None: no limit.
    """
    cpu_s = limits["cpu_s"]
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
        (resource.RLIMIT_AS, limits["address_space_bytes"], limits["address_space_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"], limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        *([(resource.RLIMIT_NPROC, max_processes, max_processes)] if max_processes else []),
    ):
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))


def change_user(uid: int) -> None:
    """Permanently changes this process's user to `uid`, and leaves all supplementary groups. Needs root."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def act_as_user(uid: int, own_uid: int) -> None:
    """Lets this process signal the processes of `uid`, but not the reverse: the kernel compares the sender's user with
    the target's real and saved users, which are `own_uid` for this process. Needs root."""
    os.setgroups([])
    os.setresgid(own_uid, own_uid, own_uid)
    os.setresuid(own_uid, uid, own_uid)


def restrict_files(readable: list[str], writable: list[str]) -> None:
    """Uses Landlock to let this process read only files below `readable` or `writable`, and change only files below
    `writable`. Four devices, such as /dev/null, are exceptions. Newer kernels also forbid TCP, connections to
    abstract sockets of outside processes, and signals to outside processes."""
    version = landlock_version()
    every_access = (1 << 13) - 1
    every_access |= (version >= 2) << 13 | (version >= 3) << 14 | (version >= 5) << 15
    rules = struct.pack("<QQQ", every_access, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    rules = rules[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _call(_CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), 0)
    truncate = _TRUNCATE if version >= 3 else 0
    for paths, access in (
        (readable, _EXECUTE | _READ_FILE | _READ_DIR),
        (["/dev/null"], _READ_FILE | _WRITE_FILE | truncate),
        (["/dev/zero", "/dev/urandom", "/dev/random"], _READ_FILE),
        (writable, every_access),
    ):
        for path in filter(os.path.exists, paths):
            _allow_below(ruleset, path, access, truncate)
    _call(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow_below(ruleset: int, path: str, access: int, truncate: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    if not stat.S_ISDIR(os.fstat(fd).st_mode):
        access &= _EXECUTE | _WRITE_FILE | _READ_FILE | truncate
    _call(_ADD_RULE, ruleset, 1, struct.pack("<Qi", access, fd), 0)
    os.close(fd)


def landlock_version() -> int:
    """Returns the version of the kernel's Landlock. Raises OSError if the kernel lacks Landlock or has it disabled."""
    return _call(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)


def filter_calls(instructions: bytes) -> None:
    """Installs the filter in the kernel, for this process and all of its children."""

    class Program(ctypes.Structure):
        _fields_ = [("count", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]

    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = Program(len(instructions) // 8, ctypes.addressof(buffer))
    _prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(program))


def adopt_orphans() -> None:
    """Makes this process the new parent of a descendant when the descendant's parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """Prevents processes of the same user from opening this one's memory, files or environment in /proc."""
    _prctl(_PR_SET_DUMPABLE, 0)


def leave_mounts() -> None:
    """Makes later mounts visible only to this process and its children. Raises OSError."""
    if _LIBC.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    _mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)


def mount_memory(path: str, uid: int, num_bytes: int, files: int) -> None:
    """Mounts an empty in-memory directory of limited size that belongs to `uid`. Raises OSError."""
    # The directory itself counts as a file.
    options = f"size={num_bytes},nr_inodes={files + 1},mode=0700,uid={uid},gid={uid}"
    _mount(b"tmpfs", path.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options.encode())


def unmount(path: str) -> None:
    """Unmounts the latest mount at `path` and so drops its files. Raises OSError."""
    if _LIBC.umount2(path.encode(), 2):  # MNT_DETACH
        raise OSError(ctypes.get_errno(), "umount2", path)


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int, options: bytes | None) -> None:
    if _LIBC.mount(source, target, kind, ctypes.c_ulong(flags), options):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), target.decode())


def _prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    if _LIBC.prctl(option, *padded):
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def _call(number: int, *arguments: Any) -> int:
    result = _LIBC.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"system call {number}: {os.strerror(error)}")
    return result
