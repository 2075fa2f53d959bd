"""Cost of sending router-replay routes to pipeline stages on two nodes: all routes, or only those of a stage's layers.

Tensor parallel 2 × pipeline 2, each stage on its own node. The nodes are two raylets on this machine, so objects that
are missing on a node are copied to it. Ranks are real Ray actors whose worker only checks the routes that it received.
The two variants alternate within one run.

    rank      route bytes that the ranks receive, divided by the route bytes of their own tokens and layers. It is
              above 1 even if only a stage's own layers are sent: the routers of tensor ranks split the tokens, but each
              rank receives the routes of all tokens
    node      route bytes that the nodes receive, divided by the route bytes of their own layers
    dispatch  the whole call: batch and routes are put into the object store and copied to the second node
    check     processor time in which a rank checks its routes, mean over ranks

Run: python benchmarks/dispatch_routes.py [--sequences 256] [--tokens 1024] [--layers 48] [--rounds 7]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

from ray.cluster_utils import Cluster

from rl_core.batch import Batch
from rl_core.interfaces import Backend, ModelConfig, RankInfo, Worker, WorkerSpec
from rl_core.layout.mesh import Mesh
from rl_core.layout.stages import pipeline_chunks
from rl_core.rank_kit import RouteShape, require_routes
from rl_core.workers import MicroBatchLimits, WorkerGroup

TENSOR, STAGES = 2, 2
NUM_EXPERTS, EXPERTS_PER_TOKEN = 128, 8


@attrs.frozen(kw_only=True)
class Checked:
    """What a rank reports about the routes of the last batch."""

    node: str
    num_bytes: int
    check_s: float


class CheckingWorker(Worker):
    """A pipeline stage's rank: stores its part of the batch and checks the routes in it."""

    def __init__(self, rank: RankInfo, num_layers: int):
        chunk = pipeline_chunks(num_layers, STAGES)[mesh_of(rank.world_size).coordinates(rank.rank).pipeline]
        self._own = tuple(range(chunk.start, chunk.start + chunk.num_layers))
        self._num_layers = num_layers
        self._part: Batch | None = None

    def route_layers(self) -> tuple[int, ...]:
        return self._own

    def receive(self, batch: Batch, plan: Sequence[Sequence[int]]) -> None:
        self._part = batch

    def check(self) -> Checked:
        import ray

        assert self._part is not None
        shape = RouteShape(
            num_layers=self._num_layers,
            layers=self._own if "route_layers" in self._part else tuple(range(self._num_layers)),
            num_experts=NUM_EXPERTS,
            experts_per_token=EXPERTS_PER_TOKEN,
        )
        start = time.thread_time()
        require_routes(self._part, shape, key="replay")
        check_s = time.thread_time() - start
        node = ray.get_runtime_context().get_node_id()
        return Checked(node=node, num_bytes=self._part["routed_experts"].nbytes, check_s=check_s)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("there is no model")

    forward_backward = optim_step = export_weights = save_state = load_state = save_model = forward


@attrs.frozen
class CheckingBackend(Backend):
    """A backend without a model; its ranks expect routes for `num_layers` layers."""

    num_layers: int
    name: str = "checking"
    config_section: str = ""
    options_class: type = object

    def mesh(self, options: Any, world_size: int) -> Mesh:
        return mesh_of(world_size)

    def validate(self, spec: WorkerSpec, world_size: int) -> None:
        pass

    def needs_own_process(self) -> bool:
        return True

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Any:
        return CheckingWorker(rank, self.num_layers)


def mesh_of(world_size: int) -> Mesh:
    """The mesh of both variants; a stage's ranks are consecutive, so they are on one node."""
    return Mesh(world_size=world_size, tensor=TENSOR, pipeline=STAGES)


