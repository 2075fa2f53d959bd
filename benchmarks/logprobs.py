"""Chunked log-probs and entropies compared with full logits at a realistic vocabulary size: memory and time.

Each variant runs forward and backward in its own process. Memory is how much that process's peak resident size grows
after the inputs, the weight and their gradients have been allocated. Goals: at most 1/6 of the memory and at most 1.5
times the time that full logits need.

Run: python benchmarks/logprobs.py [--tokens 4096] [--threads 1]
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from multiprocessing.connection import Connection

import click
import torch

from rl_core.algorithms import chunked_logprobs, full_logprobs

VOCABULARY, HIDDEN = 151_936, 896


def measure(chunk_tokens: int, tokens: int, threads: int, answer: Connection) -> None:
    """Sends seconds and bytes of one forward and backward pass; `chunk_tokens=0` computes full logits."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(tokens, HIDDEN, generator=generator).requires_grad_()
    weight_VH = (0.02 * torch.randn(VOCABULARY, HIDDEN, generator=generator)).requires_grad_()
    targets_T = torch.randint(VOCABULARY, (tokens,), generator=generator)
    hidden_TH.grad, weight_VH.grad = torch.ones_like(hidden_TH), torch.ones_like(weight_VH)
    before = _peak_bytes()
    started = time.perf_counter()
    if chunk_tokens:
        logprobs_T, entropies_T = chunked_logprobs(
            hidden_TH, weight_VH, targets_T, temperature=1.0, chunk_tokens=chunk_tokens
        )
    else:
        logprobs_T, entropies_T = full_logprobs(hidden_TH, weight_VH, targets_T, temperature=1.0)
    assert entropies_T is not None
    (logprobs_T.sum() + 0.01 * entropies_T.sum()).backward()
    answer.send((time.perf_counter() - started, _peak_bytes() - before))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@click.command()
@click.option("--tokens", default=4096, show_default=True)
@click.option("--threads", default=1, show_default=True)
def main(tokens: int, threads: int) -> None:
    """Prints the seconds and bytes of each variant and their ratios to full logits."""
    print(f"{tokens} tokens, hidden {HIDDEN}, vocabulary {VOCABULARY}, {threads} thread(s)")
    full: tuple[float, float] | None = None
    for chunk_tokens in (0, 1024, 512, 256):
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=measure, args=(chunk_tokens, tokens, threads, theirs)
        )
        process.start()
        theirs.close()
        seconds, size = ours.recv()
        process.join()
        full = full or (seconds, size)
        name = f"chunks of {chunk_tokens}" if chunk_tokens else "full logits"
        ratios = f"time {seconds / full[0]:.2f}   memory 1/{full[1] / size:.1f}"
        print(f"{name:16} {seconds:7.1f} s {size / 2**20:8.0f} MiB   {ratios}", flush=True)


if __name__ == "__main__":
    main()
