"""Rows of Hugging Face data sets, by directory or by name. The library `datasets` is the extra of that name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl_core import hub
from rl_core.errors import ConfigError, DataError, install
from rl_core.stored_files import is_found

_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?P<configuration>:[\w.-]+)?")
_FILES = (".parquet", ".jsonl", ".json", ".csv", ".txt", ".arrow", ".gz")
_SAVED = ("dataset_info.json", "dataset_dict.json")


def is_data_set(path: str) -> bool:
    """Whether the path is a data set: a directory, or a name that is not a file's (`org/name`,
    `org/name:configuration`), either optionally followed by `@split`."""
    place = _without_split(path)
    if is_found(path) or is_found(place):
        return is_found(place) and Path(place).is_dir()
    found = _NAME.fullmatch(place)
    return found is not None and not found["name"].endswith(_FILES) and not place.startswith((".", "~"))


def require_data_sets(path: str, *, key: str) -> None:
    """Raises ConfigError if the library is not installed."""
    if find_spec("datasets") is None:
        raise ConfigError(
            f"{key}: {path} is not a file here (seen from {Path.cwd()}); as a Hugging Face data set it needs the "
            f"library datasets: {install('rl-core[datasets]')}"
        )


def read_data_set(path: str, *, key: str) -> Iterator[dict[str, Any]]:
    """The rows of one split of a data set.

    Raises:
        ConfigError: the library is missing, the data set does not exist or cannot be loaded, or it is not in the cache
            and the hub cannot be reached.
        DataError: the data set has several splits and none is named, or it does not have the named one.
    """
    require_data_sets(path, key=key)
    import datasets

    place, split = _without_split(path), path[len(_without_split(path)) + 1 :]
    try:
        if not Path(place).is_dir():
            found = _of_the_hub(place, path, key)
        elif any((Path(place) / name).is_file() for name in _SAVED):
            found = datasets.load_from_disk(place)
        else:
            found = datasets.load_dataset(place)
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # broken files and unknown names may raise anything
        raise ConfigError(f"{key}: {path} cannot be loaded: {type(error).__name__}: {error}") from error
    yield from _split_of(found, split, path, key)


def _of_the_hub(place: str, path: str, key: str) -> Any:
    import datasets
    from datasets import config as settings

    name, _, configuration = place.partition(":")
    reason = hub.obstacle("datasets", name)
    if reason is None:
        return datasets.load_dataset(name, configuration or None)
    before = settings.HF_HUB_OFFLINE
    settings.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(name, configuration or None)  # from the cache, if an earlier run downloaded it
    except Exception as error:
        raise ConfigError(
            f"{key}: {path}: there is no such file or directory (seen from {Path.cwd()}), no data set of that name in "
            f"the cache, and {reason}"
        ) from error
    finally:
        settings.HF_HUB_OFFLINE = before


def _split_of(found: Any, split: str, path: str, key: str) -> Any:
    splits = found if isinstance(found, dict) else {}
    if not splits:
        if split:
            raise DataError(f"{key}: {path}: this data set has no splits; leave out @{split}")
        return found
    if split in splits:
        return splits[split]
    if not split and len(splits) == 1:
        return next(iter(splits.values()))
    place, names = _without_split(path), ", ".join(splits)
    raise DataError(f"{key}: {path}: say which split, {names}, e.g. {place}@{next(iter(splits))}")


def _without_split(path: str) -> str:
    head, at, split = path.rpartition("@")
    return head if at and re.fullmatch(r"[\w.-]+", split) else path
