"""Numbers of ranks, layers and experts, as people read them."""

from __future__ import annotations

from collections.abc import Iterable


def ranges(numbers: Iterable[int], *, dash: str = "-", separator: str = " ") -> str:
    """`0-3 8-11`: of consecutive numbers the first and the last; `-` where there are none."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return separator.join(f"{part[0]}{dash}{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts) or "-"
