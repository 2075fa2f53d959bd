"""Saves and loads a worker's state in Megatron's distributed format. Parameters are stored by their position in the
whole model, so a state can be loaded on any mesh.

`state.json`, written last, lists the files, their sizes and checksums. Loading verifies the files before it changes
anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn import Parameter

from rl_core.errors import CheckpointError
from rl_core.rank_kit.background_writer import BackgroundWriter
from rl_core.rank_kit.process_group import agree, from_first
from rl_core.rank_kit.state_files import STATE_LIST, require_complete_state, write_state_list
from rl_core.rank_kit.state_writing import FileSystemWriter, state_not_written
from rl_megatron.rank.optimizer import Optimizer

_METADATA = {
    # Store optimizer state in the shape of the parameters, and gather it with gloo on the first data-parallel rank.
    # Without `mem_efficient`, NCCL gathers it through GPU memory, and every data-parallel rank keeps all of it.
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    # With expert parallelism, experts have an optimizer of their own. Save its state, too, under parameter names.
    "chained_optim_avoid_prefix": True,
    # Each layer has its own name, because layers may differ and may be loaded on another stage.
    "non_homogeneous_layers": True,
}


class _PlainFiles(TorchDistSaveShardedStrategy):
    """Writes Megatron's format in this process; Megatron's own writer forks processes, which ranks must not do."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Writes one file per rank, and an index of all files."""
        self._write(sharded_state_dict, checkpoint_dir, None)

    def _write(self, sharded_state: Any, directory: str | Path, group: dist.ProcessGroup | None) -> None:
        tensors, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state, True)
        save(
            mcore_to_pyt_state_dict(tensors, False),
            storage_writer=FileSystemWriter(directory),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=group,
        )


