"""Scoring and training times on several Megatron meshes compared with FSDP: same model, same batch.

Uses the Mixture-of-Experts model and the batch of `router_replay.py`, without router replay. The ranks of all meshes
are started first. Then, in each round, every mesh in turn scores the batch (log-probs and entropies) and makes one
optimizer step on it. Times are medians over the rounds, measured on the controller. With two free cores, two ranks need
at best half of one rank's time.

Run: python benchmarks/meshes.py [--tokens 4096] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import attrs
from router_replay import MODEL, make_batch, make_spec
from transformers.utils import logging

from rl_core import plugins
from rl_core.batch import Batch
from rl_core.interfaces import LossSpec, Worker
from rl_core.workers import MicroBatchLimits
from rl_megatron import MegatronOptions
from rl_transformers.testing.models import make_checkpoint
from rl_transformers.testing.ranks import PRELOADED, RankGroup

PRELOADED |= dict.fromkeys(["rl_megatron.rank.worker", "rl_fsdp.worker"])
LOSS = LossSpec(name="cross_entropy")
MESHES: dict[str, tuple[str, int, dict[str, int]]] = {
    "fsdp, 1 rank": ("fsdp", 1, {}),
    "megatron, 1 rank": ("megatron", 1, {}),
    "fsdp, 2 ranks": ("fsdp", 2, {}),
    "megatron, data 2": ("megatron", 2, {}),
    "megatron, tensor 2": ("megatron", 2, {"tensor_model_parallel_size": 2}),
    "megatron, pipeline 2": ("megatron", 2, {"pipeline_model_parallel_size": 2}),
    "megatron, context 2": ("megatron", 2, {"context_parallel_size": 2}),
    "megatron, expert 2": ("megatron", 2, {"expert_model_parallel_size": 2}),
}
"""Backend, ranks, `megatron_config`."""


def main() -> None:
    """Prints milliseconds per mesh, and ratios to FSDP on the same number of ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    batch = make_batch(arguments.tokens).without_columns("routed_experts", "routed")
    print(
        f"{batch.num_tokens} tokens, {arguments.rounds} rounds, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = make_checkpoint(Path(directory) / "model", **MODEL)
        groups = {name: start(checkpoint, Path(directory), *mesh) for name, mesh in MESHES.items()}
        seconds = measure(groups, batch, MicroBatchLimits(max_tokens=1024), arguments.rounds)
        for group in groups.values():
            group.close()
    for name, (scoring, training) in seconds.items():
        beside = seconds["fsdp, 1 rank" if MESHES[name][1] == 1 else "fsdp, 2 ranks"]
        print(
            f"{name:22} scoring {scoring * 1e3:6.0f} ms, ratio {scoring / beside[0]:.2f}   "
            f"training {training * 1e3:6.0f} ms, ratio {training / beside[1]:.2f}"
        )


def start(checkpoint: Path, directory: Path, backend_name: str, num_ranks: int, mesh: dict[str, Any]) -> RankGroup:
    """Starts the ranks of one mesh."""
    backend: Any = plugins.load("rl_core.backends", backend_name)
    options = MegatronOptions(**mesh) if backend_name == "megatron" else backend.options_class()
    spec = attrs.evolve(make_spec(checkpoint), options=options, num_threads=1)
    return RankGroup(backend, spec, num_ranks, directory=directory, timeout_s=300)


def measure(
    groups: dict[str, RankGroup], batch: Batch, limits: MicroBatchLimits, rounds: int
) -> dict[str, tuple[float, float]]:
    """Median seconds of scoring and of training per mesh; the meshes alternate, and the first round is not counted."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in groups}
    for number in range(rounds + 1):
        for name, group in groups.items():
            started = time.perf_counter()
            group.forward(batch, limits, temperature=1.0)
            scored = time.perf_counter()
            group.forward_backward(batch, limits, LOSS, temperature=1.0)
            group.call(Worker.optim_step)
            if number:
                seconds[name].append((scored - started, time.perf_counter() - scored))
    return {
        name: (statistics.median(row[0] for row in rows), statistics.median(row[1] for row in rows))
        for name, rows in seconds.items()
    }


if __name__ == "__main__":
    main()
