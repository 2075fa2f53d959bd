"""Which syncs of a run send what changed, and since when."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from rl_core.interfaces import Manifest


class DeltaSyncs:
    """Says of each sync what its `Rendezvous.delta` is; it is told how the sync ended.

    Whole weights go first, after every sync that failed, where an engine lacks the current version, and when so many
    syncs in a row have sent changes that the interval is full.
    """

    def __init__(self, interval: int) -> None:
        """`interval`: one sync in so many is whole."""
        self._interval = interval
        self._base: str | None = None
        self._num_since_whole = 0

    def next(self, version: int, *, must_be_whole: bool) -> Mapping[str, Any]:
        """Of the sync that begins now. Until it has `succeeded`, the one after it is whole."""
        is_whole = must_be_whole or self._base is None or self._num_since_whole + 1 >= self._interval
        delta = {"id": f"{version} ({uuid.uuid4().hex})", "base": None if is_whole else self._base}
        self._base = None
        return delta

    def succeeded(self, delta: Mapping[str, Any]) -> None:
        """Every engine that serves holds what this sync sent."""
        self._base = delta["id"]
        self._num_since_whole = 0 if delta["base"] is None else self._num_since_whole + 1


def sent_share(sent: Manifest) -> dict[str, float]:
    """`weight_sync/sent_share`: bytes that travelled, over those of the weights; nothing where changes are never
    sent."""
    if sent.num_sent_bytes is None:
        return {}
    num_bytes = sum(prod(t.shape) * getattr(torch, t.dtype).itemsize for t in sent.tensors.values())
    return {"weight_sync/sent_share": sent.num_sent_bytes / max(num_bytes, 1)}
