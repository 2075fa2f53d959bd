"""If a rank is out of disk space, the call fails, and afterwards all ranks can train, save and send weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rl_core.errors import DiskFullError, WeightSyncError
from rl_core.interfaces import LossSpec
from rl_core.workers import MicroBatchLimits, WorkerGroup
from rl_transformers.testing.models import make_checkpoint
from tests.fsdp.conftest import random_batch, spec_of
from tests.ray.conftest import START_S
from tests.ray.full_disk_fsdp import full_disk_fsdp, transport

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(900)]

LIMITS = MicroBatchLimits(max_sequences=1)
BUCKET_BYTES = 10_000
"""So small that a sync has several buckets: the other rank still gathers tensors when the first one fails."""


async def train(group: WorkerGroup) -> float:
    """Takes one optimizer step and returns the gradient norm."""
    batch = random_batch([6, 4, 5, 7])
    batch = batch.with_columns(loss_weights=batch["loss_mask"] / batch["loss_mask"].sum())
    await group.forward_backward(batch, LIMITS, LossSpec(name="cross_entropy"), temperature=1.0)
    return (await group.optim_step()).grad_norm


async def save_in_background(group: WorkerGroup, directory: Path) -> None:
    await group.start_saving(directory)
    async with asyncio.timeout(START_S):
        while not await group.has_saved():
            await asyncio.sleep(0.02)


async def test_two_ranks_go_on_after_one_ran_out_of_disk_space(tmp_path):
    model = make_checkpoint(tmp_path / "model")
    group = await WorkerGroup.launch(full_disk_fsdp, spec_of(model, num_threads=1), ranks_per_node=2, timeout_s=START_S)
    try:
        rendezvous = transport.open(num_ranks=2, num_engines=1)
        with pytest.raises(WeightSyncError, match="no space"):
            await group.publish(rendezvous, 1, BUCKET_BYTES)
        assert (await group.publish(rendezvous, 2, BUCKET_BYTES)).version == 2
        assert await train(group) > 0

        with pytest.raises(DiskFullError, match=rf"disk full: {tmp_path}/full/model.* No space left on device"):
            await group.save_model(tmp_path / "full" / "model")
        await group.save_model(tmp_path / "export")
        assert (tmp_path / "export" / "model.safetensors").stat().st_size > 0

        with pytest.raises(DiskFullError, match=r"disk full: .* in the background"):
            await save_in_background(group, tmp_path / "full" / "state")
        await save_in_background(group, tmp_path / "second")
        assert (tmp_path / "second" / "state.json").is_file()
        await group.save_state(tmp_path / "third")
        assert await train(group) > 0
    finally:
        await group.close()
