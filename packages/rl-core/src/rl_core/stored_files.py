"""Functions that write files so that they survive a crash, check that files have not changed, and detect a full
disk."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from rl_core.errors import DiskFullError

_CHUNK_BYTES = 16 << 20
_THREADS = 4
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FULL_IN_WORDS = ("No space left on device", "Disk quota exceeded")
_LEAST_FREE_BYTES = 1 << 20
"""If fewer bytes than this are free, the disk counts as full, whatever error a write raised."""


@attrs.frozen
class FileRecord:
    """Size and checksum of a file when it was written."""

    num_bytes: int
    crc32: int | None
    """CRC-32 of the file's bytes, the checksum that weight syncs use too. It detects every change within 32 consecutive
    bits. One core computes it at 2 to 4 GiB/s. None: the list was written by a version that recorded only sizes."""

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """Reads a file once, and returns its record."""
        crc32 = 0
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                crc32 = zlib.crc32(chunk, crc32)
            return cls(file.tell(), crc32)

    @classmethod
    def from_json(cls, entry: Any) -> FileRecord:
        """The record from an entry in a list of files. Raises TypeError, KeyError or ValueError for an invalid
        entry."""
        return cls(entry, None) if isinstance(entry, int) else cls(int(entry["bytes"]), int(entry["crc32"]))

    def as_json(self) -> dict[str, int | None]:
        """The record as an entry in a list of files."""
        return {"bytes": self.num_bytes, "crc32": self.crc32}


def is_found(path: str | Path) -> bool:
    """Whether the path exists. Unlike `Path.exists`, returns False instead of raising if the user lacks a permission or
    the name is too long; `config.file_checks` reports these cases."""
    try:
        return Path(path).exists()
    except OSError:
        return False


def recorded(directory: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Name → record of each file's current content. Reads several files in parallel."""
    wanted = sorted(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(wanted, pool.map(lambda name: FileRecord.of(directory / name), wanted), strict=True))


def missized(directory: Path, files: Mapping[str, FileRecord]) -> str | None:
    """Describes the first file that is missing or whose size has changed; None if there is none."""
    for name, record in files.items():
        path = directory / name
        found = path.stat().st_size if path.is_file() else None
        if found != record.num_bytes:
            has = "is missing" if found is None else f"has {found} bytes"
            return f"{path} {has}; expected {record.num_bytes} bytes"
    return None


def changed(directory: Path, files: Mapping[str, FileRecord]) -> str | None:
    """Describes the first file whose content has changed; None if there is none. Reads all files."""
    listed = {name: record for name, record in files.items() if record.crc32 is not None}
    for name, found in recorded(directory, listed).items():
        if found.crc32 != files[name].crc32:
            return f"{directory / name} is not what was written: its checksum is {found.crc32}, not {files[name].crc32}"
    return None


def write_whole(path: Path, text: str) -> None:
    """Replaces a file's content atomically: after a crash, the file has either the old or the new content. The new
    content is on disk when this returns."""
    unfinished = path.with_name(f"{path.name}.writing")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync(path.parent)


def make_directory(directory: Path) -> None:
    """Creates the directory and its missing parents. Their directory entries are on disk when this returns."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def sync(path: Path) -> None:
    """Flushes a file, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(directory: Path) -> None:
    """Flushes everything below a directory to disk, including directory entries."""
    for path in (*directory.rglob("*"), directory):
        sync(path)


def is_disk_full(error: BaseException, directory: Path | None = None) -> bool:
    """Whether the error, or an error that led to it, reports a full disk or an exceeded quota.

    Args:
        directory: the directory that was written to. If less than 1 MiB is free there, the result is True for any
            error. None: only the errors count.
    """
    if any(isinstance(one, DiskFullError) or _says_full(one) for one in _chain(error)):
        return True
    if directory is None:
        return False
    existing = next((path for path in (directory, *directory.parents) if path.exists()), None)
    return existing is not None and shutil.disk_usage(existing).free < _LEAST_FREE_BYTES


def _says_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return any(words in str(error) for words in _FULL_IN_WORDS)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # an error can be the cause of its own cause
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
