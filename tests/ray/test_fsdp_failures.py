"""Real FSDP ranks, one of which is killed in the middle of its work: one error, in time, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_core.errors import WorkerError
from rl_core.interfaces import LossSpec
from rl_core.testing.models import make_checkpoint
from rl_core.workers import MicroBatchLimits, WorkerGroup
from tests.fsdp.conftest import random_batch, spec_of
from tests.ray.conftest import use
from tests.ray.faulty_fsdp import METHODS, PHASES, FaultyOptions, faulty_fsdp

pytestmark = pytest.mark.usefixtures("nothing_left")

LIMITS = MicroBatchLimits(max_sequences=1)
NUM_LAYERS = 2
WITHIN_S = 10.0
"""From the call that fails to its error."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=NUM_LAYERS)


async def save_in_background(group: WorkerGroup, directory: Path) -> None:
    await group.start_saving(directory)
    while not await group.has_saved():
        await asyncio.sleep(0.02)


async def two_steps(model: Path, directory: Path, options: FaultyOptions) -> None:
    """With everything in them."""
    spec = spec_of(model, options=options, num_threads=1)
    batch = random_batch([6, 4, 5, 7])
    batch = batch.with_columns(loss_weights=batch["loss_mask"] / batch["loss_mask"].sum())

    def calls(group: WorkerGroup) -> Iterator[Callable[[], Awaitable[Any]]]:
        for step in ("first", "second"):
            yield lambda: group.forward(batch, LIMITS, temperature=1.0)
            yield lambda: group.forward_backward(batch, LIMITS, LossSpec(name="cross_entropy"), temperature=1.0)
            yield group.optim_step
            yield lambda step=step: group.save_state(directory / step)
            yield lambda step=step: save_in_background(group, directory / f"{step} in background")

    await use(WorkerGroup.launch(faulty_fsdp, spec, ranks_per_node=2, timeout_s=120), calls)


def fault(seed: int) -> dict[str, Any]:
    """A phase, a rank, and a place and time in it."""
    choice = random.Random(seed)
    phase = choice.choice(PHASES)
    # There are two steps, and in each the two micro-batches of a rank pass every layer.
    return {
        "fault_phase": phase,
        "fault_rank": choice.randrange(2),
        "fault_time": choice.randrange(4 if phase in ("forward", "backward") else 2),
        "fault_layer": choice.randrange(NUM_LAYERS),
    }


@pytest.mark.parametrize(
    "seed",
    [
        int(os.environ.get("SEED", "0")),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1000, 1030)),
    ],
)
async def test_a_rank_killed_at_a_random_place_ends_the_call_with_one_error_that_names_it(model, tmp_path, seed):
    options = fault(seed)
    methods = "|".join(METHODS[options["fault_phase"]])
    pattern = rf"^policy rank {options['fault_rank']} of 2 \(node [0-9.]+, pid \d+\) died in ({methods}): "
    with pytest.raises(WorkerError, match=pattern) as raised:
        await two_steps(model, tmp_path, FaultyOptions(**options))
    assert raised.value.seconds < WITHIN_S  # pyright: ignore[reportAttributeAccessIssue]


async def test_without_a_fault_both_ways_of_saving_write_the_same(model, tmp_path):
    """Negative control: what the faults are put into works, and gets through all of it."""
    await two_steps(model, tmp_path, FaultyOptions())
    for directory in (tmp_path / "second", tmp_path / "second in background"):
        assert {path.name for path in directory.iterdir()} >= {"state.json", ".metadata"}
