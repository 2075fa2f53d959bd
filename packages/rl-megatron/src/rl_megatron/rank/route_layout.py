"""Computes which tokens a rank's routers see and in which order, and chooses experts for padding. Imports no torch."""

from __future__ import annotations

import numpy as np

from rl_core.errors import ConfigError
from rl_core.layout.balancing import IntArray
from rl_core.layout.slices import even_slice


def router_order(index_BS: IntArray, rank: int, size: int) -> IntArray:
    """Returns which of a context rank's tokens the routers of one tensor rank see, in the routers' order.

    Megatron interleaves rows (the first tokens of all rows, then all second tokens, …), and tensor ranks take
    contiguous parts of the result (sequence parallelism).

    Args:
        index_BS: token indices of a rank's B rows (one, when packed) of S positions.
        rank: tensor rank.
        size: number of tensor ranks; divides S.

    Returns:
        int64 [B · S / size].
    """
    return np.ascontiguousarray(index_BS.T[even_slice(index_BS.shape[1], rank, size)]).ravel()


def deal_padding(
    num_padding: int, *, first: int, num_experts: int, expert_ranks: int, experts_per_token: int
) -> IntArray:
    """Chooses experts for padding tokens: round-robin over the expert ranks and, on each rank, over its experts.

    The router would send all padding to the same experts. With round-robin, the experts' numbers of padding tokens
    differ by at most one.

    Args:
        num_padding: P, number of padding tokens that one rank's routers see.
        first: the round-robin starts as if this many padding tokens came before; different on each rank of a pipeline
            stage, so that not all ranks start with the same experts.
        num_experts: number of experts of a layer.
        expert_ranks: number of ranks that split the experts, a divisor of `num_experts`; each has consecutive experts.
        experts_per_token: K, number of experts that compute each token.

    Returns:
        int64 [P, K]: K different experts for each padding token.

    Raises:
        ConfigError: a token cannot have K different experts.
    """
    if experts_per_token > num_experts:
        raise ConfigError(f"got {experts_per_token} experts per token, but a layer has {num_experts}")
    numbers = first + np.arange(num_padding)
    slots = (numbers[:, None] * experts_per_token + np.arange(experts_per_token)) % num_experts
    return (slots % expert_ranks) * (num_experts // expert_ranks) + slots // expert_ranks
