"""Prints multi-turn episodes as readable text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import click

NUM_SHOWN = 3
_WIDTH = 13


def show_episodes(samples: Path) -> None:
    """Prints the first few multi-turn episodes of a file that `rl generate` wrote; nothing if all have one turn."""
    from rl_core.reports.jsonl import read_rows

    for row in islice((row for row in read_rows(samples) if row.get("turns")), NUM_SHOWN):
        for line in _lines(row):
            click.echo(line)
        click.echo()


def _lines(row: Mapping[str, Any]) -> Iterator[str]:
    turns = row["turns"]
    ending = {"done": "", "max_turns": ", ended by generator.max_turns", "context": ", no room for another turn"}
    yield click.style(
        f"prompt {row['group']}, sample {row['sample']}: reward {row['reward']:g}, {len(turns)} turns"
        + ending[row["end"]],
        bold=True,
    )
    yield from _indented("prompt", row["prompt"])
    for turn in turns:
        cut = " (cut)" if turn["stop_reason"] == "length" else ""
        yield from _indented(f"policy{cut}", turn["response"])
        if turn["observation"] is not None:
            yield from _indented("environment", turn["observation"])


def _indented(name: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines() or [""]):
        yield f"  {name if not number else '':{_WIDTH}} {line}".rstrip()
