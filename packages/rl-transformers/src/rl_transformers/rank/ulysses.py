"""Ulysses sequence parallelism (Jacobs et al. 2023, arXiv 2309.14509).

Every rank of a group holds an equal slice of the tokens and runs all layers on it. Before attention, an all-to-all
exchanges tokens for heads, so that a rank computes attention over whole sequences for its part of the heads. After
attention, another all-to-all exchanges heads for tokens. Log-probs are gathered over the group. Their gradient flows
only to a rank's own slice, and the parameter gradients of the ranks sum to the whole gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.errors import ConfigError
from rl_transformers.rank.rank_mesh import UlyssesGroup


def require_heads(num_heads: int, group: UlyssesGroup, where: str) -> None:
    """Raises ConfigError unless all ranks get the same number of query heads."""
    if num_heads % group.size:
        fitting = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
        raise ConfigError(
            f"{group.size} ranks cannot share {num_heads} attention heads evenly; choose one of {fitting}",
            key=f"{where}.sequence_parallel_size",
        )


def heads_for_tokens(tensor: Tensor, group: UlyssesGroup) -> Tensor:
    """Exchanges this rank's tokens, [B, heads, L / size, D], for its heads of all tokens, [B, heads / size, L, D].

    Key/value heads are repeated until their number is a multiple of the number of ranks.
    """
    num_heads = tensor.shape[1]
    repeats = math.lcm(num_heads, group.size) // num_heads
    return _exchange(tensor.repeat_interleave(repeats, 1) if repeats > 1 else tensor, 1, 2, group)


def tokens_for_heads(tensor: Tensor, group: UlyssesGroup) -> Tensor:
    """Exchanges this rank's heads, [B, heads / size, L, D], for all heads of its tokens, [B, heads, L / size, D]."""
    return _exchange(tensor, 2, 1, group)


def sum_over_ranks(tensor: Tensor, group: UlyssesGroup) -> Tensor:
    """Returns the sum over the group on every rank. Backward is the identity: every rank computes the same loss from
    the sum, and backpropagates only through its own summand."""
    return _SumOverRanks.apply(tensor, group)  # pyright: ignore[reportReturnType]


def _exchange(tensor: Tensor, split: int, join: int, group: UlyssesGroup) -> Tensor:
    return _Exchange.apply(tensor, split, join, group)  # pyright: ignore[reportReturnType]


def _all_to_all(tensor: Tensor, split: int, join: int, group: UlyssesGroup) -> Tensor:
    # gloo corrupts chunks that are not contiguous; stacking copies them.
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
