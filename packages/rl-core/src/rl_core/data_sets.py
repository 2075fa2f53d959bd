"""Reads rows of Hugging Face data sets from a local directory or, by name, from the hub. This needs the extra
`datasets`."""

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
    """Whether the path names a data set: a directory, or a name on the hub (`org/name`, `org/name:configuration`) that
    does not end with the suffix of a data file. The path may end with `@split`."""
    place = _without_split(path)
    if is_found(path) or is_found(place):
        return is_found(place) and Path(place).is_dir()
    found = _NAME.fullmatch(place)
    return found is not None and not found["name"].endswith(_FILES) and not place.startswith((".", "~"))


def require_data_sets(path: str, *, key: str) -> None:
    """Raises ConfigError if the library `datasets` is not installed."""
    if find_spec("datasets") is None:
        raise ConfigError(
            f"{path} is not a file (current directory: {Path.cwd()}). To read it as a Hugging Face data set, install "
            f"the library datasets: {install('rl-core[datasets]')}",
            key=key,
        )


def read_data_set(path: str, *, key: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of one split of a data set.

    Raises:
        ConfigError: the library is missing, the data set does not exist or cannot be loaded, or it is not in the cache
            and the hub cannot be reached.
        DataError: the data set has several splits, but the path names none; or the path names a split that the data set
            does not have.
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
        # The library wraps the reason in an error that only says that there was one.
        reason = error.__cause__ or error
        said = " ".join(str(reason).split())
        raise ConfigError(f"{path} cannot be loaded: {type(reason).__name__}: {said:.400}", key=key) from error
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
            f"{path}: there is no such file or directory (current directory: {Path.cwd()}), the data set is not in the "
            f"local cache, and {reason}",
            key=key,
        ) from error
    finally:
        settings.HF_HUB_OFFLINE = before


def _split_of(found: Any, split: str, path: str, key: str) -> Any:
    splits = found if isinstance(found, dict) else {}
    if not splits:
        if split:
            raise DataError(f"{path}: this data set has no splits; remove @{split}", key=key)
        return found
    if split in splits:
        return splits[split]
    if not split and len(splits) == 1:
        return next(iter(splits.values()))
    place, names = _without_split(path), ", ".join(splits)
    raise DataError(f"{path}: choose one of the splits {names}, e.g. {place}@{next(iter(splits))}", key=key)


def _without_split(path: str) -> str:
    head, at, split = path.rpartition("@")
    return head if at and re.fullmatch(r"[\w.-]+", split) else path
