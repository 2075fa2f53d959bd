"""Exchanges messages with a process; each message is four bytes of length, then JSON. The sandbox's supervisor and the
processes that compare answers (`judge_pool`) use these messages."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

LENGTH = struct.Struct("!I")


def packed(message: dict[str, Any]) -> bytes:
    """Encodes one message for sending."""
    data = json.dumps(message).encode()
    return LENGTH.pack(len(data)) + data


def send(fd: int, message: dict[str, Any]) -> None:
    """Writes the whole message. Raises BrokenPipeError if nobody reads."""
    left = memoryview(packed(message))
    while left:
        left = left[os.write(fd, left) :]


def receive(fd: int) -> dict[str, Any] | None:
    """Reads the next message; returns None at the end of the stream."""
    head = _exactly(fd, LENGTH.size)
    body = _exactly(fd, LENGTH.unpack(head)[0]) if head is not None else None
    return None if body is None else json.loads(body)


def _exactly(fd: int, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = os.read(fd, min(count - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)
