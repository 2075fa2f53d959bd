"""What a forked child prints, in a file."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path


def print_into(path: Path) -> None:
    """Standard error, Python's own and that of what it starts, and log messages from warnings on."""
    os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND), 2)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)  # pytest has put its own in that place
    logging.basicConfig(level=logging.WARNING, force=True)
