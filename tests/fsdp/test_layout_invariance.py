"""The gradient of a mini-batch does not depend on micro-batches, packing or order."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from rl_core.algorithms.reductions import REDUCTIONS
from rl_core.batch import Batch
from rl_core.interfaces import LossSpec
from tests.fsdp.conftest import StartWorker, random_batch

LENGTHS = [5, 61, 2, 33, 40, 1, 90, 12, 34, 40, 7, 150, 3, 28, 9, 64]
LOSS = LossSpec(name="ppo_clip", kl_coef=0.1, entropy_coef=0.05)
TOLERANCE = {"float32": 5e-6, "float64": 1e-12}
"""Relative L2 error over all parameters. Only the order of sums differs; measured: 6e-7 and 8e-16."""


def reduced(batch: Batch, reduction: str) -> Batch:
    """The batch with the loss weights that a reduction gives for the whole batch."""
    given = {
        "loss_mask_T": batch["loss_mask"],
        "sequence_T": batch.sequence_index,
        "group_N": batch["group_id"],
        "max_seq_len": 100,
    }
    function = REDUCTIONS[reduction]
    return batch.with_columns(
        loss_weights=function(**{name: given[name] for name in inspect.signature(function).parameters})
    )


def plan_of(num_sequences: int, num_micro_batches: int) -> list[list[int]]:
    """A plan that deals out the sequences to micro-batches in turn."""
    return [list(range(i, num_sequences, num_micro_batches)) for i in range(num_micro_batches)]


def gradient(worker, batch: Batch, plan: list[list[int]]) -> tuple[Tensor, float]:
    """All gradients as one vector, in float64, and the loss."""
    metrics = worker.forward_backward(batch, plan, LOSS, temperature=0.9)
    vector = torch.cat([g.double().flatten() for g in worker.gradients().values()])
    worker.optimizer.zero_grad()
    return vector, metrics["loss"][0]


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_gradient_does_not_depend_on_micro_batches_packing_or_order(
    dtype: str, reduction: str, start_worker: StartWorker
):
    packed, padded = (start_worker({"dtype": dtype}, use_sample_packing=packing) for packing in (True, False))
    batch = random_batch(LENGTHS)
    shuffled = batch.select(torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(3)))
    whole = reduced(batch, reduction)
    expected, expected_loss = gradient(packed, whole, plan_of(len(LENGTHS), 1))
    for worker in (packed, padded):
        for given in (whole, reduced(shuffled, reduction)):
            for num_micro_batches in (1, 2, 7):
                actual, loss = gradient(worker, given, plan_of(len(LENGTHS), num_micro_batches))
                assert relative(actual, expected) <= TOLERANCE[dtype]
                assert loss == pytest.approx(expected_loss, rel=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_wrong_weight_is_noticed(dtype: str, start_worker: StartWorker):
    worker = start_worker({"dtype": dtype})
    batch = reduced(random_batch(LENGTHS), "token_mean")
    expected, _ = gradient(worker, batch, plan_of(len(LENGTHS), 2))
    wrong_T = batch["loss_weights"].clone()
    wrong_T[wrong_T.nonzero()[5]] *= 1.01
    actual, _ = gradient(worker, batch.with_columns(loss_weights=wrong_T), plan_of(len(LENGTHS), 2))
    assert relative(actual, expected) > TOLERANCE[dtype]


@pytest.mark.parametrize("reduction", ["sequence_mean", "prompt_mean", "token_mean"])
def test_weights_computed_per_micro_batch_are_noticed(reduction: str, start_worker: StartWorker):
    worker = start_worker({"dtype": "float32"})
    batch = random_batch(LENGTHS)
    plan = plan_of(len(LENGTHS), 2)
    expected, _ = gradient(worker, reduced(batch, reduction), plan)
    for sequences in plan:
        part = reduced(batch.select(sequences), reduction)
        halved = part.with_columns(loss_weights=part["loss_weights"] / len(plan))
        worker.forward_backward(halved, [range(len(sequences))], LOSS, temperature=0.9)
    actual = torch.cat([g.double().flatten() for g in worker.gradients().values()])
    assert relative(actual, expected) > 1e-2
