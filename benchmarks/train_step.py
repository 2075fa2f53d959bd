"""The Worker's training step compared with plain transformers on the same tokens.

A 20M-parameter Qwen3 in float32, sequences of 64 to 1024 tokens, cross-entropy on the last two thirds of each; forward,
backward, clipping and fused AdamW. There are two baselines in optimized plain transformers code:

    rectangles   sequences of similar length as right-padded batches, at most 20 % of the cells padding
    one stream   transformers' own packing: one row, positions that restart, a T×T mask

Both apply the output layer to trained tokens only, as the Worker does.

A ratio is a baseline's time divided by the Worker's: above 1 the Worker is faster. Worker and rectangles alternate, and
their medians are compared. The one stream is timed once, at the end: its mask makes it many times slower.

The log-probs alone, forward and backward, are timed too, both chunked as in the Worker and from full logits. Their
times are printed as shares of the Worker's step.

Run: python benchmarks/train_step.py [--tokens 8192] [--rounds 5] [--threads 1]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from rl_core.algorithms.logprobs import chunked_logprobs, full_logprobs
from rl_core.batch import Batch
from rl_core.interfaces import LossSpec, ModelConfig, OptimizerConfig, RankInfo, WorkerSpec
from rl_fsdp import FsdpOptions, FsdpWorker
from rl_transformers.testing.models import make_checkpoint

MODEL = {
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
}
CHUNK_TOKENS = 1024
OPTIMIZER = OptimizerConfig(lr=1e-4)

Step = Callable[[], object]


def main() -> None:
    """Prints milliseconds and ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.disable_progress_bar()
    batch = make_batch(arguments.tokens)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = make_checkpoint(Path(directory), **MODEL)
        worker = FsdpWorker(spec_of(checkpoint), RankInfo())
        steps = {
            "worker": lambda: worker_step(worker, batch),
            "transformers, rectangles": bare_step(checkpoint, rectangles_of(batch)),
        }
        one_stream = bare_step(checkpoint, [stream_of(batch)])
    num_parameters = sum(weight.numel() for weight in worker.scorer.parameters())
    print(
        f"{num_parameters / 1e6:.1f}M parameters, {batch.num_tokens} tokens in {batch.num_sequences} sequences, "
        f"{int(batch['loss_mask'].sum())} trained tokens, {arguments.threads} thread(s)"
    )
    seconds = alternate(steps, arguments.rounds)
    for name, value in seconds.items():
        print(f"{name:30} {value * 1e3:9.0f} ms   ratio {value / seconds['worker']:.3f}", flush=True)
    for name, value in alternate(logprob_steps(int(batch["loss_mask"].sum())), arguments.rounds).items():
        print(f"{name:30} {value * 1e3:9.0f} ms   {value / seconds['worker']:.1%} of the worker's step", flush=True)
    started = time.perf_counter()
    one_stream()
    value = time.perf_counter() - started
    print(f"{'transformers, one stream':30} {value * 1e3:9.0f} ms   ratio {value / seconds['worker']:.3f}")


