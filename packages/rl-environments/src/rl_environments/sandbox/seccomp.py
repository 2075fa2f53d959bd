"""Builds the seccomp filter of a program in the sandbox, in the kernel's language (classic BPF).

The filter refuses: access to other processes' memory; memory that no limit counts (memfd, SysV); namespaces and
mounts; keys; io_uring (because its operations bypass the filter); changes of priority and scheduling; administration of
the machine; system calls newer than the table of calls below; and all sockets except Unix socket pairs. `pyseccomp`
could build such a filter too, but needs libseccomp on the machine and has had no release since 2021.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Mapping

import attrs

from rl_core.errors import ConfigError

_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_X32 = 0x40000000  # x86 calls with 32-bit pointers, which have their own numbers
_FIRST_UNKNOWN = 463
"""The first call newer than the table: setxattrat of Linux 6.13. Calls from 424 on have the same number on both
architectures."""
_AF_UNIX, _PR_SET_DUMPABLE = 1, 4
_Instruction = tuple[int, int, int, int]


@attrs.frozen(kw_only=True)
class Architecture:
    """System call numbers of one processor architecture."""

    audit: int
    """The kernel's id of the architecture (AUDIT_ARCH_…)."""
    refused: Mapping[str, int]
    """Calls that are refused whatever their arguments, as a mapping from name to number."""
    clone: int
    prctl: int
    prlimit64: int
    socket: int
    socketpair: int
    has_x32: bool = False


_EVERYWHERE = {
    "pidfd_getfd": 438, "process_madvise": 440, "memfd_secret": 447, "process_mrelease": 448, "pidfd_send_signal": 424,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "mount_setattr": 442, "quotactl_fd": 443, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "clone3": 435, "set_mempolicy_home_node": 450,
}  # fmt: skip
_X86_64 = {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
    "memfd_create": 319, "shmget": 29, "shmat": 30, "shmctl": 31, "shmdt": 67, "msgget": 68, "semget": 64,
    "mq_open": 240,
    "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161,
    "add_key": 248, "request_key": 249, "keyctl": 250, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
    "init_module": 175, "finit_module": 313, "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320,
    "name_to_handle_at": 303, "open_by_handle_at": 304, "personality": 135, "syslog": 103, "acct": 163,
    "swapon": 167, "swapoff": 168, "quotactl": 179, "fanotify_init": 300, "lookup_dcookie": 212, "vhangup": 153,
    "mbind": 237, "set_mempolicy": 238, "migrate_pages": 256, "move_pages": 279, "reboot": 169, "sethostname": 170,
    "setdomainname": 171, "settimeofday": 164, "clock_settime": 227, "adjtimex": 159, "clock_adjtime": 305,
    "setpriority": 141, "sched_setscheduler": 144, "sched_setparam": 142, "sched_setattr": 314,
    "sched_setaffinity": 203, "ioprio_set": 251,
    "modify_ldt": 154, "iopl": 172, "ioperm": 173, "uselib": 134, "_sysctl": 156, "ustat": 136, "sysfs": 139,
}  # fmt: skip
_AARCH64 = {
    "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
    "memfd_create": 279, "shmget": 194, "shmat": 196, "shmctl": 195, "shmdt": 197, "msgget": 186, "semget": 190,
    "mq_open": 180,
    "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51,
    "add_key": 217, "request_key": 218, "keyctl": 219, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
    "init_module": 105, "finit_module": 273, "delete_module": 106, "kexec_load": 104, "kexec_file_load": 294,
    "name_to_handle_at": 264, "open_by_handle_at": 265, "personality": 92, "syslog": 116, "acct": 89,
    "swapon": 224, "swapoff": 225, "quotactl": 60, "fanotify_init": 262, "lookup_dcookie": 18, "vhangup": 58,
    "mbind": 235, "set_mempolicy": 237, "migrate_pages": 238, "move_pages": 239, "reboot": 142, "sethostname": 161,
    "setdomainname": 162, "settimeofday": 170, "clock_settime": 112, "adjtimex": 171, "clock_adjtime": 266,
    "setpriority": 140, "sched_setscheduler": 119, "sched_setparam": 118, "sched_setattr": 274,
    "sched_setaffinity": 122, "ioprio_set": 30,
}  # fmt: skip
ARCHITECTURES = {
    "x86_64": Architecture(
        audit=0xC000003E, refused={**_EVERYWHERE, **_X86_64}, clone=56, prctl=157, prlimit64=302, socket=41,
        socketpair=53, has_x32=True,
    ),
    "aarch64": Architecture(
        audit=0xC00000B7, refused={**_EVERYWHERE, **_AARCH64}, clone=220, prctl=167, prlimit64=261, socket=198,
        socketpair=199,
    ),
}  # fmt: skip


def seccomp_filter(machine: str | None = None) -> bytes:
    """Returns the filter, with eight bytes per instruction.

    Args:
        machine: name as in `platform.machine`; None: this machine.

    Raises:
        ConfigError: the table has no numbers for this processor.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise ConfigError(
            f"sandbox: got the processor {machine!r}; expected one of {', '.join(ARCHITECTURES)}, whose system "
            "calls the sandbox can filter. Use such a machine or, if you trust what the policy writes, sandbox=none"
        )
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in _instructions(ARCHITECTURES[machine]))


def _instructions(architecture: Architecture) -> list[_Instruction]:
    # ENOSYS makes the C library fall back to older calls, e.g. from clone3 to clone, whose flags a filter can read.
    refused = [_refuse_if(number, _ENOSYS) for number in sorted(architecture.refused.values())]
    return [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture.audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        *([(_JUMP_AT_LEAST, 0, 1, _X32), _error(_ENOSYS)] if architecture.has_x32 else []),
        (_JUMP_AT_LEAST, 0, 1, _FIRST_UNKNOWN),
        _error(_ENOSYS),
        *[instruction for pair in refused for instruction in pair],
        *_refuse_if(architecture.socket, _EAFNOSUPPORT),
        *_when(architecture.clone, [(_JUMP_ANY_BIT, 0, 1, _NEW_NAMESPACES), _error(_EPERM)]),
        *_when(architecture.socketpair, [(_JUMP_EQUAL, 1, 0, _AF_UNIX), _error(_EAFNOSUPPORT)]),
        # A process that is not dumpable would hide its memory use.
        *_when(architecture.prctl, [(_JUMP_EQUAL, 0, 1, _PR_SET_DUMPABLE), _error(_EPERM)]),
        # A process may call prlimit64 only for itself (pid 0).
        *_when(architecture.prlimit64, [(_JUMP_EQUAL, 1, 0, 0), _error(_EPERM)]),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _error(number: int) -> _Instruction:
    return (_RETURN, 0, 0, _ERROR | number)


def _refuse_if(call: int, error: int) -> list[_Instruction]:
    return [(_JUMP_EQUAL, 0, 1, call), _error(error)]


def _when(call: int, on_first_argument: list[_Instruction]) -> list[_Instruction]:
    """Filters a call by the lower half of its first argument, the only half that the filtered calls read."""
    body = [(_LOAD, 0, 0, _FIRST_ARGUMENT), *on_first_argument, (_RETURN, 0, 0, _ALLOW)]
    return [(_JUMP_EQUAL, 0, len(body), call), *body]
