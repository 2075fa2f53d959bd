"""Cost of sending a batch to the ranks: bytes relative to the batch's size, time relative to a plain copy.

512 sequences of 4096 tokens with the columns of a training step go to 8 ranks: first to 8 data-parallel ranks, then to
4 replicas of 2 tensor-parallel ranks. Both ranks of a replica read the same part. The ranks are real Ray actors whose
worker only counts its tokens. All times are measured in one run.

    memcpy    numpy copies the batch's arrays into memory that is already mapped: the lower bound of any transfer
    copy      numpy copies them into new memory, whose pages the system has to map first, as in the object store
    gather    collects the sequences of each part
    put       gathers the parts and puts them into the object store
    dispatch  the whole call, until all ranks have answered

Run: python benchmarks/dispatch.py [--sequences 512] [--tokens 4096] [--ranks 8] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

from rl_core.batch import Batch
from rl_core.interfaces import Backend, ModelConfig, RankInfo, Worker, WorkerSpec
from rl_core.layout.mesh import Mesh
from rl_core.workers import MicroBatchLimits, WorkerGroup
from rl_core.workers.ray_ranks import _put


class NothingWorker(Worker):
    """Receives a part of the batch and returns its number of tokens."""

    def receive(self, batch: Batch, plan: Sequence[Sequence[int]]) -> int:
        return batch.num_tokens

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("there is no model")

    forward_backward = optim_step = export_weights = save_state = load_state = save_model = forward


@attrs.frozen
class NothingBackend(Backend):
    """A backend without a model; the `tensor` ranks of a replica receive the same part."""

    tensor: int
    name: str = "nothing"
    config_section: str = ""
    options_class: type = object

    def mesh(self, options: Any, world_size: int) -> Mesh:
        return Mesh(world_size=world_size, tensor=self.tensor)

    def validate(self, spec: WorkerSpec, world_size: int) -> None:
        pass

    def needs_own_process(self) -> bool:
        return True

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Any:
        return NothingWorker()


async def main() -> None:
    """Measures both arrangements of the ranks and prints bytes, milliseconds and ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    batch = make_batch(arguments.sequences, arguments.tokens)
    print(f"{batch.num_sequences} sequences × {arguments.tokens} tokens, {num_bytes(batch) / 1e6:.1f} MB")
    for tensor in (1, 2):
        await measure(batch, tensor, ranks=arguments.ranks, rounds=arguments.rounds)


async def measure(batch: Batch, tensor: int, *, ranks: int, rounds: int) -> None:
    """Measures one arrangement of the ranks and prints its bytes, times and ratios."""
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
    group = await WorkerGroup.launch(NothingBackend(tensor), spec, ranks_per_node=ranks, timeout_s=300)
    try:
        parts = group._parts(batch, MicroBatchLimits(max_sequences=8))
        from ray.experimental import get_local_object_locations

        readers = [(number, None) for number in range(len(parts))]
        refs = [ref for refs in _put(batch, parts, readers) for ref in refs]
        sent = sum(location["object_size"] for location in get_local_object_locations(refs).values())
        del refs
        ratio = sent / num_bytes(batch)
        print(f"\n{ranks // tensor} replicas of {tensor}: {sent / 1e6:.1f} MB sent, {ratio:.4f} of the batch")
        seconds: dict[str, list[float]] = {}
        memcpy = copier(batch)
        for i in range(rounds + 1):
            times = {
                "memcpy": timed(memcpy),
                "copy": timed(lambda: [values.clone() for values in batch.columns.values()]),
                "gather": timed(lambda: [len(batch.to_arrays(part.sent)) for part in parts]),
                "put": timed(lambda: _put(batch, parts, readers)),
            }
            start = time.perf_counter()
            received = await group._ranks.call_on_parts(NothingWorker.receive, batch, parts)
            times["dispatch"] = time.perf_counter() - start
            assert sum(tokens for tokens in received if tokens is not None) == batch.num_tokens
            for name, value in times.items():
                seconds.setdefault(name, []).extend([value] * (i > 0))
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        for name, value in medians.items():
            print(f"{name:10} {value * 1e3:8.1f} ms   {value / medians['memcpy']:6.2f}x memcpy")
    finally:
        await group.close()


def make_batch(num_sequences: int, num_tokens: int) -> Batch:
    """A batch with the columns that PPO's clipped loss reads."""
    total = num_sequences * num_tokens
    offsets = torch.arange(0, total + 1, num_tokens)
    columns = {name: torch.rand(total) for name in ("old_logprobs", "advantages", "loss_weights")}
    columns |= {"tokens": torch.arange(total), "loss_mask": torch.ones(total, dtype=torch.bool)}
    return Batch(offsets, columns)


def copier(batch: Batch) -> Callable[[], None]:
    """Returns a call that copies all arrays of the batch into memory that is already mapped."""
    arrays = {name: values.numpy() for name, values in batch.columns.items()}
    targets = {name: np.array(values) for name, values in arrays.items()}

    def memcpy() -> None:
        for name, values in arrays.items():
            np.copyto(targets[name], values)

    return memcpy


def num_bytes(batch: Batch) -> int:
    """Bytes of a batch's offsets and columns."""
    return sum(values.nbytes for values in (batch.offsets, *batch.columns.values()))


def timed(step: Callable[[], object]) -> float:
    """Seconds that the call takes."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


if __name__ == "__main__":
    asyncio.run(main())
