"""Load balance of sequences over ranks, and planning time.

Lengths are log-normal like those of reasoning responses (median 2,000 tokens, cut at 32,768). `worst/mean` is the load
of the most loaded rank divided by the mean load: at 1.05, a rank with the mean load waits 5 % of its computing time.
`bound` is an upper bound on this ratio for the balancing partitions: 1 + largest cost / mean load. In the table of
plans, `micro-batches` is the number of micro-batches per rank, and `fewest` is a lower bound on this number: the tokens
(or sequences) of all ranks divided by the ranks and by the limit of a micro-batch, rounded up.

Run: python benchmarks/layout.py
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import numpy as np

from rl_core.layout import (
    Mesh,
    equal_count_partition,
    flop_cost,
    greedy_partition,
    karmarkar_karp_partition,
    packed_layout,
    part_sums,
    plan_micro_batches,
    rank_positions,
)

MAX_TOKENS = 32_768
BUDGET_S = 2.0


def random_lengths(num_sequences: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.clip(rng.lognormal(np.log(2000), 1.0, num_sequences), 16, MAX_TOKENS).astype(np.int64)


def contiguous_partition(costs_N: np.ndarray, num_parts: int) -> np.ndarray:
    """Splits the sequences, in order, into contiguous parts whose counts differ by at most one: the baseline without
    balancing."""
    return np.arange(len(costs_N)) * num_parts // len(costs_N)


def compare_partitions() -> None:
    print(f"{'sequences':>9} {'ranks':>5} {'cost':>6} {'partition':<26} {'worst/mean':>10} {'bound':>8} {'seconds':>8}")
    for num_sequences, num_ranks in ((256, 8), (1024, 64), (4096, 64), (4096, 512), (100_000, 512)):
        lengths_N = random_lengths(num_sequences)
        # A model of 7 billion parameters, 32 layers of width 4096.
        flops_N = flop_cost(lengths_N, hidden_size=4096, num_layers=32, num_parameters=7_000_000_000)
        for name, costs_N in (("tokens", lengths_N), ("FLOPs", flops_N)):
            for partition in (contiguous_partition, equal_count_partition, greedy_partition, karmarkar_karp_partition):
                start = time.perf_counter()
                part_N = partition(costs_N, num_ranks)
                seconds = time.perf_counter() - start
                loads = part_sums(costs_N, part_N, num_ranks)
                worst, bound = loads.max() / loads.mean(), 1 + costs_N.max() / loads.mean()
                guarantee = "none" if partition is contiguous_partition else f"{bound:8.4f}"
                row = f"{num_sequences:>9} {num_ranks:>5} {name:>6} {partition.__name__:<26}"
                print(f"{row} {worst:10.4f} {guarantee:>8} {seconds:8.3f}")


def time_plans() -> float:
    """Seconds of the slowest plan of 100,000 sequences on 512 data-parallel ranks."""
    lengths_N = random_lengths(100_000)
    slowest = 0.0
    print(f"\n{'100k sequences, 512 ranks':<42} {'micro-batches':>13} {'fewest':>7} {'worst/mean':>10} {'seconds':>8}")
    cases: list[dict[str, Any]] = [
        {"max_tokens": MAX_TOKENS},
        {"max_tokens": MAX_TOKENS, "multiple": 8},
        {"max_tokens": 2 * MAX_TOKENS, "sequence_multiple": 32},
        {"max_sequences": 4},
    ]
    for options in cases:
        start = time.perf_counter()
        plan = plan_micro_batches(lengths_N, num_data_ranks=512, **options)
        seconds = time.perf_counter() - start
        loads = np.array([sum(lengths_N[m].sum() for m in rank) for rank in plan])
        total = len(lengths_N) if "max_sequences" in options else int(lengths_N.sum())
        fewest = math.ceil(total / 512 / (options.get("max_sequences") or options["max_tokens"]))
        name = ", ".join(f"{key}={value}" for key, value in options.items())
        print(f"{name:<42} {len(plan[0]):>13} {fewest:>7} {loads.max() / loads.mean():10.4f} {seconds:8.3f}")
        slowest = max(slowest, seconds)
    return slowest


def time_indices() -> None:
    """Times how one rank computes its index arrays for 64 packed sequences, with context and Ulysses parallelism."""
    lengths_N = random_lengths(64)
    mesh = Mesh(world_size=64, tensor=4, context=4, sequence=2)
    offsets = np.concatenate([[0], np.cumsum(lengths_N)])
    start = time.perf_counter()
    layout = packed_layout(
        offsets,
        np.arange(64),
        sequence_multiple=mesh.sequence_multiple,
        total_multiple=mesh.micro_batch_tokens_multiple(),
    )
    positions = rank_positions(layout.boundaries, mesh, 13)
    seconds = time.perf_counter() - start
    padding = 1 - lengths_N.sum() / len(layout.index)
    print(
        f"\nindices of one micro-batch of {len(layout.index):,} tokens, {padding:.2%} padding: {seconds * 1e3:.1f} ms"
    )
    print(f"tensor 4 × context 4 × Ulysses 2: {len(positions):,} tokens enter the model on each rank")


def main() -> int:
    compare_partitions()
    slowest = time_plans()
    time_indices()
    print(f"\nslowest plan: {slowest:.2f} s, allowed {BUDGET_S:.0f} s")
    return 0 if slowest < BUDGET_S else 1


if __name__ == "__main__":
    sys.exit(main())
