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
        """Returns the context of one run of a schedule; it is exited even if the run fails."""
        return nullcontext()

    def forward(self, chunk: Any, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """Returns the context of one micro-batch's forward pass through one of this rank's model chunks. Recomputation
        in backward happens outside this context."""
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
    """Runs all micro-batches. On the last stage, returns the reports of `finish` in the order of the micro-batches; on
    other stages, an empty list.

    Unless `forward_only`, gradients are added to the chunks' main gradients. The main gradients are summed over ranks
    only in the optimizer step, because several calls may accumulate gradients.
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
        # With recomputation, a chunk may return a transposed view, which cannot be sent to the next stage.
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
            # Sizes before context ranks split the sequences. Megatron ignores both with `variable_seq_lengths`.
            seq_length=first.shape[1] * config.context_parallel_size,
            micro_batch_size=first.shape[0],
            forward_only=forward_only,
        )


def _finished(finish: Finish[T], micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, T]:
    loss, report = finish(micro_batch, output)
    # Megatron adds up the second value as a number of tokens, for a later division that is not made here.
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), report
