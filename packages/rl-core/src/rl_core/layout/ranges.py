"""Formats numbers of ranks, layers and experts as short text."""

from __future__ import annotations

from collections.abc import Iterable


def ranges(numbers: Iterable[int], *, dash: str = "-", separator: str = " ") -> str:
    """Formats ascending numbers as ranges, such as `0-3 8-11`: the first and last number of each run of consecutive
    numbers. Returns `-` if there are no numbers."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return separator.join(f"{part[0]}{dash}{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts) or "-"
