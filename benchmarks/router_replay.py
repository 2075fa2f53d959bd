"""Router replay with the Megatron backend: time and load of the experts on one rank, and bytes of routes on 16 ranks.

The model is a Mixture-of-Experts Qwen3 in float32 with 16 experts, 4 of them per token.

    time     of a forward and backward pass in which the routers follow the batch's routes, divided by the time with
             Megatron's own routing; both alternate on one model; median of the rounds' ratios
    bytes    bytes of routes per rank, mean over 16 ranks (tensor 2, pipeline 2, context 2, data 2): the bytes that
             arrive with the rank's part of the batch, the bytes that move to its device, and the minimum, which is the
             bytes of its own tokens and layers
    load     tokens of the fullest expert divided by the mean over all experts, in the worst layer. Padding counts; in
             one row it is spread evenly over the experts, in the other the router chooses its experts. The batch is one
             rectangle of sequences of very different lengths, so most of it is padding

Run: python benchmarks/router_replay.py [--tokens 4096] [--rounds 7] [--threads 1]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from transformers.utils import logging

from rl_core.batch import Batch
from rl_core.interfaces import LossSpec, ModelConfig, OptimizerConfig, RankInfo, WorkerSpec
from rl_core.layout import Mesh, layers_in, packed_layout, pipeline_chunks, plan_micro_batches, rank_positions
from rl_megatron import MegatronOptions, megatron
from rl_megatron.rank.route_layout import router_order
from rl_transformers.testing.models import make_checkpoint

NUM_LAYERS, NUM_EXPERTS, EXPERTS_PER_TOKEN = 4, 16, 4
MODEL: dict[str, Any] = {
    "family": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": EXPERTS_PER_TOKEN,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
}
MESH = Mesh(world_size=16, tensor=2, pipeline=2, context=2)


def main() -> None:
    """Prints the tables of bytes, time and load."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.disable_progress_bar()
    batch = make_batch(arguments.tokens)
    print(f"{batch.num_tokens} tokens in {batch.num_sequences} sequences, {arguments.threads} thread(s)")
    show_bytes(batch)
    with tempfile.TemporaryDirectory() as directory:
        spec = make_spec(make_checkpoint(Path(directory), **MODEL))
        worker: Any = megatron.create_worker(spec, RankInfo())
        show_time(worker, batch, arguments.rounds)
        show_load(worker, batch)
        worker.close()


def make_batch(num_tokens: int) -> Batch:
    """Sequences of 16 to 1024 tokens with random routes for all layers."""
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        lengths.append(int(np.exp(rng.uniform(np.log(16), np.log(1024)))))
    sequences = []
    for length in lengths:
        mask = np.arange(length) >= length // 3
        routes = rng.random((length, NUM_LAYERS, NUM_EXPERTS)).argsort(-1)[..., :EXPERTS_PER_TOKEN]
        sequences.append(
            {
                "tokens": rng.integers(0, MODEL["vocab_size"], length),
                "loss_mask": mask,
                "loss_weights": mask / max(1, mask.sum()),
                "routed_experts": routes,
                "routed": np.arange(length) < length - 1,
            }
        )
    return Batch.from_sequences(sequences)


def make_spec(checkpoint: Path) -> WorkerSpec:
    """A spec for one float32 rank."""
    return WorkerSpec(
        role="policy",
        model=ModelConfig(path=str(checkpoint)),
        optimizer=OptimizerConfig(lr=1e-4),
        options=MegatronOptions(moe_enable_routing_replay=True),
        bf16=False,
        gradient_checkpointing=False,
        use_sample_packing=True,
        logprobs_chunk_size=1024,
        total_optimizer_steps=None,
        seed=0,
    )


