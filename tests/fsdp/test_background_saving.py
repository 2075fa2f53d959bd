"""States written while training continues: from a copy, one at a time, and not loaded before they are complete."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
import torch

import rl_transformers.rank.state
from rl_core.errors import CheckpointError, WorkerError
from rl_core.interfaces import LossSpec
from rl_fsdp import FsdpWorker
from tests.fsdp.conftest import random_batch

WAIT_S = 200.0
LOSS = LossSpec(name="cross_entropy")


@attrs.define
class Storage:
    """A storage whose writes wait until `may_write` is set, and fail if it is full."""

    may_write: threading.Event = attrs.field(factory=threading.Event)
    is_full: bool = False


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    """The storage to which workers write states."""
    storage = Storage()

    class Writer(rl_transformers.rank.state.FileSystemWriter):
        def write_data(self, plan, planner):
            assert storage.may_write.wait(WAIT_S)
            if storage.is_full:
                raise OSError("no space left")
            return super().write_data(plan, planner)

    monkeypatch.setattr(rl_transformers.rank.state, "FileSystemWriter", Writer)
    yield storage
    storage.may_write.set()


def train(worker: FsdpWorker) -> None:
    batch = random_batch([7, 5, 6])
    batch = batch.with_columns(loss_weights=batch["loss_mask"] / batch["loss_mask"].sum())
    worker.forward_backward(batch, [[0, 1], [2]], LOSS, temperature=1.0)
    worker.optim_step()


def state_of(worker: FsdpWorker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker.shards.state(with_optimizer=True).items()}


def wait_for(worker: FsdpWorker) -> None:
    deadline = time.monotonic() + WAIT_S
    while not worker.has_saved():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_background_save_writes_the_state_at_its_start(
    start_worker: Callable[..., FsdpWorker], storage: Storage, tmp_path: Path
):
    worker, other = start_worker(), start_worker()
    train(worker)
    expected = state_of(worker)
    worker.start_saving(tmp_path / "state")
    assert not worker.has_saved()
    train(worker)
    assert not (tmp_path / "state" / "state.json").exists()
    with pytest.raises(WorkerError, match="still being written"):
        worker.start_saving(tmp_path / "another")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        other.load_state(tmp_path / "state")
    storage.may_write.set()
    wait_for(worker)
    other.load_state(tmp_path / "state")
    assert other.steps_done == 1
    found, moved = state_of(other), state_of(worker)
    assert all(tensor.equal(expected[name]) for name, tensor in found.items())
    assert not any(tensor.equal(expected[name]) for name, tensor in moved.items()), (
        "training must change every tensor, or the comparison proves nothing"
    )


def test_a_failed_write_raises_at_every_wait(start_worker: Callable[..., FsdpWorker], storage: Storage, tmp_path: Path):
    worker = start_worker()
    train(worker)
    worker.start_saving(tmp_path / "state")
    storage.is_full = True
    storage.may_write.set()
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match=r"state: could not be written in the background \(rank 0: OSError: no"
        ):
            wait_for(worker)
    with pytest.raises(CheckpointError):
        worker.start_saving(tmp_path / "another")
    with pytest.raises(CheckpointError, match=r"another: could not be written \(rank 0: OSError: no space"):
        worker.save_state(tmp_path / "another")
