"""If a real FSDP rank is killed in the middle of a call, a single error follows in time, and nothing is left behind."""

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
from rl_core.workers import MicroBatchLimits, WorkerGroup
from rl_transformers.testing.models import make_checkpoint
from tests.fsdp.conftest import random_batch, spec_of
from tests.ray.conftest import IN_TIME_S, START_S, make_calls
from tests.ray.faulty_fsdp import METHODS, PHASES, FaultyOptions, faulty_fsdp

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(900)]

LIMITS = MicroBatchLimits(max_sequences=1)
NUM_LAYERS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=NUM_LAYERS)


async def save_in_background(group: WorkerGroup, directory: Path) -> None:
    await group.start_saving(directory)
    while not await group.has_saved():
        await asyncio.sleep(0.02)


async def two_steps(model: Path, directory: Path, options: FaultyOptions) -> None:
    """Starts a group and runs two steps with it: scoring, training, the optimizer step, and both ways of saving."""
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

    await make_calls(WorkerGroup.launch(faulty_fsdp, spec, ranks_per_node=2, timeout_s=START_S), calls)


def fault(seed: int) -> dict[str, Any]:
    """Options of a random fault: phase, rank, decoder layer, and number of passes before it."""
    choice = random.Random(seed)
    phase = choice.choice(PHASES)
    # There are two steps. In each, a rank has two micro-batches, which pass every layer.
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
async def test_a_rank_killed_at_a_random_place_ends_the_call_with_one_error_that_names_it(
    model, tmp_path, seed, late_news_of_deaths
):
    options = fault(seed)
    methods = "|".join(METHODS[options["fault_phase"]])
    pattern = rf"^policy rank {options['fault_rank']} of 2 \(node [0-9.]+, pid \d+\) died in ({methods}): "
    with pytest.raises(WorkerError, match=pattern) as raised:
        await two_steps(model, tmp_path, FaultyOptions(**options))
    assert raised.value.seconds < IN_TIME_S  # pyright: ignore[reportAttributeAccessIssue]


async def test_without_a_fault_both_ways_of_saving_succeed(model, tmp_path):
    """Negative control: without a fault, the two steps succeed."""
    await two_steps(model, tmp_path, FaultyOptions())
    for directory in (tmp_path / "second", tmp_path / "second in background"):
        assert {path.name for path in directory.iterdir()} >= {"state.json", ".metadata"}
