"""A group's prompt computed once (`shared`), compared with once per sample (`apart`).

A 20M-parameter Qwen3 in float32; 16 samples of a prompt of 2,048 tokens, each with 256 trained tokens; the Worker's
forward and backward. With sharing, all samples are one micro-batch. Without it, micro-batches have four samples or one,
and sharing is compared with the faster of the two. The memory of all 16 samples in one micro-batch without sharing,
about 14 GB, is measured first. Each variant runs in its own process and the variants alternate. Times are processor
seconds, which other load on the machine affects less.

The ratio of floating-point operations is the upper bound of the speedup. It counts the layers' matrix products per
computed token, the output layer per trained token, and attention per pair of a query and a key that the query sees.

Run: python benchmarks/shared_prefixes.py [--samples 16] [--prompt 2048] [--answer 256] [--rounds 3]
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rl_core.batch import Batch
from rl_core.interfaces import LossSpec, ModelConfig, OptimizerConfig, RankInfo, WorkerSpec
from rl_core.layout.prefixes import input_cells, prefix_blocks, prefix_forest, separate_sequences
from rl_transformers.testing.models import make_checkpoint

MODEL = {
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
}


def main() -> None:
    """Prints seconds, and ratios of time, operations and memory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    sizes = (args.samples, args.prompt, args.answer)
    with tempfile.TemporaryDirectory() as directory:
        path = str(make_checkpoint(Path(directory) / "model", **MODEL))
        whole = Side(path, sizes, args.samples, share_prefixes=False)
        whole_peak = whole.peak_bytes()
        at_once = {"shared": args.samples, "apart by 4": 4, "apart by 1": 1}
        sides = {name: Side(path, sizes, count, share_prefixes=name == "shared") for name, count in at_once.items()}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(args.rounds):
            for name, side in sides.items():
                seconds[name].append(side.step())
        peaks = {name: side.peak_bytes() for name, side in sides.items()}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    time_ratio = min(medians[name] for name in sides if name != "shared") / medians["shared"]
    flop_ratio = operations(sizes, share_prefixes=False) / operations(sizes, share_prefixes=True)
    for name in sides:
        print(f"{name:10} {medians[name]:7.2f} processor seconds, at most {peaks[name] / 2**20:6.0f} MiB")
    print(f"time: fastest `apart` over `shared`        {time_ratio:.2f}")
    print(
        f"operations: `apart` over `shared`          {flop_ratio:.2f}; fraction reached: {time_ratio / flop_ratio:.2f}"
    )
    print(f"memory: `shared` over `apart`, all samples in one micro-batch {peaks['shared'] / whole_peak:.2f}")


class Side:
    """A worker in its own process."""

    def __init__(self, path: str, sizes: tuple[int, int, int], at_once: int, *, share_prefixes: bool):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, path, sizes, at_once, share_prefixes), daemon=True)
        self._process.start()
        theirs.close()  # so that waiting for an answer fails once the process has ended
        self.step()  # warms up

    def step(self) -> float:
        """Processor seconds of one forward and backward pass."""
        return self._ask("step")

    def peak_bytes(self) -> float:
        """Ends the process and returns its peak memory beyond what it used before its first step."""
        peak = self._ask("peak")
        self._process.join()
        return peak

    def _ask(self, what: str) -> float:
        self._connection.send(what)
        return self._connection.recv()


def _serve(connection: Connection, path: str, sizes: tuple[int, int, int], at_once: int, share_prefixes: bool) -> None:
    from rl_fsdp import FsdpOptions, FsdpWorker

    torch.set_num_threads(1)
    spec = WorkerSpec(
        role="policy",
        model=ModelConfig(path=path),
        optimizer=OptimizerConfig(lr=1e-4),
        options=FsdpOptions(),
        bf16=False,
        gradient_checkpointing=False,
        use_sample_packing=True,
        share_prefixes=share_prefixes,
        logprobs_chunk_size=1024,
        total_optimizer_steps=None,
        seed=0,
    )
    worker, batch = FsdpWorker(spec, RankInfo()), group_of_samples(*sizes)
    order = range(batch.num_sequences)
    plan = [list(order[first : first + at_once]) for first in range(0, batch.num_sequences, at_once)]
    loss = LossSpec(name="ppo_clip")
    before = _most_bytes()
    while True:
        if connection.recv() == "peak":
            connection.send(_most_bytes() - before)
            return
        began = time.process_time()
        worker.forward_backward(batch, plan, loss, temperature=1.0)
        connection.send(time.process_time() - began)


def _most_bytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def group_of_samples(num_samples: int, prompt: int, answer: int) -> Batch:
    """A group of samples of one prompt, with random tokens and advantages."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = MODEL["vocab_size"]
    prompt_T = torch.randint(vocabulary, (prompt,), generator=generator)
    mask_T = torch.arange(prompt + answer) >= prompt
    columns: dict[str, Any] = {
        "sampled": mask_T,
        "loss_mask": mask_T,
        "old_logprobs": torch.full((prompt + answer,), -9.0),
        "loss_weights": mask_T / (answer * num_samples),
    }
    return Batch.from_sequences(
        [
            {
                "tokens": torch.cat([prompt_T, torch.randint(vocabulary, (answer,), generator=generator)]),
                "advantages": torch.full((prompt + answer,), 1.0 - 2.0 * (i % 2)),
                **columns,
            }
            for i in range(num_samples)
        ]
    )


def operations(sizes: tuple[int, int, int], *, share_prefixes: bool) -> float:
    """Multiply-adds of a forward pass. A backward pass needs twice as many, whether or not prefixes are shared."""
    batch = group_of_samples(*sizes)
    offsets, tokens_T = batch.offsets.numpy(), batch["tokens"].numpy()
    forest = prefix_forest(offsets, tokens_T) if share_prefixes else separate_sequences(offsets)
    cells = input_cells(forest, offsets)
    blocks = prefix_blocks(cells.length_M, cells.parent_M)
    pairs = float((cells.length_M * (cells.length_M + 1) / 2).sum())
    pairs += float((blocks.query_length_B * blocks.key_length_B).sum())
    hidden, heads = MODEL["hidden_size"], MODEL["num_attention_heads"] * MODEL["head_dim"]
    key_heads = MODEL["num_key_value_heads"] * MODEL["head_dim"]
    per_token = hidden * (2 * heads + 2 * key_heads + 3 * MODEL["intermediate_size"])
    layers = MODEL["num_hidden_layers"] * (per_token * len(cells.index_C) + 2 * heads * pairs)
    return layers + hidden * MODEL["vocab_size"] * int(batch["loss_mask"].sum())


if __name__ == "__main__":
    main()
