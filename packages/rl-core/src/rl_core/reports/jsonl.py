"""JSON-lines files whose rows carry a step: written by a run that may be killed at any byte, continued by the next."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_core.errors import DataError


class StepLog:
    """Appends rows to a file; on opening, the rows of steps that will be run again are dropped.

    Killed between two rows, the file is complete; killed within one, its last line is cut off, and the next `StepLog`
    on the file (like `read_rows`) leaves that line out.
    """

    def __init__(self, path: Path, *, first_step: int) -> None:
        """Opens `path`, keeping only its rows with step < `first_step`.

        Raises:
            DataError: a line that is not the last one is no row. The file is left as it is.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _drop_rows_from(path, first_step)
        # A lone surrogate, which no UTF-8 file can hold, becomes its JSON escape.
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n")

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Appends rows, each with its `step`, and flushes. A number that is not finite is written as null."""
        lines = [json.dumps(_finite(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
        self._file.write("".join(lines))
        self._file.flush()

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        self._file.close()


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a step log in order, read lazily; a last line that was cut off is left out.

    Raises:
        DataError: the file does not exist, or a line before the last is no row.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist; a run writes it into its directory")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                row["step"] += 0
            except (ValueError, KeyError, TypeError) as error:
                if not line.endswith(b"\n"):
                    return
                raise DataError(
                    f"{path}, line {number}: not a JSON object with a number 'step': {line[:80]!r}"
                ) from error
            yield row


def _drop_rows_from(path: Path, first_step: int) -> None:
    """Rewrites the file beside itself and swaps it in, so that a kill leaves either the old or the new one."""
    rewritten = path.with_name(path.name + ".rewriting")
    with rewritten.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
        for row in read_rows(path):
            if row["step"] < first_step:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    rewritten.replace(path)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(entry) for name, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, (list, tuple)) else value
