"""Training step of a policy on one GPU with `FsdpWorker`: tokens per second, MFU and peak memory.

The models have the shapes of Qwen2.5 0.5B and 3B and random weights. Sequences have 4,096 tokens, of which the first
eighth is the prompt, and are packed into micro-batches of 32,768 tokens. The worker uses bfloat16 with float32
parameters, gradient checkpointing, variable-length attention, log-probs in chunks, the PPO-clip loss and AdamW. One
step trains on one mini-batch: `forward_backward` over all its micro-batches, then `optim_step`.

MFU is the number of floating-point operations per second divided by the device's dense bfloat16 peak. Each token
counts as 6 operations per parameter of the layers' weight matrices, plus 6 · layers · hidden size · length for causal
attention. A trained token also counts as 6 operations per parameter of the output layer. Recomputation is not counted.

Run: python benchmarks/gpu_train_step.py [--model 0.5B] [--micro-batches 2] [--steps 5]
--tiny runs the same code on a tiny model, also without CUDA. Its times say nothing about real models.
"""

from __future__ import annotations

import datetime
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import attrs
import click
import torch
from transformers.utils import logging

from rl_core.batch import Batch
from rl_core.interfaces import LossSpec, ModelConfig, OptimizerConfig, RankInfo, WorkerSpec
from rl_fsdp import FsdpOptions, FsdpWorker
from rl_transformers.testing.models import make_checkpoint


@attrs.frozen(kw_only=True)
class Shape:
    """Sizes of a model, its sequences and its micro-batches."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int = 151_936
    sequence_tokens: int = 4096
    micro_batch_tokens: int = 32_768

    @property
    def matrix_parameters(self) -> int:
        """Number of parameters in the weight matrices of all layers, without embedding and output layer."""
        kv = self.hidden * self.kv_heads // self.heads
        return self.layers * (2 * self.hidden * (self.hidden + kv) + 3 * self.hidden * self.intermediate)


SHAPES = {
    "0.5B": Shape(hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2),
    "3B": Shape(hidden=2048, intermediate=11_008, layers=36, heads=16, kv_heads=2),
}
TINY = Shape(
    hidden=64,
    intermediate=128,
    layers=2,
    heads=4,
    kv_heads=2,
    vocabulary=512,
    sequence_tokens=64,
    micro_batch_tokens=256,
)
PEAK_TFLOPS = {
    "H200 NVL": 835.5,
    "H200": 989.0,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "B200": 2250.0,
}
"""The manufacturers' dense bfloat16 peaks. The first key that is part of the device's name applies."""
PROMPT = 1 / 8
LOSS = LossSpec(name="regular", params={"eps_clip_low": 0.2, "eps_clip_high": 0.2})


@click.command()
@click.option("--model", "names", multiple=True, type=click.Choice(list(SHAPES)), help="Default: all.")
@click.option("--micro-batches", default=2, show_default=True, help="Micro-batches per step.")
@click.option("--steps", default=5, show_default=True, help="Measured steps, after two warm-up steps.")
@click.option("--chunk-tokens", default=4096, show_default=True, help="Tokens per chunk of logits.")
@click.option("--peak-tflops", type=float, help="Dense bfloat16 peak of a device that is not in PEAK_TFLOPS.")
@click.option("--tiny", is_flag=True, help="Run a tiny model, on the CPU if there is no GPU.")
def main(
    names: tuple[str, ...], micro_batches: int, steps: int, chunk_tokens: int, peak_tflops: float | None, tiny: bool
) -> None:
    """Measures the models and prints one line for each."""
    if not torch.cuda.is_available() and not tiny:
        print("skipped: needs CUDA (torch.cuda.is_available() is False); --tiny checks the code without measuring")
        return
    logging.disable_progress_bar()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    print(f"{datetime.date.today()}, {device}, {versions}, Python {sys.version.split()[0]}")
    peak_tflops = peak_tflops or next((peak for name, peak in PEAK_TFLOPS.items() if name in device), None)
    for name in ["tiny"] if tiny else names or tuple(SHAPES):
        shape = TINY if tiny else SHAPES[name]
        print(f"{name:>5}  {measured(shape, micro_batches, steps, chunk_tokens, peak_tflops)}", flush=True)


def measured(shape: Shape, micro_batches: int, steps: int, chunk_tokens: int, peak_tflops: float | None) -> str:
    """Trains for two warm-up steps and `steps` measured ones; returns the results as one line."""
    is_cuda = torch.cuda.is_available()
    batch, plan = make_batch(shape, micro_batches)
    with tempfile.TemporaryDirectory() as directory:
        worker = make_worker(make_model(shape, Path(directory)), chunk_tokens)
    seconds = []
    for step in range(steps + 2):
        if is_cuda and step == 2:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        worker.forward_backward(batch, plan, LOSS, temperature=1.0)
        worker.optim_step()
        if is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    memory = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB peak" if is_cuda else "memory not measured"
    num_parameters = sum(weight.numel() for weight in worker.scorer.parameters())
    worker.close()
    median = statistics.median(seconds[2:])
    tflops = floating_point_operations(shape, batch) / median / 1e12
    mfu = (
        f"MFU {tflops / peak_tflops:.1%} of {peak_tflops:g} TFLOP/s"
        if peak_tflops
        else "MFU unknown (set --peak-tflops)"
    )
    return (
        f"{num_parameters / 1e6:.0f}M parameters, {batch.num_tokens} tokens a step: {median * 1e3:.0f} ms "
        f"({min(seconds[2:]) * 1e3:.0f} to {max(seconds[2:]) * 1e3:.0f}), {batch.num_tokens / median:.0f} tokens/s, "
        f"{tflops:.1f} TFLOP/s, {mfu}, {memory}"
    )


def floating_point_operations(shape: Shape, batch: Batch) -> float:
    """Operations of one forward and backward pass over the batch, counted as the module's docstring says."""
    matrices = 6 * shape.matrix_parameters * batch.num_tokens
    output = 6 * shape.hidden * shape.vocabulary * int(batch["loss_mask"].sum())
    attention = 6 * shape.layers * shape.hidden * shape.sequence_tokens * batch.num_tokens
    return float(matrices + output + attention)


