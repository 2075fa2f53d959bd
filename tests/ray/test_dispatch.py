"""What ranks in real processes receive, and what they return."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from ray.exceptions import ObjectStoreFullError, RayError, RaySystemError

from rl_core.batch import Batch
from rl_core.errors import CheckpointError, WorkerError
from rl_core.interfaces import LossSpec, Rendezvous
from rl_core.workers import MicroBatchLimits, WorkerGroup, ray_ranks
from rl_core.workers.rank import Part
from rl_core.workers.ray_ranks import _put
from tests.passing_time import until
from tests.ray.gloo_backend import GlooWorker

pytestmark = pytest.mark.timeout(900)

LOSS = LossSpec(name="cross_entropy")
LIMITS = MicroBatchLimits(max_tokens=12)


def batch_of(lengths: list[int]) -> Batch:
    """A batch with these sequence lengths, in which token t of the stream is t + 1."""
    total, sequences = 0, []
    for length in lengths:
        sequences.append({"tokens": list(range(total + 1, total + length + 1)), "group_id": length})
        total += length
    batch = Batch.from_sequences(sequences)
    return batch.with_columns(loss_weights=torch.ones(total) / total)


@pytest.mark.parametrize("lengths", [[3, 5, 2, 7, 4, 6], [4]], ids=["several", "fewer than ranks"])
async def test_scores_come_back_in_the_order_of_the_stream_from_the_ranks_that_hold_them(four_ranks, lengths):
    batch = batch_of(lengths)
    scores = await four_ranks.forward(batch, LIMITS, temperature=0.25)
    assert torch.equal(scores["logprobs"], batch["tokens"] + 0.25)
    assert set(scores["entropies"].tolist()) <= {2.0, 3.0}, (
        "scores must come from ranks 2 and 3, the last pipeline stage, which has the logits"
    )


async def test_metrics_and_gradient_of_all_ranks_are_those_of_the_whole_batch(four_ranks, tmp_path):
    batch = batch_of([3, 5, 2, 7, 4])
    expected = float((batch["loss_weights"] * batch["tokens"]).sum())
    metrics = await four_ranks.forward_backward(batch, LIMITS, LOSS, temperature=1.0)
    step = await four_ranks.optim_step()
    await four_ranks.save_state(tmp_path)
    assert metrics["loss"] == pytest.approx((expected, 1.0))
    assert metrics["tokens"][0] == batch.num_tokens
    assert step.grad_norm == pytest.approx(expected)
    assert [float(torch.load(tmp_path / f"{rank}.pt")) for rank in range(4)] == pytest.approx([1 - expected] * 4)
    torch.save(torch.ones(1), tmp_path / "one.pt")
    for rank in range(4):
        (tmp_path / f"{rank}.pt").write_bytes((tmp_path / "one.pt").read_bytes())
    await four_ranks.load_state(tmp_path)


async def test_every_stage_receives_its_part_whole_and_without_a_copy(four_ranks):
    batch = batch_of([3, 5, 2, 7, 4, 6])
    ranks, parts = four_ranks._ranks, four_ranks._parts(batch, LIMITS)
    answers = await ranks.call_on_parts(GlooWorker.columns_of, batch, parts)
    every = await ranks.call(GlooWorker.received_before)
    assert answers == [None, None, *every[2:]], "only the last stage answers"
    for rank, received in enumerate(every):
        own = parts[rank % 2]
        part = batch.select(torch.from_numpy(own.sequences))
        assert received["columns"] == {name: values.tolist() for name, values in part.columns.items()}
        assert received["plan"] == own.plan
        assert "plasma" in received["mapped"], "the tokens must lie in Ray's shared memory"


async def test_a_stage_receives_the_routes_of_its_own_layers(four_ranks):
    batch = batch_of([3, 5, 2, 7, 4, 6])
    routes_TLK = torch.arange(batch.num_tokens * 6, dtype=torch.uint8).reshape(-1, 2, 3)
    routed = batch.with_columns(routed_experts=routes_TLK, routed=torch.ones(batch.num_tokens, dtype=torch.bool))
    ranks, parts = four_ranks._ranks, four_ranks._parts(routed, LIMITS)
    await ranks.call_on_parts(GlooWorker.columns_of, routed, parts)
    for rank, received in enumerate(await ranks.call(GlooWorker.received_before)):
        stage = rank // 2
        part = routed.select(torch.from_numpy(parts[rank % 2].sequences))
        own = {"routed_experts": part["routed_experts"][:, [stage]].tolist()}
        named = {"route_layers": [[stage == 0, stage == 1]] * part.num_sequences}
        assert received["columns"] == {name: values.tolist() for name, values in part.columns.items()} | own | named


async def test_data_for_several_ranks_is_put_into_the_object_store_once():
    batch = batch_of([3, 5, 2, 7])
    routed = batch.with_columns(routed_experts=torch.zeros(batch.num_tokens, 2, 3, dtype=torch.uint8))
    parts = [Part(sequences=np.array(own), sent=np.array(own), plan=((0, 1),)) for own in ([0, 1], [2, 3])]
    stages = [(0, (0,)), (0, (0,)), (1, (0,)), (0, (1,)), (1, (1,))]
    first, second, other_part, other_stage, last = _put(routed, parts, stages)
    assert first == second
    assert first[0] == other_stage[0] != other_part[0] == last[0]
    assert len({routes for _, routes in (first, other_part, other_stage, last)}) == 4
    assert len({*map(tuple, _put(batch, parts, stages))}) == 2, "without routes, all stages must share one stored batch"


async def test_ranks_know_their_numbers_and_work_on_one_thread(four_ranks):
    answers = await four_ranks._ranks.call(GlooWorker.describe)
    assert [answer["RANK"] for answer in answers] == [answer["LOCAL_RANK"] for answer in answers] == list("0123")
    assert {answer["WORLD_SIZE"] for answer in answers} == {"4"}
    assert {(answer["OMP_NUM_THREADS"], answer["threads"]) for answer in answers} == {("1", 1)}
    assert all(answer["same_thread"] for answer in answers)
    assert len({answer["pid"] for answer in answers}) == 4


async def test_manifests_of_all_ranks_are_merged(four_ranks):
    rendezvous = Rendezvous(transport="tests.ray.gloo_backend:transport", receiver="", data={})
    manifest = await four_ranks.publish(rendezvous, 7, 100)
    assert manifest.version == 7
    assert sorted(manifest.tensors) == [f"weight.{rank}" for rank in range(4)]


async def test_an_error_found_by_all_ranks_is_raised_unchanged_and_the_group_survives(four_ranks, tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"0\.pt: missing") as raised:
        await four_ranks.load_state(tmp_path)
    assert "policy rank 0 of 4" in raised.value.__notes__[0]
    assert "Traceback" in raised.value.__notes__[0]
    await four_ranks.forward(batch_of([3]), LIMITS, temperature=1.0)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ObjectStoreFullError("full"), "policy: 3 tokens do not fit into Ray's object store"),
        (RaySystemError("raylet is gone"), "policy: forward cannot start, because Ray failed .* raylet is gone"),
    ],
)
async def test_a_batch_that_ray_does_not_store_is_an_error_with_the_reason(
    four_ranks, monkeypatch: pytest.MonkeyPatch, error: RayError, message: str
):
    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(ray_ranks, "_put", fail)
        with pytest.raises(WorkerError, match=message):
            await four_ranks.forward(batch_of([3]), LIMITS, temperature=1.0)
    await four_ranks.forward(batch_of([3]), LIMITS, temperature=1.0)


async def test_dispatched_batches_do_not_accumulate_in_the_object_store(four_ranks: WorkerGroup):
    batch = batch_of([30_000] * 4)
    limits = MicroBatchLimits(max_sequences=1)
    before = ray.available_resources().get("object_store_memory", 0)
    for _ in range(30):
        await four_ranks.forward(batch, limits, temperature=1.0)

    def num_bytes_left() -> float:
        return before - ray.available_resources().get("object_store_memory", 0)

    # The object store may hold the batches of the last calls, but not of all thirty. Ray frees them a little later.
    await until(lambda: num_bytes_left() < 3 * batch.num_tokens * 8)
