"""Number ranges formatted as text."""

from __future__ import annotations

from rl_core.layout.ranges import ranges


def test_consecutive_numbers_are_written_as_ranges():
    assert ranges((0, 1, 2, 5, 8, 9)) == "0-2 5 8-9"
    assert ranges(()) == "-"


def test_dash_and_separator_of_ranges_can_be_chosen():
    assert ranges([3, 4, 7], dash="–", separator=", ") == "3–4, 7"
