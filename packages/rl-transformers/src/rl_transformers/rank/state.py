"""Writes and reads a worker's state: named tensors in torch's distributed checkpoint format, which any number of ranks
can read.

Every rank writes its shards to its own file. `state.json`, written last, lists the files with sizes and checksums.
Reading checks all files before it changes anything.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from rl_core.errors import CheckpointError
from rl_core.rank_kit.background_writer import BackgroundWriter
from rl_core.rank_kit.process_group import agree, from_first
from rl_core.rank_kit.state_files import require_complete_state, write_state_list
from rl_core.rank_kit.state_writing import FileSystemWriter, reason_of, state_not_written
from rl_transformers.rank.flat_pieces import FlatPiece, PieceStager, whole_shape
from rl_transformers.rank.rank_mesh import RankMesh

_INDEX = ".metadata"


def write_state(directory: Path, tensors: Mapping[str, Tensor], *, steps_done: int, ranks: RankMesh | None) -> None:
    """Writes tensors, sharded or whole, and the number of optimizer steps done. The state is complete on return.

    Raises:
        CheckpointError: the storage of any rank failed. Raised on all ranks.
        RuntimeError: writing failed for another reason, for example because a rank was lost.
    """
    _expect_one_rank()
    try:
        save(dict(tensors), storage_writer=FileSystemWriter(directory), no_dist=ranks is None)
    except (OSError, CheckpointException) as error:
        raise state_not_written(directory, error) from error

    def list_files() -> None:
        try:
            _write_list(directory, steps_done)
        except OSError as error:
            raise state_not_written(directory, error) from error

    list_files() if ranks is None else from_first(list_files)


def start_writing(
    writer: BackgroundWriter, directory: Path, tensors: Mapping[str, Tensor], *, steps_done: int, ranks: RankMesh | None
) -> None:
    """Like `write_state`, but returns when the tensors are copied; `writer.is_done` returns True when the state is
    complete on this rank."""

    def write() -> Future[Metadata]:
        _expect_one_rank()
        writing = async_save(
            dict(tensors),
            storage_writer=FileSystemWriter(directory),
            process_group=writer.group,
            no_dist=ranks is None,
            async_stager=PieceStager() if any(isinstance(t, FlatPiece) for t in tensors.values()) else None,
        )
        assert isinstance(writing, Future)
        return writing

    def finish(_: Metadata) -> None:
        if ranks is None or ranks.is_first:
            _write_list(directory, steps_done)

    writer.start(directory, write, finish)


def read_state(directory: Path, tensors: Mapping[str, Tensor], *, ranks: RankMesh | None) -> int:
    """Fills `tensors` in place with the values saved under their names. Returns the number of optimizer steps done.

    Args:
        directory: a directory that `write_state` wrote, with any number of ranks.
        tensors: tensors to fill, sharded in any way, or whole. The state may contain other tensors, such as those of an
            optimizer that is not needed.
        ranks: the ranks, which read collectively; None for a single rank.

    Raises:
        CheckpointError: a file is missing, truncated or changed, or the saved tensors do not fit this model; in these
            cases, `tensors` are unchanged. Also raised if reading fails after these checks.
    """

    # In two rounds, so that all files are checked, each by one rank, before any rank unpickles the index.
    steps_done = agree(partial(require_complete_state, directory))
    agree(partial(_require_same_tensors, directory, tensors))
    try:
        _expect_one_rank()
        load(dict(tensors), storage_reader=FileSystemReader(directory), no_dist=ranks is None)
    except (OSError, RuntimeError, CheckpointException) as error:
        raise CheckpointError(
            f"{directory}: cannot be read ({reason_of(error)}); resume from an earlier checkpoint"
        ) from error
    return steps_done


def _expect_one_rank() -> None:
    """Filters torch's warning about a single rank, which torch gives even with `no_dist=True`. A background save warns
    from another thread, so the filter stays installed."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")


def _write_list(directory: Path, steps_done: int) -> None:
    # The metadata that torch 2.11's writer returns does not name the files.
    storage_data = FileSystemReader(directory).read_metadata().storage_data
    assert storage_data is not None, "torch's writer names the files in its index"
    names = {_INDEX, *(info.relative_path for info in storage_data.values())}
    write_state_list(directory, names, steps_done=steps_done)


def _require_same_tensors(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    metadata: Metadata = FileSystemReader(directory).read_metadata()
    saved = {name: _described(entry) for name, entry in metadata.state_dict_metadata.items()}
    wanted = {name: _in_words(tensor.dtype, whole_shape(tensor)) for name, tensor in tensors.items()}
    kinds = {name.partition("/")[0] for name in wanted}
    for name in sorted(saved.keys() | wanted.keys()):
        have, want = saved.get(name, "absent"), wanted.get(name, "absent")
        if have != want and name.partition("/")[0] in kinds:
            raise CheckpointError(
                f"{directory}: {name} is {have}, but this model's is {want}; the checkpoint belongs to another model, "
                "or another backend wrote it"
            )


def _described(entry: object) -> str:
    """Describes an entry of a state; another backend's state may have entries that are not tensors."""
    is_tensor = isinstance(entry, TensorStorageMetadata)
    return _in_words(entry.properties.dtype, entry.size) if is_tensor else "not a tensor"


def _in_words(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
