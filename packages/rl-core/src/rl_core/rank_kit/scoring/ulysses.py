"""Ulysses sequence parallelism (Jacobs et al. 2023, arXiv 2309.14509).

Every rank of a group holds an even slice of the tokens and runs all layers on it. In front of attention an all-to-all
trades tokens for heads, so that a rank attends in whole sequences with its part of the heads; behind it another one
trades back. Log-probs are put together again over the group; their gradient goes back to the own slice only, and the
ranks' parameter gradients add up to the whole.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.errors import ConfigError
from rl_core.rank_kit.scoring.rank_mesh import UlyssesGroup


def require_heads(num_heads: int, group: UlyssesGroup, where: str) -> None:
    """Raises ConfigError unless every rank gets as many query heads."""
    if num_heads % group.size:
        fitting = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
        raise ConfigError(
            f"{where}.sequence_parallel_size: {group.size} ranks cannot share {num_heads} attention heads evenly; "
            f"choose one of {fitting}"
        )


def heads_for_tokens(tensor: Tensor, group: UlyssesGroup) -> Tensor:
    """[B, heads, L / size, D] of this rank's tokens to [B, heads / size, L, D] of its heads.

    Key/value heads that are fewer than the ranks, or not a multiple of them, are repeated as often as it takes.
    """
    num_heads = tensor.shape[1]
    repeats = math.lcm(num_heads, group.size) // num_heads
    return _exchange(tensor.repeat_interleave(repeats, 1) if repeats > 1 else tensor, 1, 2, group)


def tokens_for_heads(tensor: Tensor, group: UlyssesGroup) -> Tensor:
    """[B, heads / size, L, D] of this rank's heads to [B, heads, L / size, D] of its tokens."""
    return _exchange(tensor, 2, 1, group)


def sum_over_ranks(tensor: Tensor, group: UlyssesGroup) -> Tensor:
    """The sum over the group, on every rank. The gradient is that of this rank's share alone: every rank computes the
    same loss from the sum, and each sends it back through what it added."""
    return _SumOverRanks.apply(tensor, group)  # pyright: ignore[reportReturnType]


def _exchange(tensor: Tensor, split: int, join: int, group: UlyssesGroup) -> Tensor:
    return _Exchange.apply(tensor, split, join, group)  # pyright: ignore[reportReturnType]


def _all_to_all(tensor: Tensor, split: int, join: int, group: UlyssesGroup) -> Tensor:
    # gloo corrupts chunks that are not contiguous; a stack copies them.
    sent = torch.stack(tensor.chunk(group.size, split))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group.group)
    return torch.cat(received.unbind(0), join)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, split: int, join: int, group: UlyssesGroup) -> Tensor:
        ctx.settings = join, split, group
        return _all_to_all(tensor, split, join, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all_to_all(grad, *ctx.settings), None, None, None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: UlyssesGroup) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group.group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None
