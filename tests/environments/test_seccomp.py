"""The system call filter, interpreted here instruction by instruction, for this machine's processor and for others."""

from __future__ import annotations

import struct

import pytest

from rl_core.errors import ConfigError
from rl_environments.sandbox.seccomp import ARCHITECTURES, seccomp_filter

ALLOWED, KILLED = 0x7FFF0000, 0x80000000
EPERM, ENOSYS, EAFNOSUPPORT = (0x00050000 | number for number in (1, 38, 97))
CLONE_NEWUSER, CLONE_VM, SIGCHLD = 0x10000000, 0x100, 17


def verdict(machine: str, number: int, argument: int = 0, *, audit: int | None = None) -> int:
    """What the filter returns for a system call, by the definition of its instructions (linux/filter.h)."""
    program = list(struct.iter_unpack("<HBBI", seccomp_filter(machine)))
    data = {0: number, 4: ARCHITECTURES[machine].audit if audit is None else audit, 16: argument}
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, value = program[at]
        at += 1
        if code == 0x20:
            accumulator = data[value]
        elif code == 0x06:
            return value
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            at += if_true if holds else if_false


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_ordinary_system_calls_are_allowed(machine):
    ordinary = {
        "x86_64": {"read": 0, "write": 1, "mmap": 9, "rt_sigaction": 13, "execve": 59, "openat": 257, "futex": 202,
                   "exit_group": 231, "getrandom": 318, "rseq": 334, "pidfd_open": 434, "close_range": 436},
        "aarch64": {"read": 63, "write": 64, "mmap": 222, "rt_sigaction": 134, "execve": 221, "openat": 56,
                    "futex": 98, "exit_group": 94, "getrandom": 278, "rseq": 293, "pidfd_open": 434,
                    "close_range": 436},
    }[machine]  # fmt: skip
    assert {name for name, number in ordinary.items() if verdict(machine, number) != ALLOWED} == set()


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_dangerous_and_unknown_calls_return_enosys(machine):
    refused = ARCHITECTURES[machine].refused
    assert {name for name, number in refused.items() if verdict(machine, number) != ENOSYS} == set()
    assert {"ptrace", "memfd_create", "io_uring_setup", "mount", "bpf", "clone3", "keyctl"} <= set(refused)
    assert verdict(machine, 463) == verdict(machine, 5000) == ENOSYS
    assert verdict(machine, 462) == ALLOWED


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_some_calls_are_allowed_only_with_harmless_arguments(machine):
    numbers = ARCHITECTURES[machine]
    assert verdict(machine, numbers.clone, CLONE_VM | SIGCHLD) == ALLOWED
    assert verdict(machine, numbers.clone, CLONE_NEWUSER | SIGCHLD) == EPERM
    assert verdict(machine, numbers.socketpair, 1) == ALLOWED
    assert verdict(machine, numbers.socketpair, 2) == EAFNOSUPPORT
    assert all(verdict(machine, numbers.socket, family) == EAFNOSUPPORT for family in (1, 2, 10, 16, 38, 40))
    assert (verdict(machine, numbers.prctl, 4), verdict(machine, numbers.prctl, 15)) == (EPERM, ALLOWED)
    assert (verdict(machine, numbers.prlimit64, 0), verdict(machine, numbers.prlimit64, 1)) == (ALLOWED, EPERM)


def test_calls_of_32_bit_interfaces_are_refused():
    assert verdict("x86_64", 0, audit=0x40000003) == KILLED
    assert verdict("x86_64", 0x40000000 | 319) == ENOSYS


def test_no_call_number_is_listed_twice():
    for architecture in ARCHITECTURES.values():
        numbers = list(architecture.refused.values())
        assert len(set(numbers)) == len(numbers)


def test_an_unknown_processor_is_an_error():
    with pytest.raises(ConfigError, match=r"got the processor 'riscv64'; expected one of x86_64, aarch64"):
        seccomp_filter("riscv64")