async def main() -> None:
    """Measures both variants and prints bytes, milliseconds and ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    batch = make_batch(arguments.sequences, arguments.tokens, arguments.layers)
    num_bytes = batch["routed_experts"].nbytes
    print(f"{batch.num_tokens} tokens, {num_bytes / 1e6:.1f} MB of routes")
    # A raylet's store holds the batches of two rounds: this one and the one before.
    node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 * 2**20 + 4 * num_bytes}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(**node)
        cluster.wait_for_nodes()
        os.environ["RAY_ADDRESS"] = str(cluster.address)
        await measure(batch, arguments.layers, arguments.rounds)
    finally:
        cluster.shutdown()


async def measure(batch: Batch, num_layers: int, rounds: int) -> None:
    """Alternates the two variants; prints medians over the rounds, and the median of the ratios within each round."""
    spec = WorkerSpec(
        role="policy",
        model=ModelConfig(),
        optimizer=None,
        options=None,
        bf16=False,
        gradient_checkpointing=False,
        use_sample_packing=True,
        logprobs_chunk_size=1,
        total_optimizer_steps=None,
        seed=0,
        num_threads=1,
    )
    group = await WorkerGroup.launch(
        CheckingBackend(num_layers), spec, num_nodes=STAGES, ranks_per_node=TENSOR, timeout_s=300
    )
    try:
        ranks: Any = group._ranks
        parts = group._parts(batch, MicroBatchLimits(max_sequences=8))
        ways = {"all layers": [None] * len(ranks._route_layers), "own layers": ranks._route_layers}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        checks: dict[str, list[float]] = {name: [] for name in ways}
        for i in range(rounds + 1):
            for name, layers in ways.items():
                ranks._route_layers = layers
                start = time.perf_counter()
                await ranks.call_on_parts(CheckingWorker.receive, batch, parts)
                dispatch_s = time.perf_counter() - start
                checked = await ranks.call(CheckingWorker.check)
                if i == 0:
                    show_bytes(name, checked, batch["routed_experts"].nbytes)
                else:
                    seconds[name].append(dispatch_s)
                    checks[name].append(statistics.mean(rank.check_s for rank in checked))
        show_times("dispatch", seconds)
        show_times("check", checks)
    finally:
        await group.close()


def show_bytes(name: str, checked: Sequence[Checked], batch_bytes: int) -> None:
    """Prints route bytes per rank and per node; the ranks of a node read the same bytes from its store."""
    by_node = {rank.node: rank.num_bytes for rank in checked}
    assert len(by_node) == STAGES, "each stage's ranks must be on a node of their own"
    per_rank = sum(rank.num_bytes for rank in checked) / batch_bytes
    per_node = sum(by_node.values()) / batch_bytes
    print(f"{name:12} bytes over the minimum: rank {per_rank:.2f}, node {per_node:.2f}")


def show_times(what: str, seconds: dict[str, list[float]]) -> None:
    """Prints medians, and the ratio to the variant with all layers."""
    for name, values in seconds.items():
        ratio = statistics.median(v / whole for v, whole in zip(values, seconds["all layers"], strict=True))
        print(f"{name:12} {what:10} {statistics.median(values) * 1e3:8.1f} ms   ratio {ratio:.2f}", flush=True)


def make_batch(num_sequences: int, num_tokens: int, num_layers: int) -> Batch:
    """Random routes of all tokens but the last of each sequence, and the columns that PPO's clipped loss reads."""
    total = num_sequences * num_tokens
    first_TL = np.random.default_rng(0).integers(0, NUM_EXPERTS, (total, num_layers))
    routes_TLK = (first_TL[..., None] + np.arange(EXPERTS_PER_TOKEN)) % NUM_EXPERTS
    columns = {name: torch.rand(total) for name in ("old_logprobs", "advantages", "loss_weights")}
    columns |= {
        "tokens": torch.arange(total),
        "loss_mask": torch.ones(total, dtype=torch.bool),
        "routed_experts": torch.from_numpy(routes_TLK.astype(np.uint8)),
        "routed": torch.arange(1, total + 1) % num_tokens > 0,
    }
    return Batch(torch.arange(0, total + 1, num_tokens), columns)


if __name__ == "__main__":
    asyncio.run(main())