def make_model(shape: Shape, directory: Path) -> Path:
    """Writes a checkpoint with random weights. Embedding and output layer are tied, as in Qwen2.5 0.5B and 3B."""
    return make_checkpoint(
        directory,
        family="qwen2",
        dtype="bfloat16",
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=shape.sequence_tokens,
        initializer_range=0.02,
    )


def make_worker(checkpoint: Path, chunk_tokens: int) -> FsdpWorker:
    """A policy worker for `trainer.bf16=true`, with sequence packing and gradient checkpointing."""
    spec = WorkerSpec(
        role="policy",
        model=ModelConfig(path=str(checkpoint)),
        optimizer=OptimizerConfig(lr=1e-6),
        options=FsdpOptions(),
        bf16=True,
        gradient_checkpointing=True,
        use_sample_packing=True,
        logprobs_chunk_size=chunk_tokens,
        total_optimizer_steps=None,
        seed=0,
    )
    return FsdpWorker(spec, RankInfo())


def make_batch(shape: Shape, micro_batches: int) -> tuple[Batch, list[list[int]]]:
    """Sequences of equal length with the columns that the loss reads, and the sequences of each micro-batch."""
    generator = torch.Generator().manual_seed(0)
    length, per_micro_batch = shape.sequence_tokens, shape.micro_batch_tokens // shape.sequence_tokens
    sampled_T = torch.arange(length) >= int(PROMPT * length)
    batch = Batch.from_sequences(
        [
            {
                "tokens": torch.randint(shape.vocabulary, (length,), generator=generator),
                "sampled": sampled_T,
                "loss_mask": sampled_T,
                "old_logprobs": torch.full((length,), -12.0),
                "advantages": torch.randn((), generator=generator).expand(length),
            }
            for _ in range(micro_batches * per_micro_batch)
        ]
    )
    weights_T = batch["loss_mask"].float() / batch["loss_mask"].sum()
    order = range(batch.num_sequences)
    plan = [list(order[i : i + per_micro_batch]) for i in range(0, batch.num_sequences, per_micro_batch)]
    return batch.with_columns(loss_weights=weights_T), plan


if __name__ == "__main__":
    main()
