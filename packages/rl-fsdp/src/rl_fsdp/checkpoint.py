"""State of a worker on disk: named tensors in torch's distributed format, which any number of ranks reads.

Every rank writes its shards to a file of its own; `state.json`, written last, lists the files and their sizes. Reading
checks all that before it changes anything.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rl_core.errors import CheckpointError
from rl_fsdp.ranks import Ranks

_LIST = "state.json"
_INDEX = ".metadata"


def write_state(directory: Path, tensors: Mapping[str, Tensor], *, steps_done: int, ranks: Ranks | None) -> None:
    """Writes tensors, sharded or whole, and the number of optimizer steps behind them. Complete on return."""
    directory.mkdir(parents=True, exist_ok=True)
    with _one_rank_is_meant():
        metadata = save(dict(tensors), storage_writer=FileSystemWriter(directory), no_dist=ranks is None)
    if ranks is None or ranks.is_first:
        names = sorted({_INDEX, *(info.relative_path for info in (metadata.storage_data or {}).values())})
        files = {name: (directory / name).stat().st_size for name in names}
        (directory / _LIST).write_text(json.dumps({"steps_done": steps_done, "files": files}, indent=2) + "\n")
    if ranks is not None:
        ranks.from_first(lambda: None)


def read_state(directory: Path, tensors: Mapping[str, Tensor], *, ranks: Ranks | None) -> int:
    """Fills `tensors` in place with what was saved under their names; returns the optimizer steps behind them.

    Args:
        directory: as given to `write_state`, by any number of ranks.
        tensors: sharded in any way, or whole. The state may hold more: an optimizer that is not wanted here.
        ranks: all read together; None for one rank alone.

    Raises:
        CheckpointError: a file is missing or cut off, or the tensors are not those of this model. Nothing has changed.
    """

    def check() -> int:
        steps_done = _require_complete(directory)
        _require_same_tensors(directory, tensors)
        return steps_done

    steps_done = check() if ranks is None else ranks.agree(check)
    try:
        with _one_rank_is_meant():
            load(dict(tensors), storage_reader=FileSystemReader(directory), no_dist=ranks is None)
    except (OSError, RuntimeError, CheckpointException) as error:
        raise CheckpointError(f"{directory}: cannot be read ({error}); resume from an earlier checkpoint") from error
    return steps_done


@contextmanager
def _one_rank_is_meant() -> Iterator[None]:
    """torch warns of it even where it is asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
        yield


def _require_complete(directory: Path) -> int:
    path = directory / _LIST
    try:
        listed = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: missing or incomplete ({error}); resume from an earlier checkpoint") from error
    for name, num_bytes in listed["files"].items():
        path = directory / name
        found = path.stat().st_size if path.is_file() else None
        if found != num_bytes:
            state = "is missing" if found is None else f"has {found} bytes"
            raise CheckpointError(f"{path}: {state}, expected {num_bytes} bytes; resume from an earlier checkpoint")
    return listed["steps_done"]


def _require_same_tensors(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    metadata: Metadata = FileSystemReader(directory).read_metadata()
    saved = {name: _described(entry) for name, entry in metadata.state_dict_metadata.items()}
    wanted = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    kinds = {name.partition("/")[0] for name in wanted}
    for name in sorted(saved.keys() | wanted.keys()):
        have, want = saved.get(name), wanted.get(name)
        if have != want and name.partition("/")[0] in kinds:
            raise CheckpointError(
                f"{directory}: {name} is {_in_words(have)}, this model's is {_in_words(want)}; "
                "the checkpoint belongs to another model"
            )


def _described(entry: object) -> tuple[torch.dtype, torch.Size]:
    assert isinstance(entry, TensorStorageMetadata)
    return entry.properties.dtype, entry.size


def _in_words(described: tuple[torch.dtype, torch.Size] | None) -> str:
    return "absent" if described is None else f"{str(described[0]).removeprefix('torch.')} {list(described[1])}"
