"""Redirects the standard error and the log messages of a forked child to a file, and waits for a child's end."""

from __future__ import annotations

import logging
import os
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path


def print_into(path: Path) -> None:
    """Redirects the standard error of this process and its children to a file, with log messages of level WARNING and
    above.
    """
    os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND), 2)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)  # pytest has replaced sys.stderr
    logging.basicConfig(level=logging.WARNING, force=True)


def exit_code_of(process: BaseProcess, *, within_s: float) -> int:
    """Waits for the process and returns its exit code. If it takes too long, kills it and fails."""
    process.join(within_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"the process did not end within {within_s:g} s")
    return process.exitcode
