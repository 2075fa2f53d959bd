"""Replaces names in other libraries, and raises if a release no longer has such a name."""

from __future__ import annotations

from typing import Any


def replace(owner: Any, name: str, new: Any) -> Any:
    """Sets `owner.name` and returns the old value. Raises RuntimeError if `owner` has no such name."""
    if not hasattr(owner, name):
        place = getattr(owner, "__name__", repr(owner))
        raise RuntimeError(f"{place} has no {name!r}: install the version of the library that rl-megatron requires")
    old = getattr(owner, name)
    setattr(owner, name, new)
    return old
