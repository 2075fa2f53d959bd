"""Removes the server machine's paths from error messages to callers, except paths that the caller sent."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from rl_rollout.vllm import wire

_PATH = re.compile(r"(?<![\w.:/~])/[^\s'\"`,;:()\[\]{}<>]*[^\s'\"`,;:()\[\]{}<>.]")
"""Matches an absolute path in a sentence."""
_TAKEN_OUT = "(a path of the server)"


def without_other_paths(text: str, body: bytes) -> str:
    """Returns `text` with absolute paths replaced. Keeps paths that occur as a string in the request `body`, and paths
    below them."""
    try:
        sent = {value.rstrip("/") for value in _strings(wire.decode(body))} - {""}
    except (msgspec.DecodeError, RecursionError):
        sent = set()

    def replacement(match: re.Match[str]) -> str:
        path = match.group()
        is_sent = "/.." not in path and any(path == one or path.startswith(f"{one}/") for one in sent)
        return path if is_sent else _TAKEN_OUT

    return _PATH.sub(replacement, text)


def _strings(value: Any) -> Iterator[str]:
    """Yields all strings in plain data, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _strings(pair)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
