"""Reads and writes JSON-lines files whose rows have a step. A run may be killed while it writes a row; a resumed run
continues the file."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_core.errors import DataError, StorageError
from rl_core.stored_files import is_disk_full, sync

logger = logging.getLogger(__name__)


class StepLog:
    """Appends rows to a file. Opening the file drops the rows of steps that will be run again.

    If the process is killed while it writes a row, the last line is truncated; `read_rows` and the next `StepLog` on
    the file skip this line. Written rows are flushed to disk, so a crash of the machine loses none. If the disk is
    full, rows are kept in memory and written with later rows when there is space.
    """

    def __init__(
        self, path: Path, *, first_step: int, is_written_again: Callable[[Mapping[str, Any]], bool] | None = None
    ) -> None:
        """Opens `path`, and keeps only the rows with step < `first_step`.

        Args:
            is_written_again: returns whether to drop a row even though its step is below `first_step`; None: no such
                row is dropped.

        Raises:
            DataError: a line is neither a row nor a truncated last line. The file is not changed.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _keep_rows(path, lambda row: row["step"] < first_step and not (is_written_again and is_written_again(row)))
        self._path, self._waiting = path, b""
        self._file = path.open("a", encoding="utf-8", newline="\n")
        sync(path.parent)

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Appends rows, each with a `step`. The rows are on disk when this returns, unless the disk is full. Numbers
        that are not finite are written as null.

        Raises:
            StorageError: the file cannot be written, or is no longer at its path. The rows are lost.
        """
        lines = [json.dumps(_finite(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
        was_waiting = bool(self._waiting)
        # UTF-8 cannot encode lone surrogates, so they are written as JSON escapes.
        self._waiting += "".join(lines).encode("utf-8", errors="backslashreplace")
        self._write_waiting()
        if self._waiting and not was_waiting:
            logger.warning("disk full: rows of %s are kept in memory until there is room for them", self._path)

    def close(self) -> None:
        """Closes the file; a second call does nothing. Raises StorageError like `write`."""
        if self._file.closed:
            return
        try:
            self._write_waiting()
        finally:
            self._file.close()
        if self._waiting:
            logger.error("disk full: the last %d rows of %s are lost", self._waiting.count(b"\n"), self._path)

    def _write_waiting(self) -> None:
        """Writes all waiting rows or, if the disk is full, none of them. A StorageError discards the waiting rows."""
        if not self._waiting:
            return
        descriptor, waiting, self._waiting = self._file.fileno(), self._waiting, b""
        if not _is_at(self._path, descriptor):
            raise StorageError(
                f"{self._path} was removed, moved or replaced while a run was writing it. Put it back if you moved it, "
                "and start the run again; with trainer.resume_mode=latest it continues from the newest remaining "
                "checkpoint"
            )
        num_bytes = os.fstat(descriptor).st_size
        try:
            rest = memoryview(waiting)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):  # storage that failed may fail again
                os.ftruncate(descriptor, num_bytes)
            if not is_disk_full(error):
                raise StorageError(f"{self._path} could not be written ({error}); repair the storage") from error
            self._waiting = waiting


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a step log in order. A truncated last line is skipped.

    Raises:
        DataError: the file does not exist, or a line is neither a row nor a truncated last line.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist; a run writes this file to its directory")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                row["step"] += 0  # fails unless the step is a number
            except (ValueError, KeyError, TypeError) as error:
                if not line.endswith(b"\n"):
                    return
                raise DataError(
                    f"{path}, line {number}: not a JSON object with a number 'step': {line[:80]!r}"
                ) from error
            yield row


def _keep_rows(path: Path, is_kept: Callable[[Mapping[str, Any]], bool]) -> None:
    """Rewrites the file with only the rows for which `is_kept` is true. The new file is written next to the old file
    and then renamed, so that a kill leaves the complete old file or the complete new file."""
    rewritten = path.with_name(path.name + ".rewriting")
    with rewritten.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
        for row in read_rows(path):
            if is_kept(row):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    rewritten.replace(path)
    sync(path.parent)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(entry) for name, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, (list, tuple)) else value
