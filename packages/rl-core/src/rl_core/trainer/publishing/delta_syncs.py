"""Decides which weight syncs of a run send only changes, and to which earlier sync the changes refer."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from rl_core.interfaces import Manifest


class DeltaSyncs:
    """Provides the `Rendezvous.delta` of each sync. The caller reports each successful sync with `succeeded`.

    A sync sends whole weights if it is the first, if the previous one failed, if an engine lacks the current version,
    or if the previous `interval` − 1 syncs sent only changes.
    """

    def __init__(self, interval: int | None, *, only_trained: bool = False) -> None:
        """
        Args:
            interval: every `interval`-th sync sends whole weights; 1: every sync; None: no sync for this reason.
            only_trained: see `Rendezvous.delta`.
        """
        self._interval = math.inf if interval is None else interval
        self.only_trained = only_trained
        self._base: str | None = None
        self._num_since_whole = 0

    def next(self, version: int, *, must_be_whole: bool) -> Mapping[str, Any]:
        """The delta of the sync that begins now. If `succeeded` is not called for this delta, the next sync sends whole
        weights."""
        is_whole = must_be_whole or self._base is None or self._num_since_whole + 1 >= self._interval
        delta = {
            "id": f"{version} ({uuid.uuid4().hex})",
            "base": None if is_whole else self._base,
            "only_trained": self.only_trained,
        }
        self._base = None
        return delta

    def succeeded(self, delta: Mapping[str, Any]) -> None:
        """Called when every engine in service holds the weights of this sync."""
        self._base = delta["id"]
        self._num_since_whole = 0 if delta["base"] is None else self._num_since_whole + 1


def sent_share(sent: Manifest) -> dict[str, float]:
    """Computes the metric `weight_sync/sent_share`: bytes sent / bytes of the weights. Empty without delta syncs."""
    if sent.num_sent_bytes is None:
        return {}
    num_bytes = sum(prod(t.shape) * getattr(torch, t.dtype).itemsize for t in sent.tensors.values())
    return {"weight_sync/sent_share": sent.num_sent_bytes / max(num_bytes, 1)}
