"""Writes the data files of recipes. A file appears only when it is complete, even if the process is killed or another
process writes the same file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_core.stored_files import sync


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes a Parquet file atomically."""
    import pyarrow
    import pyarrow.parquet

    write_whole(path, lambda unfinished: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), unfinished))


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` make a file under another name, which differs between processes, and then moves it to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.writing{os.getpid()}")
    try:
        write(unfinished)
        sync(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