def make_batch(num_tokens: int) -> Batch:
    """Sequences of 64 to 1024 tokens (the last may be shorter) with token-mean loss weights; the first third of each is
    its prompt."""
    generator = torch.Generator().manual_seed(0)
    sequences, rest = [], num_tokens
    while rest > 0:
        length = min(rest, int(2 ** (6 + 4 * torch.rand((), generator=generator).item())))
        mask_T = torch.arange(length) >= max(1, length // 3)
        tokens_T = torch.randint(MODEL["vocab_size"], (length,), generator=generator)
        sequences.append({"tokens": tokens_T, "sampled": mask_T, "loss_mask": mask_T})
        rest -= length
    batch = Batch.from_sequences(sequences)
    return batch.with_columns(loss_weights=batch["loss_mask"].float() / batch["loss_mask"].sum())


def spec_of(checkpoint: Path) -> WorkerSpec:
    """A spec for a packed float32 policy."""
    return WorkerSpec(
        role="policy",
        model=ModelConfig(path=str(checkpoint)),
        optimizer=OPTIMIZER,
        options=FsdpOptions(),
        bf16=False,
        gradient_checkpointing=False,
        use_sample_packing=True,
        logprobs_chunk_size=CHUNK_TOKENS,
        total_optimizer_steps=None,
        seed=0,
    )


def worker_step(worker: FsdpWorker, batch: Batch) -> None:
    """Trains the whole mini-batch as one micro-batch, entropy metric included."""
    worker.forward_backward(batch, [range(batch.num_sequences)], LossSpec(name="cross_entropy"), temperature=1.0)
    worker.optim_step()


def rectangles_of(batch: Batch) -> list[tuple[dict[str, Tensor], Tensor, Tensor]]:
    """Right-padded batches: (model input, cells that predict a trained token, targets)."""
    by_length = sorted(range(batch.num_sequences), key=lambda i: -int(batch.lengths[i]))
    groups: list[list[int]] = []
    for i in by_length:
        if groups and batch.lengths[i] >= 0.8 * batch.lengths[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    rectangles = []
    for group in groups:
        rows = batch.select(group)
        width = int(rows.lengths.max())
        cell_T = torch.cat([row * width + torch.arange(int(length)) for row, length in enumerate(rows.lengths)])
        tokens_BL = (
            torch.zeros(len(group) * width, dtype=torch.int64).index_copy_(0, cell_T, rows["tokens"]).view(-1, width)
        )
        trained_S = rows["loss_mask"].nonzero().squeeze(1)
        # Causal attention never sees padding on the right, so no mask is needed, and SDPA takes its fastest path.
        rectangles.append(({"input_ids": tokens_BL}, cell_T[trained_S] - 1, rows["tokens"][trained_S]))
    return rectangles


def stream_of(batch: Batch) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """All sequences in one row; transformers finds the sequence boundaries by the positions."""
    positions_T = torch.cat([torch.arange(int(length)) for length in batch.lengths])
    trained_S = batch["loss_mask"].nonzero().squeeze(1)
    return (
        {"input_ids": batch["tokens"][None], "position_ids": positions_T[None]},
        trained_S - 1,
        batch["tokens"][trained_S],
    )


def bare_step(checkpoint: Path, parts: list[tuple[dict[str, Tensor], Tensor, Tensor]]) -> Step:
    """Returns a function that runs forward, backward and the optimizer step in plain transformers and torch."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIMIZER.lr, weight_decay=OPTIMIZER.weight_decay, fused=True)
    num_trained = sum(targets_S.numel() for _, _, targets_S in parts)

    def step() -> None:
        for inputs, cells_S, targets_S in parts:
            hidden_TH = model.model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)
            logits_SV = model.lm_head(hidden_TH[cells_S])
            (cross_entropy(logits_SV, targets_S, reduction="sum") / num_trained).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def logprob_steps(num_scores: int) -> dict[str, Step]:
    """Functions that run only the log-probs, forward and backward: chunked or from full logits, with entropies or
    without them."""
    hidden_SH = torch.randn(num_scores, MODEL["hidden_size"], requires_grad=True)
    weight_VH = torch.randn(MODEL["vocab_size"], MODEL["hidden_size"]).mul_(0.02).requires_grad_()
    targets_S = torch.randint(MODEL["vocab_size"], (num_scores,))

    def chunked(with_entropy: bool) -> Step:
        return lambda: (
            chunked_logprobs(
                hidden_SH, weight_VH, targets_S, temperature=1.0, chunk_tokens=CHUNK_TOKENS, with_entropy=with_entropy
            )[0]
            .sum()
            .backward()
        )

    def bare() -> None:
        cross_entropy(hidden_SH @ weight_VH.T, targets_S, reduction="sum").backward()

    return {
        "chunked log-probs and entropy": chunked(True),
        "chunked log-probs": chunked(False),
        "full logits and entropy": lambda: (
            full_logprobs(hidden_SH, weight_VH, targets_S, temperature=1.0)[0].sum().backward()
        ),
        "full logits, cross-entropy": bare,
    }


def alternate(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Median seconds per step; all steps alternate, and the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if i > 0:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    main()
