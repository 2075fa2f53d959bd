"""Streams to which nothing can be written."""

from __future__ import annotations

import os
from typing import TextIO

KINDS = ("full", "no reader")


def unwritable(kind: str) -> TextIO:
    """A stream whose disk is full, or whose reader has ended."""
    if kind == "full":
        return os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")
