"""Messages of a command to its user, besides the result. A message that cannot be written must not end hours of work:
Ctrl-C may also have ended a `tee` that reads the output, the terminal may be closed, or the log's disk may be full.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

import click


def say(message: object, *, err: bool = True, **style: Any) -> None:
    """Writes a message, in click's `style`, to the current `sys.stderr` (`err`) or `sys.stdout`. A message that cannot
    be written is lost, and the command continues."""
    with suppress(OSError):
        click.secho(message, err=err, **style)


def discard_unwritten() -> None:
    """Discards what a standard stream could not write. Otherwise, the interpreter would try to write it again at the
    end, fail, and exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # closed before the command began
            continue
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
