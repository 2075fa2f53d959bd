"""Requests for single samples."""

from __future__ import annotations

from typing import Any

from rl_core.interfaces import GroupRequest, SamplingParams


def one_sample_of(row: dict[str, Any], **params: Any) -> GroupRequest:
    """Asks for one sample of at most eight tokens per turn, unless `params` say otherwise."""
    return GroupRequest(
        row=row,
        row_place="rows:1",
        group_id=0,
        num_samples=1,
        seed=0,
        start_version=0,
        params=SamplingParams(**{"max_tokens": 8, **params}),
    )
