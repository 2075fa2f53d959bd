"""Runs one call's micro-batches through Megatron's pipeline schedules, for gradients or only for scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rl_megatron.rank.micro_batch import MicroBatch

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Around:
    """Contexts around a schedule and around each of its forward passes; this base class does nothing."""

    def schedule(self, micro_batches: Sequence[MicroBatch], *, forward_only: bool) -> AbstractContextManager[None]:
        """Entered once per call; exited even if the call fails."""
        return nullcontext()

    def forward(self, chunk: Any, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """Entered for each micro-batch on each of this rank's model chunks; recomputation happens later, outside of
        it."""
        return nullcontext()


class Finish(Protocol[T_co]):
    """Turns a micro-batch's hidden states [B, S, H] on the last stage into a loss to minimise and a value to report."""

    def __call__(self, micro_batch: MicroBatch, hidden_BSH: Tensor) -> tuple[Tensor, T_co]: ...


def run_schedule(
    chunks: Sequence[Any],
    micro_batches: Sequence[MicroBatch],
    finish: Finish[T],
    *,
    forward_only: bool,
    around: Around,
) -> list[T]:
    """Runs all micro-batches; returns the reports of `finish`, in order, on the last stage, and an empty list
    elsewhere.

    Gradients are added to the chunks' main gradients. They are summed over ranks later, because calls accumulate.
    """

    def forward_step(iterator: Iterator[MicroBatch], chunk: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        micro_batch = next(iterator)
        with around.forward(chunk, micro_batch):
            output = chunk(
                micro_batch.tokens_BS,
                micro_batch.positions_BS,
                None,
                packed_seq_params=micro_batch.segments,
            )
        # With recomputation a chunk may return a transposed view, which cannot be sent to the next stage.
        return output.contiguous(), partial(_finished, finish, micro_batch)

    iterators = [iter(micro_batches) for _ in chunks]
    first = micro_batches[0].tokens_BS
    config = chunks[0].config
    with around.schedule(micro_batches, forward_only=forward_only), torch.set_grad_enabled(not forward_only):
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=len(micro_batches),
            # Both are sizes before context ranks split the sequences; ignored if stages send each other shapes.
            seq_length=first.shape[1] * config.context_parallel_size,
            micro_batch_size=first.shape[0],
            forward_only=forward_only,
        )


def _finished(finish: Finish[T], micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, T]:
    loss, report = finish(micro_batch, output)
    # The second value is the token count that Megatron would divide by; here nothing is divided.
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), report
