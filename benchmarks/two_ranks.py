"""A training step on two ranks compared with one rank on the same tokens, and its time by phase.

The model, loss and batch are those of `train_step.py`, with one thread per rank. One rank takes the whole batch; two
ranks (FSDP2 over gloo) take the parts that the planner assigns. At best, two ranks need half the time.

    forward      scoring, with all-gathers of the parameters
    backward     the backward pass, with further all-gathers and the reduce-scatter of the gradients
    optimizer    norm, clipping and AdamW
    rest         selecting the micro-batches, the loss
    collectives  total duration of the collectives in these phases, waits for the other rank included, measured in one
                 more step with torch's profiler

Two ranks on one machine share its memory bandwidth, and its cores if there are not enough. The time of the collectives
shows how much of the slowdown can be communication.

Run: python benchmarks/two_ranks.py [--tokens 8192] [--rounds 5]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import attrs
import torch
from torch.profiler import ProfilerActivity, profile
from train_step import MODEL, make_batch, spec_of
from transformers.utils import logging

from rl_core.interfaces import LossSpec, RankInfo
from rl_core.layout.packing import plan_micro_batches
from rl_core.rank_kit.process_group import JOINS_OPEN_STORE, open_store
from rl_fsdp import FsdpWorker
from rl_transformers.testing.models import make_checkpoint

PHASES = ("forward", "backward", "optimizer")
LOSS = LossSpec(name="cross_entropy")


@attrs.frozen(kw_only=True)
class Timing:
    """What one rank measured: seconds of each round, total seconds per phase, and seconds of one step's collectives."""

    steps: list[float]
    phases: dict[str, float]
    collectives: float


def main() -> None:
    """Prints milliseconds per step and the ratio of two ranks to one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    print(
        f"{arguments.tokens} tokens, {arguments.rounds} rounds, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    medians = []
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = make_checkpoint(Path(directory), **MODEL)
        for world_size in (1, 2):
            slowest = max(run(world_size, checkpoint, arguments), key=lambda timing: statistics.median(timing.steps))
            medians.append(statistics.median(slowest.steps))
            print(f"{world_size} rank(s) {medians[-1] * 1e3:8.0f} ms a step   {described(slowest)}", flush=True)
    print(f"two ranks need {medians[1] / medians[0]:.2f} of one rank's time (best: 0.50)")


def described(timing: Timing) -> str:
    """The phases' milliseconds per step, as text."""
    count = len(timing.steps)
    parts = {name: timing.phases[name] / count for name in PHASES}
    parts["rest"] = sum(timing.steps) / count - sum(parts.values())
    phases = "  ".join(f"{name} {seconds * 1e3:.0f}" for name, seconds in parts.items())
    return f"{phases}  (collectives {timing.collectives * 1e3:.0f})"


def run(world_size: int, checkpoint: Path, arguments: argparse.Namespace) -> list[Timing]:
    """Runs all ranks in new processes and returns their timings."""
    store = open_store()
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        info = RankInfo(rank=rank, world_size=world_size, local_rank=rank, master_port=store.port)
        processes.append(context.Process(target=train, args=(info, checkpoint, arguments, theirs)))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    timings = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return timings


def train(rank: RankInfo, checkpoint: Path, arguments: argparse.Namespace, answer: Connection) -> None:
    """Runs and times one rank's rounds, after one warm-up round."""
    os.environ.update(JOINS_OPEN_STORE)
    torch.set_num_threads(1)
    worker: Any = FsdpWorker(spec_of(checkpoint), rank)
    batch = make_batch(arguments.tokens)
    plans = plan_micro_batches(batch.lengths.numpy(), num_data_ranks=rank.world_size, max_tokens=arguments.tokens)
    plan = [micro_batch.tolist() for micro_batch in plans[rank.rank]]
    phases: defaultdict[str, float] = defaultdict(float)
    worker._score = timed(worker._score, phases, "forward")
    worker.shards.backward = timed(worker.shards.backward, phases, "backward")
    worker.optim_step = timed(worker.optim_step, phases, "optimizer")

    def step() -> float:
        started = time.perf_counter()
        worker.forward_backward(batch, plan, LOSS, temperature=1.0)
        worker.optim_step()
        return time.perf_counter() - started

    step()
    phases.clear()
    steps = [step() for _ in range(arguments.rounds)]
    measured = dict(phases)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step()
    collectives = sum(
        event.cpu_time_total for event in recorded.key_averages() if event.key.startswith(("gloo:", "nccl:"))
    )
    answer.send(Timing(steps=steps, phases=measured, collectives=collectives / 1e6))
    worker.close()


def timed(call: Callable[..., Any], seconds: defaultdict[str, float], name: str) -> Callable[..., Any]:
    """Wraps the call so that it adds its duration to `seconds[name]`."""

    def timed_call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = call(*args, **kwargs)
        seconds[name] += time.perf_counter() - started  # pyright: ignore[reportArgumentType]
        return result

    return timed_call


if __name__ == "__main__":
    main()
