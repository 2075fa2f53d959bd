"""Replacing a name of another library, so that a release without that name is noticed."""

from __future__ import annotations

from typing import Any


def replace(owner: Any, name: str, new: Any) -> Any:
    """Sets `owner.name` and returns the old value. Raises RuntimeError if there was none."""
    if not hasattr(owner, name):
        place = getattr(owner, "__name__", repr(owner))
        raise RuntimeError(f"{place} has no {name!r}: this version of the library is not the one that is patched here")
    old = getattr(owner, name)
    setattr(owner, name, new)
    return old
