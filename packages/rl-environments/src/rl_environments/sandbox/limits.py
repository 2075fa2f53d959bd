"""Defines a program's resource limits, its tests, and their outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import attrs

from rl_core.errors import RLError
from rl_core.interfaces import above, at_least, between

MEBIBYTE = 1 << 20
_MOST = 1 << 50
"""The kernel refuses or truncates limits that are much higher."""
End = Literal[
    "exited", "signalled", "syntax_error", "cpu_limit", "wall_limit", "memory_limit", "output_limit", "disk_limit"
]
"""How a test ended. `exited`: the program ended by itself, with any exit code. `signalled`: a signal ended the program,
but not because of a limit."""


class SandboxError(RLError, RuntimeError):
    """The sandbox itself failed, for a reason unrelated to the program in it."""


@attrs.frozen(kw_only=True)
class ProgramLimits:
    """Limits of one test. The files and processes of a test are removed before the next test begins. `processes`,
    `disk_bytes` and `files` have no effect with the mechanism `none`."""

    cpu_s: int = attrs.field(default=5, validator=between(1, 10**9))
    """CPU time of each process in seconds."""
    wall_s: float = attrs.field(default=20.0, validator=above(0))
    """Wall-clock time of the test in seconds. Keep it well above `cpu_s`, so that a test that only computes does not
    fail on a busy machine."""
    address_space_bytes: int = attrs.field(default=512 * MEBIBYTE, validator=between(64 * MEBIBYTE, _MOST))
    """Address space of each process; exceeding it raises a MemoryError."""
    memory_bytes: int = attrs.field(default=768 * MEBIBYTE, validator=at_least(32 * MEBIBYTE))
    """Memory of all processes together, shared pages counted once; exceeding it ends the test. Checked every 20 ms or
    less often, so a fast allocation may exceed it for a moment."""
    processes: int = attrs.field(default=16, validator=between(1, _MOST))
    """Maximum number of processes and threads at a time."""
    file_bytes: int = attrs.field(default=16 * MEBIBYTE, validator=between(0, _MOST))
    """Maximum size of one file; exceeding it raises an OSError (EFBIG)."""
    disk_bytes: int = attrs.field(default=64 * MEBIBYTE, validator=between(4096, _MOST))
    """Maximum total size of the files, which are kept in memory; exceeding it raises an OSError (ENOSPC)."""
    files: int = attrs.field(default=1000, validator=between(1, _MOST))
    """Maximum number of files and directories; exceeding it ends the test or raises an OSError (ENOSPC)."""
    open_files: int = attrs.field(default=64, validator=between(16, _MOST))
    """Maximum number of open files of each process."""
    output_bytes: int = attrs.field(default=256 * 1024, validator=at_least(0))
    """Maximum size of each of three outputs: stdout, stderr, and a function's result as JSON; exceeding it ends the
    test, and the output so far is kept."""


@attrs.frozen(kw_only=True)
class Test:
    """One run of a program: as a script, by calling its function, or followed by code that checks it."""

    __test__ = False  # pytest would collect a class of this name

    stdin: str = ""
    function: str | None = None
    """Name of a function of the program, or of a method of its class `Solution`; called with `arguments` after the
    program has run as a module (its `__name__` is `solution`)."""
    arguments: Sequence[Any] = ()
    """Plain JSON data."""
    check: str | None = None
    """Code that runs after the program, in its namespace, and raises if the program is wrong."""
    has_imports: bool = False
    """Whether the program finds names of the standard library (`List`, `deque`, `sqrt`, …) without importing them, and
    may recurse 50,000 calls deep, as in LiveCodeBench's grader: data sets give code such as `def f(self, a: List[int])`
    to start from."""


@attrs.frozen(kw_only=True)
class ProgramOutcome:
    """The outcome of one test of a program."""

    end: End
    exit_code: int | None
    """None if a signal or a limit ended the program."""
    signal: int | None
    """The signal that ended the program if `end` is `signalled` or `cpu_limit`; else None."""
    stdout: str
    stderr: str
    """stdout and stderr are each cut at `ProgramLimits.output_bytes`; bytes that are not UTF-8 are replaced."""
    is_complete: bool
    """Whether the function returned JSON data, or the check passed. Always False for a script."""
    value: Any = None
    """The function's return value after conversion to JSON: a tuple becomes a list."""
    cpu_s: float
    """CPU time of the first process and of the processes that it waited for."""
    wall_s: float

    @property
    def is_clean(self) -> bool:
        """Whether the program ended by itself with exit code 0."""
        return self.end == "exited" and self.exit_code == 0
