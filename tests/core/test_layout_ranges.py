"""Number ranges formatted as text."""

from __future__ import annotations

from rl_core.layout.ranges import ranges


def test_ranges_are_short():
    assert ranges((0, 1, 2, 5, 8, 9)) == "0-2 5 8-9"
    assert ranges(()) == "-"


def test_ranges_in_the_notation_of_the_docs():
    assert ranges([3, 4, 7], dash="–", separator=", ") == "3–4, 7"
