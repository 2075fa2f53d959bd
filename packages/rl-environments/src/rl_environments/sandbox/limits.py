"""What a program may use up, what it is tested with, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import attrs

from rl_core.errors import RLError
from rl_core.interfaces import above, at_least

MEBIBYTE = 1 << 20
End = Literal[
    "exited", "signalled", "syntax_error", "cpu_limit", "wall_limit", "memory_limit", "output_limit", "disk_limit"
]
"""`exited`: by itself, whatever its exit code; `signalled`: ended by a signal that no limit sent."""


class SandboxError(RLError, RuntimeError):
    """The sandbox itself failed, which says nothing about the program in it."""


@attrs.frozen(kw_only=True)
class Limits:
    """Of one test; each has its own files and processes, and nothing of it is left when the next one begins."""

    cpu_s: int = attrs.field(default=5, validator=at_least(1))
    """CPU time of each process."""
    wall_s: float = attrs.field(default=20.0, validator=above(0))
    """Time on the clock. Well above `cpu_s`, so that a busy machine fails no test of a program that computes."""
    address_space_bytes: int = attrs.field(default=512 * MEBIBYTE, validator=at_least(64 * MEBIBYTE))
    """Limit per process; exceeding it raises a MemoryError."""
    memory_bytes: int = attrs.field(default=768 * MEBIBYTE, validator=at_least(32 * MEBIBYTE))
    """Of all processes together, shared pages counted once. Looked at every 20 ms, so a fast allocation gets above it
    for a moment; more ends the test."""
    processes: int = attrs.field(default=16, validator=at_least(1))
    """Maximum number at a time, including threads."""
    file_bytes: int = attrs.field(default=16 * MEBIBYTE, validator=at_least(0))
    """Maximum size of one file; exceeding it raises an OSError (EFBIG)."""
    disk_bytes: int = attrs.field(default=64 * MEBIBYTE, validator=at_least(4096))
    """Of all files together; they lie in memory, and more is an OSError (ENOSPC)."""
    files: int = attrs.field(default=1000, validator=at_least(1))
    """Files and directories that a test may make; more ends it, or is an OSError (ENOSPC)."""
    open_files: int = attrs.field(default=64, validator=at_least(16))
    """Limit per process."""
    output_bytes: int = attrs.field(default=256 * 1024, validator=at_least(0))
    """Of stdout, and of stderr; more ends the test, and what came before is kept."""


@attrs.frozen(kw_only=True)
class Test:
    """How a program is run once: as a script, by calling its function, or followed by code that checks it."""

    __test__ = False  # pytest takes a class of this name for tests

    stdin: str = ""
    function: str | None = None
    """Of the program, or a method of its class `Solution`: called with `arguments`, after the program has run as a
    module (its `__name__` is `solution`)."""
    arguments: Sequence[Any] = ()
    """Plain JSON data."""
    check: str | None = None
    """Code that runs behind the program, in its namespace, and raises where the program is wrong."""


@attrs.frozen(kw_only=True)
class Outcome:
    """What one test of a program came to."""

    end: End
    exit_code: int | None
    """None where a signal or a limit ended it."""
    signal: int | None
    """The signal that ended it; None where none did."""
    stdout: str
    stderr: str
    """Both up to `Limits.output_bytes`; bytes that are no UTF-8 are replaced."""
    is_complete: bool
    """The function returned JSON data, or the check passed. Always false of a script."""
    value: Any = None
    """What the function returned, as JSON has it: a tuple is a list."""
    cpu_s: float
    """CPU time of the first process and of the processes that it waited for."""
    wall_s: float

    @property
    def is_clean(self) -> bool:
        """It ended by itself, with exit code 0."""
        return self.end == "exited" and self.exit_code == 0
