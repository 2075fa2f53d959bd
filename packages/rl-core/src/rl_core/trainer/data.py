"""Rows of data files, and the order in which a run goes through them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rl_core.errors import DataError
from rl_core.interfaces import Row
from rl_core.seeds import generator_of


@attrs.frozen(eq=False)
class DataRow:
    """A row and where it stands."""

    row: Row
    place: str
    """`file:row`, rows (of JSON lines: lines) counted from 1."""


def read_rows(paths: Sequence[str | Path], *, key: str) -> list[DataRow]:
    """All rows of parquet, JSON-lines or JSON files, in order.

    Args:
        key: the configuration key that names the files, for messages.

    Raises:
        DataError: a file is missing, unreadable or empty, or a row has no usable `prompt`; file and row are named.
    """
    rows: list[DataRow] = []
    for path in map(Path, paths):
        if not path.is_file():
            raise DataError(f"{key}: {path} does not exist. Give the path of a .parquet, .jsonl or .json file")
        count = len(rows)
        try:
            rows += [_checked(row, f"{path}:{number}") for number, row in _read(path)]
        except OSError as error:
            raise DataError(f"{key}: {path} cannot be read: {error.strerror or error}") from error
        if len(rows) == count:
            raise DataError(f"{key}: {path} has no rows")
    if not rows:
        raise DataError(f"{key}: no file is given")
    return rows


def _read(path: Path) -> Iterator[tuple[int, Any]]:
    """Rows with their numbers from 1; of JSON lines those of their lines, of which blank ones are skipped."""
    if path.suffix == ".parquet":
        yield from enumerate(_read_parquet(path), start=1)
    elif path.suffix == ".jsonl":
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                text = _decoded(line, f"{path}:{number}").strip()
                if text:
                    yield number, _parse_json(text, f"{path}:{number}")
    elif path.suffix == ".json":
        parsed = _parse_json(_decoded(path.read_bytes(), str(path)), str(path))
        if not isinstance(parsed, list):
            raise DataError(f"{path}: expected a list of rows, got {type(parsed).__name__}")
        yield from enumerate(parsed, start=1)
    else:
        raise DataError(f"{path}: {path.suffix or 'no suffix'} is not a known format; use .parquet, .jsonl or .json")


def _read_parquet(path: Path) -> list[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file: {error}") from error


def _decoded(data: bytes, place: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: not UTF-8 text (byte {error.start + 1} is {data[error.start]:#04x}); save the file as UTF-8"
        ) from error


def _parse_json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"column {error.colno}" if "\n" not in text else f"line {error.lineno}, column {error.colno}"
        raise DataError(f"{place}: not valid JSON: {error.msg} ({where})") from error


def _checked(row: Any, place: str) -> DataRow:
    if not isinstance(row, dict) or "prompt" not in row:
        columns = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise DataError(f"{place}: expected a row with the column 'prompt', got {columns or 'an empty row'}")
    prompt = row["prompt"]
    is_text = isinstance(prompt, str) and prompt != ""
    is_chat = (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)
    )
    if not (is_text or is_chat):
        shown = repr(prompt)[:80]
        raise DataError(f"{place}: 'prompt' must be text or a list of messages with 'role' and 'content', got {shown}")
    return DataRow(row, place)


class PromptSource:
    """Group number → row: epoch after epoch, each in an order of its own that depends on the seed alone."""

    def __init__(self, rows: Sequence[DataRow], *, seed: int, shuffle: bool):
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order = np.arange(len(rows))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, group_id: int) -> DataRow:
        """The row that group `group_id` plays, counted over all epochs."""
        epoch, position = divmod(group_id, len(self._rows))
        if self._shuffle and epoch != self._epoch:
            self._order = generator_of(self._seed, epoch).permutation(len(self._rows))
            self._epoch = epoch
        return self._rows[self._order[position]]
