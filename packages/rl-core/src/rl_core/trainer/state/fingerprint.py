"""Computes the fingerprint of a run, which records its prompts and settings, and compares it when the run resumes.

The rows, their order, the number of prompts that are short enough, the shuffling and the seed determine to which prompt
a group number refers. If they changed, the group numbers in a checkpoint would refer to other prompts, so a resume
refuses such changes. It warns of changes of all other settings, except those in `_OF_THE_PROCESS`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_core.config import Config
from rl_core.config.resolving import as_mapping, leaves
from rl_core.errors import ConfigError, Mistakes
from rl_core.trainer.groups import DataRow
from rl_core.trainer.state.checkpoint import load_fingerprint

logger = logging.getLogger(__name__)

_NUMBER_GROUPS = ("trainer.seed", "data.shuffle")
"""Keys that, together with the rows, determine to which prompt a group number refers."""
_OF_THE_PROCESS = frozenset(
    {
        "trainer.resume_mode",
        "trainer.resume_path",
        "trainer.run_name",
        "trainer.run_dir",
        "trainer.ckpt_path",
        "trainer.export_path",
        "trainer.project_name",
        "trainer.logger",
        "trainer.tags",
        "trainer.callbacks",
        "data.train_data",
    }
)
"""Keys that a resume may change without a warning: names, output directories, resumption, trackers and callbacks. For
`data.train_data`, the rows are compared instead of the file names."""
_PLAYING = (
    "generator.",
    "environment.",
    "data.",
    "trainer.max_prompt_length",
    "trainer.policy.model.",
    "trainer.algorithm.advantage_estimator",
    "trainer.algorithm.dynamic_sampling.",
)
"""Prefixes of the keys that determine how a group is played, and whether it is kept."""
_REMEDY = "or start a new run with trainer.resume_mode=none, which keeps the files of the earlier run"


def fingerprint(config: Config, rows: Sequence[DataRow], held_out: Sequence[DataRow] | None = None) -> dict[str, Any]:
    """Computes the fingerprint that checkpoints store, without the number of prompts, which `with_prompts` adds.

    Args:
        config: a resolved configuration.
        rows: all rows of `data.train_data`, in order.
        held_out: all rows of `data.val_data`; None or empty: later resumes do not compare them.
    """
    settings = {key: value for key, value in leaves(as_mapping(config)) if key not in _OF_THE_PROCESS}
    data = {"num_rows": len(rows), "sha256": _digest(rows), "num_prompts": None}
    data["held_out_sha256"] = _digest(held_out) if held_out else None
    # A round trip through JSON turns tuples into lists, as in a stored fingerprint, so that the two can be compared.
    return json.loads(json.dumps({"data": data, "settings": settings}, default=str))


def with_prompts(run: Mapping[str, Any], num_prompts: int) -> dict[str, Any]:
    """Adds to a fingerprint the number of rows whose prompts are short enough."""
    return {**run, "data": {**run["data"], "num_prompts": num_prompts}}


def require_same_groups(checkpoint: Path, now: Mapping[str, Any]) -> None:
    """Requires that the group numbers of the checkpoint still refer to the same prompts.

    Raises:
        ConfigError: the rows or a setting changed, and the numbers would refer to other prompts; ConfigErrors: several
            such changes.
        CheckpointError: the checkpoint's fingerprint cannot be read.
    """
    before = load_fingerprint(checkpoint)
    if before is None:
        return
    mistakes = Mistakes()
    mistakes.add(*_other_data(checkpoint, before["data"], now["data"]))
    for key in _NUMBER_GROUPS:
        was, given = before["settings"].get(key), now["settings"].get(key)
        if was != given:
            mistakes.add(
                ConfigError(
                    f"got {_shown(given)}, but {checkpoint} was made with {_shown(was)}: its group numbers would refer "
                    f"to other prompts. Set the key to {_shown(was)}, {_REMEDY}",
                    key=key,
                )
            )
    mistakes.raise_found()


def plays_alike(checkpoint: Path, now: Mapping[str, Any]) -> bool:
    """Whether all settings that determine how a group is played are the same as in the checkpoint, so that the
    checkpoint's stored groups can be used. False if the checkpoint has no fingerprint."""
    before = load_fingerprint(checkpoint)
    if before is None:
        return False
    was, given = before["settings"], now["settings"]
    return all(was.get(key) == given.get(key) for key in {*was, *given} if key.startswith(_PLAYING))


def warn_of_changes(checkpoint: Path, now: Mapping[str, Any]) -> None:
    """Warns about settings and held-out rows that differ from those of the checkpoint."""
    before = load_fingerprint(checkpoint)
    if before is None:
        logger.warning("%s does not record its settings; they are not compared", checkpoint)
        return
    was, given = before["settings"], now["settings"]
    keys = [key for key in dict.fromkeys([*was, *given]) if was.get(key) != given.get(key)]
    if keys:
        changes = "; ".join(f"{key}: {_shown(was.get(key))} → {_shown(given.get(key))}" for key in keys)
        logger.warning("resuming with settings that differ from those of %s: %s", checkpoint.name, changes)
    held_out = before["data"].get("held_out_sha256"), now["data"]["held_out_sha256"]
    if None not in held_out and held_out[0] != held_out[1]:
        logger.warning(
            "data.val_data: the rows differ from those of %s: later evaluations cannot be compared with earlier ones",
            checkpoint.name,
        )


def _other_data(checkpoint: Path, was: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[ConfigError]:
    if was["sha256"] != given["sha256"]:
        other = f"{was['num_rows']} rows" if was["num_rows"] != given["num_rows"] else "the same number of other rows"
        yield ConfigError(
            f"has {given['num_rows']} rows, but {checkpoint} was made with {other}: its group numbers would refer to "
            f"other prompts. Use the same rows in the same order, {_REMEDY}",
            key="data.train_data",
        )
    elif None not in (was["num_prompts"], given["num_prompts"]) and was["num_prompts"] != given["num_prompts"]:
        yield ConfigError(
            f"leaves {given['num_prompts']} prompts, but {checkpoint} was made with {was['num_prompts']}: its group "
            f"numbers would refer to other prompts. Set the same limit (and data.on_long_prompt), {_REMEDY}",
            key="trainer.max_prompt_length",
        )


def _digest(rows: Sequence[DataRow]) -> str:
    """The SHA-256 of the rows' content, in order. The names and formats of the files do not change it."""
    digest, encode = hashlib.sha256(), json.JSONEncoder(sort_keys=True, default=str).encode
    for row in rows:
        digest.update(encode(row.row).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _shown(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else value