class _FilesInBackground(_PlainFiles):
    """Copies the tensors to CPU memory and writes the copy in a background thread."""

    def __init__(self, thread: ThreadPoolExecutor, group: dist.ProcessGroup):
        super().__init__()
        self._thread, self._group = thread, group
        self.writing: Future[None] | None = None

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Returns once the tensors are copied; `writing` completes when the copy is written."""
        for part in nested_values(sharded_state_dict):
            if isinstance(part, ShardedTensor) and part.data is not None:
                part.data = part.data.detach().to("cpu", copy=True)
        self.writing = self._thread.submit(self._write, sharded_state_dict, checkpoint_dir, self._group)


_thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
"""Writes background checkpoints one after another; its thread starts with the first checkpoint."""


def start_writing(
    writer: BackgroundWriter, directory: Path, chunks: Sequence[Any], optimizer: Optimizer | None, *, steps_done: int
) -> None:
    """Like `write_state`, but returns once the state is copied; `writer` tracks completion."""

    def write() -> Future[None]:
        assert writer.group is not None
        files = _FilesInBackground(_thread, writer.group)
        _save(directory, chunks, optimizer, files)
        assert files.writing is not None
        return files.writing

    writer.start(directory, write, lambda _: _write_list(directory, steps_done))


def write_state(directory: Path, chunks: Sequence[Any], optimizer: Optimizer | None, *, steps_done: int) -> None:
    """Writes the weights, the optimizer's state and the number of optimizer steps done. Returns when all ranks have
    finished.

    Raises:
        CheckpointError: the storage of any rank failed; raised on all ranks.
        RuntimeError: writing failed for another reason, for example because a rank was lost.
    """
    _save(directory, chunks, optimizer, _PlainFiles())
    dist.barrier()

    def list_files() -> None:
        try:
            _write_list(directory, steps_done)
        except OSError as error:
            raise state_not_written(directory, error) from error

    from_first(list_files)


def _save(directory: Path, chunks: Sequence[Any], optimizer: Optimizer | None, files: _PlainFiles) -> None:
    """Writes what `dist_checkpointing.save` writes. That function raises on rank 0 alone if rank 0 cannot write its
    files, while the other ranks wait for rank 0."""
    parts, common = save_preprocess(_sharded_state(chunks, optimizer, is_loading=False))

    def write_common() -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            TorchCommonSaveStrategy("torch", 1).save_common(common, directory)
            save_config(CheckpointingConfig(files.backend, files.version), str(directory))
        except (OSError, RuntimeError) as error:
            raise state_not_written(directory, error) from error

    from_first(write_common)
    try:
        files.save(parts, directory)
    except (CheckpointException, OSError, RuntimeError) as error:
        raise state_not_written(directory, error) from error


def _write_list(directory: Path, steps_done: int) -> None:
    """On rank 0, writes the list of files; call after all ranks have written their files."""
    if dist.get_rank() == 0:
        for path in directory.iterdir():
            if not path.stat().st_size:
                path.unlink()  # torch leaves an empty file for a rank that had nothing to write
        names = {path.name for path in directory.iterdir()} - {STATE_LIST}
        write_state_list(directory, names, steps_done=steps_done)


def read_state(directory: Path, chunks: Sequence[Any], optimizer: Optimizer | None) -> int:
    """Loads what `write_state` wrote, on any mesh; returns the number of optimizer steps done.

    Raises:
        CheckpointError: the state belongs to another model; or a file is missing, truncated or modified, in which case
            nothing is loaded.
    """
    steps_done = agree(lambda: require_complete_state(directory))
    try:
        state: Any = dist_checkpointing.load(_sharded_state(chunks, optimizer, is_loading=True), str(directory))
    except (CheckpointException, CheckpointingException, OSError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"{directory}: cannot be read into this model ({error}); resume from an earlier checkpoint, or with the "
            "model that wrote this one"
        ) from error
    for name, model in _named(chunks).items():
        _take(model, state[name])
    if optimizer is not None:
        _take_optimizer(optimizer, state["optimizer"])
        optimizer.set_steps(steps_done)
        optimizer.zero_grad()
    return steps_done


def _take(model: Any, state: Mapping[str, Any]) -> None:
    """Loads a chunk's parameters. A saved state names base weights as if no layer had adapters. `load_state_dict`
    expects the names of the wrapped layers, which contain `.to_wrap.`."""
    own = {name.replace(".to_wrap.", "."): name for name, _ in model.named_parameters()}
    has_adapters = any(name != known for known, name in own.items())
    model.load_state_dict({own.get(name, name): value for name, value in state.items()}, strict=not has_adapters)


def _take_optimizer(optimizer: Optimizer, state: Mapping[Any, Any]) -> None:
    """Loads moments and main parameters. Everything else in the optimizers' states keeps this run's values. The run
    that wrote the state may have had another number of optimizers, because experts have an optimizer of their own only
    with expert parallelism."""
    optimizers = optimizer.megatron.chained_optimizers
    parts = [state] if len(optimizers) == 1 else [state[number] for number in range(len(optimizers))]
    for one, part in zip(optimizers, parts, strict=True):
        kind = _METADATA["distrib_optim_sharding_type"]
        if "param_state" not in part:
            continue  # all parameters of this stage are frozen
        one.load_state_dict({**one.state_dict(), "param_state": part["param_state"], "param_state_sharding_type": kind})


def _named(chunks: Sequence[Any]) -> dict[str, Any]:
    """Returns the model chunks under the keys that Megatron's optimizer expects."""
    models = unwrap_model(list(chunks))
    return {"model": models[0]} if len(models) == 1 else {f"model{i}": model for i, model in enumerate(models)}


def _sharded_state(chunks: Sequence[Any], optimizer: Optimizer | None, *, is_loading: bool) -> dict[str, Any]:
    state = {name: model.sharded_state_dict(metadata=_METADATA) for name, model in _named(chunks).items()}
    if optimizer is not None:
        state["optimizer"] = optimizer.megatron.sharded_state_dict(state, is_loading, metadata=_METADATA)
    return state


def sharded_parameters(chunks: Sequence[Any]) -> Iterator[tuple[Parameter, ShardedTensor | ShardedTensorFactory]]:
    """Yields each parameter of this rank with its position in the whole model."""
    for part in nested_values(_sharded_state(chunks, None, is_loading=False)):
        if isinstance(part, ShardedTensor | ShardedTensorFactory) and isinstance(part.data, Parameter):
            yield part.data, part
