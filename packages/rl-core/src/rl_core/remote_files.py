"""Reads, copies and removes remote files at addresses that fsspec supports, such as `s3://bucket/train.parquet`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from rl_core.errors import ConfigError, DataError, install


def is_remote(path: str | Path) -> bool:
    """Whether the path is an address with a protocol (`s3://…`), not a local path."""
    return "://" in str(path)


@contextmanager
def opened(path: str | Path) -> Iterator[BinaryIO]:
    """Opens a local or remote file for reading. Raises OSError, or ConfigError if the store cannot be accessed."""
    if not is_remote(path):
        with Path(path).open("rb") as file:
            yield file
        return
    system, place = _found(str(path))
    with _asked(str(path)), system.open(place, "rb") as file:
        yield cast("BinaryIO", file)


def exists(path: str) -> bool:
    """Whether a file or directory exists at an address. Raises OSError, or ConfigError if the store cannot be
    accessed."""
    system, place = _found(path)
    with _asked(path):
        return bool(system.exists(place))


def names_in(directory: str) -> list[str]:
    """Names of the entries of a remote directory; empty if it does not exist. Raises OSError, or ConfigError if the
    store cannot be accessed."""
    system, place = _found(directory)
    with _asked(directory):
        # A store may cache earlier listings.
        system.invalidate_cache()
        if not system.exists(place):
            return []
        return sorted({entry.rstrip("/").rpartition("/")[2] for entry in system.ls(place, detail=False)})


def upload(directory: Path, target: str, *, last: str | None = None) -> None:
    """Copies a directory's files to a remote directory. The file `last`, if given, is copied after all others.

    Raises OSError, or ConfigError if the store cannot be accessed.
    """
    system, place = _found(target)
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    with _asked(target):
        for path in sorted(files, key=lambda file: file.name == last and file.parent == directory):
            there = f"{place.rstrip('/')}/{path.relative_to(directory).as_posix()}"
            system.makedirs(there.rpartition("/")[0], exist_ok=True)
            with path.open("rb") as source, system.open(there, "wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 24)


def download(source: str, directory: Path) -> None:
    """Copies a remote directory's files into a local directory. Raises OSError, or ConfigError if the store cannot be
    accessed."""
    system, place = _found(source)
    with _asked(source):
        for there in system.find(place):
            path = directory / there[len(place.rstrip("/")) + 1 :]
            path.parent.mkdir(parents=True, exist_ok=True)
            with system.open(there, "rb") as file, path.open("wb") as copy:
                shutil.copyfileobj(file, copy, 1 << 24)


def remove(directory: str) -> None:
    """Removes a remote directory and its contents. Raises OSError, or ConfigError if the store cannot be accessed."""
    system, place = _found(directory)
    with _asked(directory):
        system.rm(place, recursive=True)


def _found(path: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it. Some stores connect when their file system is created, so this
    function raises the same errors as later requests to the store."""
    try:
        import fsspec
    except ImportError as error:
        raise ConfigError(f"{path}: remote files need fsspec: {install('rl-core[remote]')}") from error
    with _asked(path):
        try:
            return fsspec.core.url_to_fs(path)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{path}: fsspec cannot open this address: {error}") from error


@contextmanager
def _asked(path: str) -> Iterator[None]:
    """Converts a store's errors, except OSError, into ConfigError. A store's library may raise any exception if the
    network fails, a permission is missing or the bucket does not exist."""
    try:
        yield
    except (OSError, ConfigError, DataError):
        raise
    except Exception as error:
        raise ConfigError(f"{path}: the store failed: {type(error).__name__}: {error}") from error