def show_bytes(batch: Batch) -> None:
    """Prints the mean route bytes per rank, and ratios to the minimum; counted for one layout of the batch."""
    row_bytes = EXPERTS_PER_TOKEN * batch["routed_experts"].element_size()
    chunks = pipeline_chunks(NUM_LAYERS, MESH.pipeline)
    lengths, offsets = batch.lengths.numpy(), batch.offsets.numpy()
    plan = plan_micro_batches(
        lengths, num_data_ranks=MESH.data, max_tokens=2048, sequence_multiple=MESH.sequence_multiple
    )
    arrives, moves, least = [], [], []
    for rank in range(MESH.world_size):
        at = MESH.coordinates(rank)
        num_layers = len(layers_in(chunks[at.pipeline], np.arange(NUM_LAYERS)))
        seen = [rows_seen(offsets, sequences, rank) for sequences in plan[at.data]]
        arrives.append(sum(int(lengths[s].sum()) for s in plan[at.data]) * num_layers * row_bytes)
        moves.append(sum(len(index) for index in seen) * num_layers * row_bytes)
        least.append(sum(int((index >= 0).sum()) for index in seen) * num_layers * row_bytes)
    names = {"arrives with the batch": arrives, "moves to the device": moves, "the least": least}
    print("\nbytes of routes per rank, mean over ranks")
    for name, values in names.items():
        print(f"{name:30} {statistics.mean(values):12,.0f}   ratio {sum(values) / sum(least):.2f}")


def rows_seen(offsets: np.ndarray, sequences: np.ndarray, rank: int) -> np.ndarray:
    """The stream indices of a micro-batch that a rank's routers see, in the routers' order; -1 for padding."""
    layout = packed_layout(
        offsets,
        sequences,
        sequence_multiple=MESH.sequence_multiple,
        total_multiple=MESH.micro_batch_tokens_multiple(),
    )
    held = layout.index[rank_positions(layout.boundaries, MESH, rank)]
    return router_order(held[None], MESH.coordinates(rank).tensor, MESH.tensor)


def show_time(worker: Any, batch: Batch, rounds: int) -> None:
    """Prints the median times and the median of the rounds' ratios. A ratio within a round is least affected by other
    processes on the machine."""
    plan = plan_micro_batches(batch.lengths.numpy(), num_data_ranks=1, max_tokens=2048)[0]
    micro_batches = [m.tolist() for m in plan]
    loss = LossSpec(name="cross_entropy")

    def replayed() -> None:
        worker.forward_backward(batch, micro_batches, loss, temperature=1.0)

    plain_batch = batch.without_columns("routed_experts", "routed")

    def plain() -> None:
        with without_replay(worker):
            worker.forward_backward(plain_batch, micro_batches, loss, temperature=1.0)

    seconds = alternate({"plain routers": plain, "replay": replayed}, rounds)
    print("\nforward and backward")
    for name, values in seconds.items():
        ratio = statistics.median(v / base for v, base in zip(values, seconds["plain routers"], strict=True))
        print(f"{name:30} {statistics.median(values) * 1e3:9.0f} ms   ratio {ratio:.3f}", flush=True)


@contextmanager
def without_replay(worker: Any) -> Iterator[None]:
    """Disables router replay within the context: Megatron's routers choose the experts."""
    from megatron.core.transformer.moe.router import TopKRouter

    from rl_megatron.rank.schedule import Around

    class Off:
        around = Around()

        def require(self, batch: Batch) -> None:
            pass

    routing = worker.routing
    routers = [m for chunk in worker.chunks for m in chunk.modules() if isinstance(m, TopKRouter)]
    choices = [router.router_replay for router in routers]
    worker.routing = Off()
    for router in routers:
        router.router_replay = None
    try:
        yield
    finally:
        worker.routing = routing
        for router, choice in zip(routers, choices, strict=True):
            router.router_replay = choice


def show_load(worker: Any, batch: Batch) -> None:
    """Prints the experts' load on a rectangle of the batch's sequences; real tokens follow the router."""
    worker.spec = attrs.evolve(worker.spec, use_sample_packing=False)
    worker.routing._records_scoring = True
    chunks = worker.routing._chunks
    tokens = batch.without_columns("routed_experts", "routed")
    num_places = int(batch.lengths.max()) * batch.num_sequences
    print(f"\nexperts' load, fullest over mean, worst layer ({1 - batch.num_tokens / num_places:.0%} padding)")
    dealt = chunks._padding_experts
    for name, padding_experts in (("dealt", dealt), ("left to the router", lambda is_padding_S: None)):
        chunks._padding_experts = padding_experts
        worker.forward(tokens, [list(range(batch.num_sequences))], temperature=1.0)
        loads = [torch.bincount(c.recorded[0].flatten(), minlength=NUM_EXPERTS).float() for c in chunks._all]
        print(f"{name:30} {max(float(load_E.max() / load_E.mean()) for load_E in loads):9.2f}")
    chunks._padding_experts = dealt


def alternate(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds per step, in every round but the first; the steps alternate."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return seconds


if __name__ == "__main__":
    main()
