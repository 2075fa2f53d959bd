"""Parses docs/first_gpu_run.md: the commands of each step, the files to send back, and the rows of published times.

Only the page lists them. Tests on a GPU run its commands; tests on a CPU check that the commands exist.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/first_gpu_run.md").read_text()


def steps(page: str = PAGE) -> dict[int, list[str]]:
    """Number of a step → its command lines in the page's shell blocks. A line without a number belongs to the step of
    the line before."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL)).replace("\\\n", " ")
    found: dict[int, list[str]] = {}
    number = 0
    for line in filter(None, blocks.splitlines()):
        command, _, named = line.partition("  #")
        number = int(named) if named else number
        found.setdefault(number, []).append(command.strip())
    return found


def sent_back(number: int, page: str = PAGE) -> list[Path]:
    """The files that a step writes and that a report includes."""
    (row,) = re.findall(rf"^\| {number} \| .*$", page, flags=re.MULTILINE)
    return [ROOT / path for path in re.findall(r"`(runs/\S+)`", row)]


def published_rows(page: str = PAGE) -> list[str]:
    """The rows of benchmarks/gpu_published_times.py that the page lists."""
    return re.findall(r"^\| `(\w+:\w+)` \|", page, flags=re.MULTILINE)
