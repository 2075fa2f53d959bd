"""If the template keeps earlier turns, merged steps of a search cost about as many tokens as one sequence."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.stepwise_search import CASES, measure, write_corpus


@pytest.mark.parametrize(("says", "template", "observer"), CASES[:3])
def test_merged_steps_cost_at_most_a_tenth_more_than_one_sequence(
    tmp_path: Path, says: str, template: str | None, observer: str
):
    found = measure(template, observer, write_corpus(tmp_path / "documents.jsonl"))
    assert 1.0 <= found["merged"] <= 1.1
    assert found["apart"] > 1.5, "unmerged steps must cost clearly more, or the comparison proves nothing"
