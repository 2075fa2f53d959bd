"""Formats the numbers of individual ranks, layers or experts as short text."""

from __future__ import annotations

from collections.abc import Iterable


def ranges(numbers: Iterable[int], *, dash: str = "-", separator: str = " ") -> str:
    """Formats ascending numbers, such as `0-3 6 8-11`: consecutive numbers as the first and the last of them, and a
    number without neighbours by itself. Returns `-` if there are no numbers."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return separator.join(f"{part[0]}{dash}{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts) or "-"
